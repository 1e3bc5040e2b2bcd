"""What the functions of the library do with their arguments.

Comparisons are imported when they are asked for: `attend` does not need them.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from attention_service.attention.cost import arrays_of
from attention_service.attention.plan import Plan
from attention_service.attention.result import Result
from attention_service.attention.spec import SOURCES, AttentionSpec
from attention_service.backends.base import Backend, Check, Program
from attention_service.backends.numpy.small import fits
from attention_service.backends.registry import Backends
from attention_service.backends.threads import single_threaded_blas
from attention_service.codecs.array_objects import as_numpy
from attention_service.codecs.decoded import Decoded
from attention_service.errors import InvalidArray, InvalidValue, Overflow
from attention_service.library.frames import with_labels
from attention_service.library.result import AttentionResult
from attention_service.pipeline.plan_key import keep, plan_key
from attention_service.pipeline.prepare import make_spec_and_plan
from attention_service.runtime.machine import cpu_count
from attention_service.schemas.compare import ActualArrays, CompareRequest

if TYPE_CHECKING:
    from attention_service.comparison.truth import Question
    from attention_service.library.report import Report

# Operations of a request whose products OpenBLAS computes on the thread that calls it: it shares out sums of more than
# ten thousand products. A batch may have more operations than its entries: these are cut into the same tiles then, too,
# as of so few operations no thread gets a part.
BLAS_ALONE: Final = 2**15
# Plans of calls whose only arrays are the sources, by shapes, types and options, as a service keeps them.
_kept: Final[dict[Hashable, tuple[AttentionSpec, Plan, Program]]] = {}
# Elements of a matrix that OpenBLAS multiplies by a vector, and of a vector, on one thread; and products of elements in
# a product of matrices (interface/gemv.c and gemm.c of OpenBLAS 0.3).
MOST_SUMMED: Final = 9216
MOST_MULTIPLIED: Final = 2**18
# The fields of a request with their defaults, which need not be validated.
DEFAULTS: Final = {
    name: field.default for name, field in CompareRequest.model_fields.items() if name not in ("actual", "against")
}
# The arguments of a call by their names; `unknown` holds those that are no fields of a request.
Arguments = Mapping[str, Any]


def attend(arguments: Arguments) -> AttentionResult:
    """The result of `service.attend`. Errors: InvalidRequest of every kind."""
    return computed(_decoded(_fields(arguments)))


def computed(decoded: Decoded) -> AttentionResult:
    """The result of the fields of a request, by a plan that was kept, or a new one. Errors: as of attend."""
    key = plan_key(decoded)
    kept = None if key is None else _kept.get(key)
    if kept is None:
        spec, plan = make_spec_and_plan(decoded, allow_non_finite=True)
        sources: dict[str, Any] = spec.sources
        program = _program(spec, plan)
        if key is not None:
            size = sum(array.nbytes for array in arrays_of(plan))
            keep(_kept, key, (spec.without_sources(), plan, program), size)
    else:
        light, plan, program = kept
        sources = {name: decoded.fields[name] for name in SOURCES if name in decoded.fields}
        spec = light._replace(**sources)
    try:
        found = program(sources, None)
    except Overflow as error:
        raise _explained(error, spec) from None
    return AttentionResult(found, spec, plan)


def _program(spec: AttentionSpec, plan: Plan) -> Program:
    """What computes a plan, on all processors if it is large. Errors: UnknownBackend."""
    chosen = backends().choose(spec.backend, spec.device)
    light = spec.without_sources()
    if chosen.name != "numpy" or plan.flops <= BLAS_ALONE or _is_alone(plan):
        return chosen.program(plan, light)

    def program(sources: Mapping[str, np.ndarray], check: Check | None = None) -> Result:
        with all_processors() as backend:
            return backend.program(plan, light)(sources, check)

    return program


def _is_alone(plan: Plan) -> bool:
    """True if OpenBLAS computes each product of a plan on the thread that calls it."""
    h, _, b, q, k, d, e = plan.sizes
    is_small = b * h * max(q * k, q * d, k * d, k * e) <= MOST_SUMMED and q * k * max(d, e) <= MOST_MULTIPLIED
    return is_small and fits(plan)


def compare(arguments: Arguments) -> Report:
    """The report of `service.compare`. Errors: InvalidRequest of every kind."""
    from attention_service.comparison.compare import compare_question
    from attention_service.library.report import Report

    question = _question(arguments)
    with all_processors() as backend:
        takes_tensors = any(hasattr(value, "detach") for value in arguments.values())
        return Report.of(compare_question(question, backend), takes_tensors=takes_tensors)


def assert_attention(arguments: Arguments) -> Report:
    """The report of `service.assert_attention`. Errors: those of `checked`, InvalidRequest of every kind."""
    __tracebackhide__ = True
    from attention_service.library.assertion import checked

    must_show, rows = arguments["must_show"], positive(arguments["rows"], "/rows")
    if must_show not in ("options", None):
        raise InvalidValue.of("/must_show", 'the text "options", or None', must_show)
    compared = {name: value for name, value in arguments.items() if name not in ("must_show", "rows")}
    if rows is None:
        return checked(compare(compared), must_show)
    return _right_rows(compared, rows) or checked(compare(compared), None)


def positive(given: Any, pointer: str) -> int | None:
    """A positive integer of any type, or None. Errors: InvalidValue."""
    if given is None:
        return None
    count = 0
    if not isinstance(given, bool):
        with suppress(TypeError):
            count = operator.index(given)
    if count < 1:
        raise InvalidValue.of(pointer, "a positive integer, or None", given)
    return count


def _right_rows(arguments: Arguments, rows: int) -> Report | None:
    """The report on these rows of each head; None if they are not all right, or cannot be judged alone."""
    from attention_service.comparison.rows import compare_rows
    from attention_service.library.report import Report

    question = _question(arguments)
    with all_processors() as backend:
        found = compare_rows(question, backend, rows)
    return None if found is None else Report.of(found)


def _question(arguments: Arguments) -> Question:
    """The question of a comparison. Errors: InvalidRequest of every kind."""
    from attention_service.comparison.question import make_question

    given = _fields(arguments)
    for name in ("actual", "against"):
        if arguments[name] is not None:
            given[name] = as_numpy(named(arguments[name]), f"/{name}")
    return make_question(_decoded(given))


@contextmanager
def all_processors() -> Iterator[Backend]:
    """The NumPy backend with a thread for each processor, each with a single-threaded BLAS.

    BLAS's own threads wait for each other without sleeping: beside another busy process that takes many times as long.
    """
    with single_threaded_blas():
        yield _of_process(os.getpid())


@cache
def _of_process(process: int) -> Backend:
    """The backend of a process: a fork of it has none of its threads, and locks that nobody opens."""
    return Backends(threads=cpu_count()).choose("numpy", "cpu")


@cache
def backends() -> Backends:
    """The backends for small requests and for torch, with the threads that their libraries start by themselves."""
    return Backends()


def named(actual: Any) -> Mapping[str, Any]:
    """What a kernel returned, by name: a tuple is output and logsumexp, anything but a dict the output.

    Of a result of `attend`, whatever can be compared.
    """
    if isinstance(actual, AttentionResult):
        return {name: actual[name] for name in ActualArrays.model_fields if name in actual}
    if isinstance(actual, tuple) and len(actual) == 2:
        return dict(zip(("output", "logsumexp"), actual, strict=True))
    return actual if isinstance(actual, Mapping) else {"output": actual}


def _fields(arguments: Arguments) -> dict[str, Any]:
    """The fields of a request that are not None, arrays as ndarrays, and the unknown arguments as they are."""
    given = {
        name: _with_numbers(as_numpy(value, f"/{name}"))
        for name, value in with_labels(arguments).items()
        if value is not None and name in DEFAULTS and value is not DEFAULTS[name]
    }
    return given | {name: value for name, value in arguments["unknown"].items() if value is not None}


def _explained(error: Overflow, spec: AttentionSpec) -> Overflow | InvalidArray:
    """The error, or InvalidArray for an input with inf or NaN: these are no numbers that became too large."""
    past = {"past_key": spec.past_key, "past_value": spec.past_value}
    for name, array in [*spec.sources.items(), *past.items()]:
        if array is None or np.isfinite(array).all():
            continue
        bad = np.argwhere(~np.isfinite(array))
        more = f" and in {len(bad) - 1} more places" if len(bad) > 1 else ""
        got = f"{float(array[tuple(bad[0])])} at {bad[0].tolist()}{more}"
        hint = "inf and NaN may stand only where every query is kept from seeing them, by a mask for example"
        return InvalidArray.at(f"/{name}", "finite numbers", got, hint)
    return error


def _with_numbers(value: Any) -> Any:
    """A field whose booleans and integers without axes are those of Python, as fields need them that are one."""
    if isinstance(value, dict):
        return {name: _with_numbers(inner) for name, inner in value.items()}
    return value.item() if isinstance(value, np.ndarray) and value.ndim == 0 and value.dtype.kind in "biu" else value


def _decoded(given: dict[str, Any]) -> Decoded:
    return Decoded(given, frozenset(name for name, field in given.items() if isinstance(field, list)))
