"""The engine without HTTP: `from service import attend`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from service.attention.result import Result
from service.backends.registry import Backends
from service.codecs.decoded import Decoded
from service.comparison.compare import compare_question
from service.comparison.question import make_question
from service.comparison.report import make_report
from service.comparison.tensors import as_numpy
from service.comparison.text import as_text
from service.pipeline.prepare import make_spec_and_plan
from service.schemas.compare import CompareReport


def attend(query: Any = None, key: Any = None, value: Any = None, **fields: Any) -> Result:
    """The exact attention of query, key and value, in any variant, with the intermediate results of `include`.

    Takes the fields of `POST /attention`, by name, as docs/attention.md describes them. Arrays are ndarrays or nested
    lists; an ndarray's type counts for the result's. Nested fields are dicts, like `window={"left": 3}`.

        result = attend(query, key, value, is_causal=True, include=["attention_weights", "logsumexp"])
        result.output, result["attention_weights"], result.metadata.fully_masked_rows

    Unlike over HTTP, a hidden key or value may be inf or NaN: what cannot be seen cannot poison. There is no limit on
    memory but the machine's.

    Errors: service.errors.InvalidRequest, with a pointer to each field at fault.
    """
    given = {name: array for name, array in (("query", query), ("key", key), ("value", value)) if array is not None}
    given |= fields
    untyped = frozenset(name for name, field in given.items() if isinstance(field, list))
    spec, plan = make_spec_and_plan(Decoded(given, untyped), allow_non_finite=True)
    return backends().choose(spec.backend, spec.device).program(plan, spec)(spec.sources, None)


def compare(actual: Any = None, **fields: Any) -> CompareReport:
    """The report on what an attention kernel returned: is it right, and if not, which mistake was made?

    Takes the fields of `POST /attention/compare`, as docs/compare.md describes them; arrays as `attend` takes them,
    and those of torch, JAX and other libraries as well.

    actual: the output; a tuple of output and logsumexp; a dict of arrays by their names in a response (output,
            logsumexp, attention_weights, …); or None to ask which mistakes the request could show

        report = compare(my_kernel(query, key, value), query=query, key=key, value=value, is_causal=True)
        report.verdict.status, report.hypotheses[0].name

    Errors: service.errors.InvalidRequest, with a pointer to each field at fault.
    """
    given = {name: as_numpy(field) for name, field in fields.items() if field is not None}
    if actual is not None:
        given["actual"] = as_numpy(_named(actual))
    untyped = frozenset(name for name, field in given.items() if isinstance(field, list))
    question = make_question(Decoded(given, untyped))
    return make_report(compare_question(question, backends().choose("numpy", "cpu")))


def _named(actual: Any) -> Mapping[str, Any]:
    """What a kernel returned, by name: a tuple is output and logsumexp, anything but a dict the output."""
    if isinstance(actual, tuple) and len(actual) == 2:
        return dict(zip(("output", "logsumexp"), actual, strict=True))
    return actual if isinstance(actual, Mapping) else {"output": actual}


def assert_attention(actual: Any, **fields: Any) -> CompareReport:
    """Raise AssertionError unless an output is right, or at least not known to be wrong. Arguments: as of `compare`

    The message of the error is the report as text. An output whose request shows few mistakes passes: see
    `report.power`.
    """
    report = compare(actual, **fields)
    if report.verdict.status in ("imprecise", "wrong"):
        raise AssertionError(as_text(report))
    return report


@cache
def backends() -> Backends:
    """The backends of `attend`, with the threads that their libraries start by themselves."""
    return Backends()
