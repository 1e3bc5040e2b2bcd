"""Stored layers: projections and options of attention layers in files, which requests name.

A layer NAME is the two files NAME.safetensors (its arrays, by the dotted names of a request) and NAME.json (options,
source, and the hash of the other file).

- layer: a layer in memory; files, tensors: its two files, read and written; checks: is it one; names: what it is called
- store: the layers of a directory, read when requests name them
- importing: a layer from a checkpoint, of the families whose rows are in `families` and functions in `decoders`, with
  checkpoint, module: its tensors; models: what configurations say; positions: rotary embeddings
"""
