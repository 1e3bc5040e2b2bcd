"""assert_attention(), with the parameters of compare()."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from attention_service.errors import InvalidValue
from attention_service.library.functions import compare
from attention_service.schemas.compare import CompareReport

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")


class WeakInputs(AssertionError):
    """Nothing wrong was seen, but the inputs cannot show whether an option of the request is applied."""


def _like(
    other: Callable[Parameters, Returned], **more: Any
) -> Callable[[Callable[..., Returned]], Callable[Parameters, Returned]]:
    """Show the parameters of another function, of which the first one must be given, to checkers and notebooks.

    more: parameters that the other does not have, with their defaults
    """
    first, *others, rest = inspect.signature(other).parameters.values()
    own = [inspect.Parameter(name, first.KEYWORD_ONLY, default=default) for name, default in more.items()]
    shown = inspect.Signature([first.replace(default=first.empty), *others, *own, rest])

    def decorate(function: Callable[..., Returned]) -> Callable[Parameters, Returned]:
        found = wraps(other, assigned=("__annotations__",))(function)
        found.__signature__ = shown  # type: ignore[attr-defined]
        return found

    return decorate


@_like(compare, must_show="options")
def assert_attention(actual: Any, *arguments: Any, must_show: str | None = "options", **fields: Any) -> CompareReport:
    """Raise AssertionError unless an output is right, or at least not known to be wrong; else return the report.

        assert_attention(my_kernel(query, key, value), query, key, value, is_causal=True)

    The message of the error is the report as text. All other arguments are those of `attend`, and `logsumexp_base`,
    `tolerance` and `legal` those of `compare`.

    Args:
        actual: The output; a tuple of output and logsumexp; a dict of arrays by their names in a response (output,
            logsumexp, attention_weights, …), which the result of `attend` is, too.
        must_show: "options": raise WeakInputs, an AssertionError, where a kernel could ignore an option of the request
            unseen. None: pass, whatever the inputs can show.

    Errors: attention_service.errors.InvalidRequest, with a pointer to each field at fault.
    """
    if must_show not in ("options", None):
        raise InvalidValue.of("/must_show", "options, or None", must_show)
    __tracebackhide__ = True  # pytest then shows the line of the test
    report = compare(actual, *arguments, **fields)
    if report.verdict.status in ("imprecise", "wrong"):
        from attention_service.comparison.text import as_text

        raise AssertionError(as_text(report))
    if must_show and report.power.options:
        better = report.next_input
        seed = "" if better is None else f"; inputs of seed {better.seed} show {', '.join(better.kills)}"
        unseen = ", ".join(report.power.options)
        raise WeakInputs(f"Nothing wrong was seen; these inputs cannot show: {unseen}{seed} (see report.next_input)")
    return report
