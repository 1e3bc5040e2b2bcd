"""The one path of every request: decode, prepare, admit, compute, encode."""
