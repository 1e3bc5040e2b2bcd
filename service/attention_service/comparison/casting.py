"""The numbers that attention is computed from: those of a request, in the types that the service casts them to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final, TypeVar

import numpy as np

from attention_service.attention.arrays import cast_and_norm, compute_dtype
from attention_service.attention.spec import SOURCES, AttentionSpec

T = TypeVar("T")

# Fields that are cast to the type of the request, and those that are cast to the type that is computed in.
OPERANDS: Final = (*SOURCES, "past_key", "past_value")
OTHERS: Final = ("bias", "alibi_slopes", "sinks", "gate")
MAPS: Final = ("query", "key", "value", "output", "gate")


def as_cast(spec: AttentionSpec, dtype: np.dtype) -> AttentionSpec:
    """The request with its numbers as POST /attention casts them first. dtype: of the request, whose plan is valid

    Scales stay as they are. Errors: InvalidArray, Overflow for an operand that the type cannot hold.
    """
    computing = compute_dtype(dtype)
    changed: dict[str, Any] = {}
    with np.errstate(all="ignore"):
        for name in OPERANDS:
            if (array := getattr(spec, name)) is not None:
                changed[name] = cast_and_norm(array, dtype, f"/{name}", non_finite=spec.allow_non_finite)[0]
        for name in OTHERS:
            if (array := getattr(spec, name)) is not None:
                changed[name] = array.astype(computing, copy=False)
    if spec.projection is not None:
        maps = {name: _in(getattr(spec.projection, name), dtype, "weight", "kernel", "bias") for name in MAPS}
        changed["projection"] = replace(spec.projection, **maps)
    for name in ("query_norm", "key_norm", "value_norm"):
        changed[name] = _in(getattr(spec, name), computing, "weight", "bias")
    changed["rotary"] = _in(spec.rotary, computing, "cos", "sin")
    return spec._replace(**changed)


def _in(given: T, dtype: np.dtype, *names: str) -> T:
    """A part of a request with some of its arrays in a type; None stays None."""
    arrays = {
        name: array.astype(dtype, copy=False) for name in names if (array := getattr(given, name, None)) is not None
    }
    return replace(given, **arrays) if arrays else given  # type: ignore[type-var]  # arrays are of a dataclass
