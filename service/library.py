"""The engine without HTTP: `from service import attend`."""

from __future__ import annotations

from functools import cache
from typing import Any

from service.attention.result import Result
from service.backends.registry import Backends
from service.codecs.decoded import Decoded
from service.pipeline.prepare import make_spec_and_plan


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


@cache
def backends() -> Backends:
    """The backends of `attend`, with the threads that their libraries start by themselves."""
    return Backends()
