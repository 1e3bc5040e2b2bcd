"""compare_call(), assert_call() and judge_recording(): what functions of other libraries return, judged by their own
arguments.
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from attention_service.codecs.array_objects import as_numpy
from attention_service.engines.table import FUNCTIONS
from attention_service.errors import InvalidRequest, InvalidValue, MissingField
from attention_service.library import calls
from attention_service.library.assertion import checked
from attention_service.library.engines import CallResult, called
from attention_service.schemas.compare import CompareReport, Judging
from attention_service.schemas.names import near
from attention_service.schemas.validate import validate

if TYPE_CHECKING:
    from attention_service.comparison.calls.question import CallQuestion
    from attention_service.library.recording_verdicts import CallVerdict
    from attention_service.library.report import Report

# The packages of a library, the first that a module is in, with the version that they are of.
PACKAGES: Final[Mapping[str, tuple[str, int | None]]] = {
    "flash_attn.cute": ("flash_attn", 4),
    "flash_attn_interface": ("flash_attn", 3),
    "flash_attn": ("flash_attn", 2),
    "flashinfer": ("flashinfer", None),
    "torch": ("torch", None),
}


def compare_call(
    function: str,
    /,
    *,
    actual: Any = None,
    version: int | None = None,
    dtype: str | None = None,
    tolerance: Mapping[str, Any] | None = None,
    legal: Sequence[str] | None = None,
    time_limit: float | None = None,
    reference: bool | None = None,
    **arguments: Any,
) -> CompareReport:
    """The report on what a function of FlashAttention, FlashInfer, torch or vLLM returned, by its own arguments.

        report = compare_call("flash_attn.flash_attn_varlen_func", actual=output, q=q, k=k, v=v, cu_seqlens_q=bounds, …)
        report.verdict.status, report.hypotheses[0].name

    Mistakes are looked for only if it is wrong. Rows that belong to no sequence are not judged.

    Args:
        function: Its name in docs/coming-from.md.
        actual: What it returned, in its own axes and base: the output; a tuple of output and logsumexp, of which more
            is left out; a dict of one of them or both; or None to ask which mistakes the call could show.
        version: Of FlashAttention: 2, 3 or 4. Default: the names of all.
        dtype: Type whose rounding is legal. Default: that of the output.
        tolerance, legal, time_limit: As of `compare`.
        reference: True adds what is right to the report, as `actual` has it: `report.reference["output"]`.
        arguments: Those of the function. None stands for one that is left out.

    Errors: attention_service.errors.InvalidRequest, with a pointer to each argument at fault.
    """
    __tracebackhide__ = True
    try:
        fields = {"version": version, "dtype": dtype, "tolerance": tolerance, "legal": legal, "time_limit": time_limit}
        return _compared(_question(function, arguments, actual, fields | {"reference": reference}))
    except InvalidRequest as error:
        raise error.with_traceback(None) from None


def assert_call(
    function: Callable[..., Any],
    /,
    *positional: Any,
    call: str | None = None,
    version: int | None = None,
    dtype: str | None = None,
    tolerance: Mapping[str, Any] | None = None,
    legal: Sequence[str] | None = None,
    time_limit: float | None = None,
    rows: int | None = None,
    **arguments: Any,
) -> CompareReport:
    """Run a function, and raise AssertionError unless what it returned is right; else return the report.

        assert_call(flash_attn_varlen_func, q=q, k=k, v=v, cu_seqlens_q=bounds, cu_seqlens_k=bounds, causal=True)

    The error says what is wrong in a few lines, its `report` all. Tensors may be on any device.

    Args:
        function: A function of a library, or one that takes the arguments of one. It is called with those that it has
            a parameter for: `wrapper.run` of FlashInfer without those of its constructor and of `plan`, which are
            needed, too. It returns what `actual` of `compare_call` may be.
        positional: Its first arguments, by their order.
        call: The name of the function that it stands for. Default: its own.
        version: As of `compare_call`. Default: that of the package that it is from.
        dtype, tolerance, legal, time_limit: As of `compare_call`.
        rows: Judge only so many rows of each head, where mistakes sit. All are compared if one is wrong. Default: all.
        arguments: Those of the function by their names.

    Errors: attention_service.errors.InvalidRequest, with a pointer to each argument at fault.
    """
    __tracebackhide__ = True
    try:
        name, version = named(function, call, version)
        arguments = _bound(function, positional, arguments)
        fields = {"version": version, "dtype": dtype, "tolerance": tolerance, "legal": legal, "time_limit": time_limit}
        count = calls.positive(rows, "/rows")
        _question(name, arguments, None, fields)  # arguments are refused before it runs
        if (actual := function(**taken(function, arguments))) is None:
            raise MissingField.at("/actual", "what the function returned", "None")
        report = _compared(_question(name, arguments, actual, fields, count))
        return checked(report, None)
    except InvalidRequest as error:
        raise error.with_traceback(None) from None


def judge_recording(
    path: str | os.PathLike[str],
    /,
    *,
    tolerance: Mapping[str, Any] | None = None,
    legal: Sequence[str] | None = None,
    time_limit: float | None = None,
    reference: bool | None = None,
) -> Iterator[CallVerdict]:
    """The verdicts on the calls that the flight recorder of FlashInfer wrote, one by one, in their order.

        for verdict in judge_recording("calls"):
            verdict.status, verdict.mistake, verdict.report

    `report` is that of `compare_call`, with arrays in the axes of the function. A call is read and judged when its
    verdict is asked for. One that cannot be read is `unreadable`: it has no report, and `message` says why.

    Args:
        path: The folder of a recording, or of one call in it: docs/engine-answers.md says how to make one. The format
            is that of flashinfer/api_logging.py, 0.7.2.
        tolerance, legal, time_limit, reference: As of `compare_call`, for each call.

    Warns: UserWarning if lines of the recording are cut off, whose calls may be missing.
    Errors: attention_service.errors.InvalidRequest for a folder without a recording, and other arguments; OSError.
    """
    __tracebackhide__ = True
    from attention_service.library.recording_verdicts import lost_lines, verdicts_on
    from attention_service.library.recordings import is_recording, read_recording

    try:
        given = {"tolerance": tolerance, "legal": legal, "time_limit": time_limit, "reference": reference}
        judging = validate(Judging, as_numpy({name: value for name, value in given.items() if value is not None}))
        if not is_recording(Path(path)):
            raise InvalidValue.at("/path", "the folder of a recording", str(path))
        recording = read_recording(Path(path).resolve())
    except InvalidRequest as error:
        raise error.with_traceback(None) from None
    if recording.lost:
        warnings.warn(lost_lines(recording.lost), stacklevel=2)
    return verdicts_on(recording.calls, judging)


def _question(
    function: str,
    arguments: Mapping[str, Any],
    actual: Any,
    fields: Mapping[str, Any],
    rows: int | None = None,
) -> CallQuestion:
    """The question about a call. fields: others of its comparison. Errors: InvalidRequest of every kind."""
    from attention_service.comparison.calls.request import call_question

    decoded = called(function, arguments, actual=None if actual is None else returned(actual), **fields)
    return replace(call_question(decoded, nullcontext), rows=rows)


def _compared(asked: CallQuestion) -> Report:
    """The report on a call. Errors: InvalidRequest of every kind."""
    from attention_service.comparison.calls.compare import compare_call as judged
    from attention_service.library.report import Report

    with calls.all_processors() as backend:
        return Report.of_call(judged(asked, backend))


def returned(actual: Any) -> dict[str, np.ndarray]:
    """What a function returned, by name. Errors: InvalidArray."""
    if isinstance(actual, CallResult):
        actual = actual[:2]
    if isinstance(actual, list | tuple) and len(actual) > 1:  # FlashAttention returns a third one
        actual = dict(zip(("output", "logsumexp"), actual[:2], strict=True))
    given = actual if isinstance(actual, Mapping) else {"output": actual}
    found = {name: as_numpy(value, f"/actual/{name}") for name, value in given.items() if value is not None}
    return {name: np.asarray(value) for name, value in found.items()}


def named(function: Callable[..., Any], call: str | None, version: int | None) -> tuple[str, int | None]:
    """The name in the table of a function, and the version. Errors: InvalidValue, MissingField."""
    if not callable(function):
        raise InvalidValue.of("/function", "a function", function)
    if call is not None:
        return call, version
    module = str(getattr(function, "__module__", ""))
    own = str(getattr(function, "__qualname__", "")).removeprefix("PyCapsule.")  # of torch's builtins
    package = next((one for one in PACKAGES if module == one or module.startswith(f"{one}.")), None)
    if package is not None:
        library, known = PACKAGES[package]
        if (name := f"{library}.{own}") in FUNCTIONS:
            return name, known if version is None else version
    raise MissingField.at("/call", "the name of the function that it stands for", "none", near(own, FUNCTIONS))


def _bound(function: Callable[..., Any], positional: tuple[Any, ...], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments by their names. Errors: InvalidValue for positional ones whose names are not known."""
    if not positional:
        return dict(arguments)
    try:
        first = inspect.signature(function).bind_partial(*positional).arguments
    except (TypeError, ValueError):
        first = {}
    if len(first) != len(positional) or first.keys() & arguments.keys():
        raise InvalidValue.at("", "arguments by their names", f"{len(positional)} without one")
    return {**first, **arguments}


def taken(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that a function has parameters for; all if it does not say."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return dict(arguments)
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return dict(arguments)
    return {name: value for name, value in arguments.items() if name in parameters}
