"""Exact attention over HTTP: the output, the weights, and every number on the way."""

__version__ = "0.1.0"
