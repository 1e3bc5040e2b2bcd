"""From the fields of a request to what the engine computes: validated and planned, or known from an earlier request."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from service.attention.plan import Plan, make_plan
from service.attention.spec import SOURCES, AttentionSpec
from service.codecs.decoded import Body, Decoded
from service.pipeline.execution import Timings
from service.schemas.request import AttentionRequest
from service.schemas.validate import validate

# Kinds of requests that are remembered. A service meets few, and without arrays they are small.
MAX_KINDS: Final = 256
# Longest string, and longest list of names, of a request that is remembered.
MAX_TEXT: Final = 64
MAX_NAMES: Final = 16
SIMPLE: Final = (bool, int, float, type(None))


class Decoder(Protocol):
    """Reads bodies: a codec, or one of the inference protocol for one request."""

    @property
    def inline(self) -> int:
        """Bytes of a body that is decoded in well below a millisecond."""
        ...

    @property
    def quick(self) -> Callable[[Body], Decoded | None]:
        """Decodes a longer body if that takes only a few milliseconds; else returns None."""
        ...

    @property
    def packed(self) -> bool:
        """True if a body may be compressed."""
        ...

    @property
    def decode(self) -> Callable[[Body, int], Decoded]:
        """Decodes a body that unpacks to at most so many bytes. Errors: ServiceError of every kind."""
        ...

    def decode_bound(self, length: int, limit: int) -> int:
        """Bytes that a body of this length, and decoding it, take at most."""
        ...

    def decode_bytes(self, body: Body, limit: int) -> int:
        """Bytes that this body, and decoding it, take."""
        ...


class PreparedRequest(NamedTuple):
    """A request that is validated and planned.

    body, spec: its options; sources: the arrays that query, key and value come from
    shared: True if every request of the same kind has the same plan
    """

    body: AttentionRequest
    spec: AttentionSpec
    plan: Plan
    sources: Mapping[str, np.ndarray]
    shared: bool
    decoded: Decoded

    @property
    def nbytes(self) -> int:
        """Memory that its arrays take."""
        return self.decoded.nbytes


_known: dict[Hashable, tuple[AttentionRequest, AttentionSpec, Plan]] = {}


def decode(
    model: type[AttentionRequest], decoder: Decoder, body: Body, limit: int, timings: Timings
) -> PreparedRequest:
    """Decode and prepare a body. Errors: ServiceError of every kind."""
    return plan(model, decoder.decode(body, limit), timings)


def plan(model: type[AttentionRequest], decoded: Decoded, timings: Timings) -> PreparedRequest:
    """Prepare what was decoded, and take the times. Errors: InvalidRequest."""
    timings.step("decode")
    prepared = prepare(model, decoded)
    timings.step("plan")
    return prepared


def prepare(model: type[AttentionRequest], decoded: Decoded) -> PreparedRequest:
    """Validate and plan. Errors: InvalidRequest of every kind, with the pointer of the field at fault.

    Where only the sources are arrays, the plan follows from their shapes and types and a few options, and is remembered
    for the next request of the same kind.
    """
    fields = decoded.fields
    kind = _kind(model, decoded)
    known = None if kind is None else _known.get(kind)
    if known is not None:
        return PreparedRequest(*known, fields, True, decoded)
    body = validate(model, fields)
    spec = body.attention_spec(decoded.untyped)
    plan = make_plan(spec)
    shared = kind is not None and spec.scale != 0  # 0 would be found for -0
    if kind is not None and shared:
        if len(_known) >= MAX_KINDS:
            _known.clear()
        _known[kind] = body.without_sources(), spec.without_sources(), plan
    return PreparedRequest(body, spec, plan, spec.sources, shared, decoded)


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
