"""assert_attention(), with the parameters of compare()."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from attention_service.library.functions import compare
from attention_service.schemas.compare import CompareReport

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")


def _like(other: Callable[Parameters, Returned]) -> Callable[[Callable[..., Returned]], Callable[Parameters, Returned]]:
    """Show the parameters of another function, of which the first one must be given, to checkers and notebooks."""
    first, *others = inspect.signature(other).parameters.values()
    shown = inspect.Signature([first.replace(default=first.empty), *others])

    def decorate(function: Callable[..., Returned]) -> Callable[Parameters, Returned]:
        found = wraps(other, assigned=("__annotations__",))(function)
        found.__signature__ = shown  # type: ignore[attr-defined]
        return found

    return decorate


@_like(compare)
def assert_attention(actual: Any, *arguments: Any, **fields: Any) -> CompareReport:
    """Raise AssertionError unless an output is right, or at least not known to be wrong; else return the report.

        assert_attention(my_kernel(query, key, value), query, key, value, is_causal=True)

    The message of the error is the report as text. An output whose request shows few mistakes passes: see
    `report.power`. All other arguments are those of `attend`, and `logsumexp_base` and `tolerance` those of `compare`.

    Args:
        actual: The output; a tuple of output and logsumexp; a dict of arrays by their names in a response (output,
            logsumexp, attention_weights, …), which the result of `attend` is, too.

    Errors: attention_service.errors.InvalidRequest, with a pointer to each field at fault.
    """
    __tracebackhide__ = True  # pytest then shows the line of the test
    report = compare(actual, *arguments, **fields)
    if report.verdict.status in ("imprecise", "wrong"):
        from attention_service.comparison.text import as_text

        raise AssertionError(as_text(report))
    return report
