"""Stored layers: projections and options of attention layers in files, which requests name.

A layer NAME is the two files NAME.safetensors (its arrays, by the dotted names of a request) and NAME.json (options,
source, and the hash of the other file). `store` reads them for the service, `write` and the importers make them.
"""
