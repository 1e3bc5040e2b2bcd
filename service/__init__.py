"""Exact attention over HTTP: the output, the weights, and every number on the way."""

from service.library import attend
from service.version import __version__

__all__ = ["__version__", "attend"]
