"""Exact attention over HTTP: the output, the weights, and every number on the way."""

from typing import TYPE_CHECKING, Any

from service.version import __version__

if TYPE_CHECKING:
    from service.library import attend

__all__ = ["__version__", "attend"]


def __getattr__(name: str) -> Any:
    """Import `attend` when it is asked for: it takes half a second, and a health check has no use for it."""
    if name != "attend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from service.library import attend

    return attend
