"""From the fields of a request to what the engine runs: validated and planned, or known to be so from another."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from service.attention.plan import Plan, make_plan
from service.attention.spec import SOURCES, AttentionSpec
from service.codecs.decoded import Decoded
from service.schemas.request import AttentionRequest
from service.schemas.validate import validate

# A service meets few kinds of requests, and without arrays they are small.
MAX_KINDS: Final = 256
# Texts are remembered up to this length.
MAX_TEXT: Final = 64
# Lists of names up to this length.
MAX_NAMES: Final = 16
SIMPLE: Final = (bool, int, float, type(None))


class Job(NamedTuple):
    """A request that is ready to be computed.

    body, spec: its options, validated; sources: the arrays that query, key and value come from
    shared: whether others of its kind have the same plan
    """

    body: AttentionRequest
    spec: AttentionSpec
    plan: Plan
    sources: Mapping[str, np.ndarray]
    shared: bool


_known: dict[Hashable, tuple[AttentionRequest, AttentionSpec, Plan]] = {}


def make_job(model: type[AttentionRequest], decoded: Decoded) -> Job:
    """Validate and plan. Errors: InvalidRequest of every kind, with the pointer of the field at fault.

    Where only the sources are arrays, all of this follows from their shapes and types and a few options, and is
    remembered for the next request of the same kind.
    """
    fields = decoded.fields
    kind = _kind(model, decoded)
    known = None if kind is None else _known.get(kind)
    if known is not None:
        return Job(*known, fields, True)
    body = validate(model, fields)
    spec = body.attention_spec(decoded.untyped)
    plan = make_plan(spec)
    shared = kind is not None and spec.scale != 0  # 0 would be found for -0
    if kind is not None and shared:
        if len(_known) >= MAX_KINDS:
            _known.clear()
        _known[kind] = body.without_sources(), spec.without_sources(), plan
    return Job(body, spec, plan, spec.sources, shared)


def _kind(model: type[AttentionRequest], decoded: Decoded) -> Hashable | None:
    """All that validation and plan depend on; None where that is more than shapes and a few options."""
    parts: list[Hashable] = [model, decoded.untyped]
    for name, value in decoded.fields.items():
        kind = type(value)
        if kind is np.ndarray:
            if name not in SOURCES:
                return None
            parts.append((name, value.shape, value.dtype))
        elif kind in SIMPLE or (kind is str and len(value) <= MAX_TEXT):
            parts.append((name, kind, value))  # True is 1, but not where a number is asked for
        elif kind is list and len(value) <= MAX_NAMES and all(map(_is_short, value)):
            parts.append((name, *value))  # as in include
        else:
            return None
    return tuple(parts)


def _is_short(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MAX_TEXT
