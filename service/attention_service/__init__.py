"""Exact attention over HTTP: the output, the weights, and every number on the way."""

from typing import TYPE_CHECKING, Any

from attention_service.version import __version__

if TYPE_CHECKING:
    from attention_service.library import (
        assert_attention,
        assert_call,
        attend,
        call,
        compare,
        compare_call,
        judge_recording,
        merge,
    )

__all__ = [
    "__version__",
    "assert_attention",
    "assert_call",
    "attend",
    "call",
    "compare",
    "compare_call",
    "judge_recording",
    "merge",
]


def __getattr__(name: str) -> Any:
    """Import a function when it is asked for: it takes 0.3 s, and a health check has no use for it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from attention_service import library

    return getattr(library, name)


def __dir__() -> list[str]:
    """The public names, also those that are not imported yet."""
    return __all__
