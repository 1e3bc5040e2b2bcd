"""Exact attention over HTTP: the output, the weights, and every number on the way."""

__version__ = "0.1.0"

from service.library import attend

__all__ = ["__version__", "attend"]
