"""The Ray backend."""
