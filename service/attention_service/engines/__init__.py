"""The vocabularies of other attention engines: addressing in front of the mathematics, and back.

- tokens: where the tokens of each sequence are: in slots, in pages, as codes with factors
- places: tokens at any place of memory, as a kernel may read them that follows no table
- partial: states of parts of the keys, merged
- arguments: the arguments of a call, checked and read; call: a call as requests, and its answer from their results
- arguments.txt: a row for each argument; flash_attention, flashinfer, pytorch, vllm: what reads them; table: all
"""
