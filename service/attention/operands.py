"""Operands: the arrays that a plan is executed on, checked, in one type and one order of axes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from service.attention.arrays import measured
from service.attention.roles import past_shape
from service.attention.spec import AttentionSpec

if TYPE_CHECKING:
    from service.attention.plan import Plan


class Operands(NamedTuple):
    """Query, key and value as heads (b, h, l, d); or, where their role has a map, as tokens (b, l, in).

    past_key, past_value: (b, g, past, d or e), which stand before the new ones
    norms: bounds on the Euclidean norms of query, key and value, each with its past as one vector; inf if not known
    finite: True if all numbers are finite; others exist only if the request allows them
    """

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    past_key: np.ndarray | None
    past_value: np.ndarray | None
    norms: tuple[float, float, float]
    finite: bool


def make_operands(spec: AttentionSpec, plan: Plan, sources: Mapping[str, np.ndarray]) -> Operands:
    """The arrays of a request in the dtype of the plan, as views where possible.

    sources: the fields that query, key and value come from; all other fields are in spec

    NumPy may warn of overflow on the way. Errors: InvalidArray for anything but (finite) numbers, Overflow for a number
    that dtype cannot hold.
    """
    roles = (plan.roles.query, plan.roles.key, plan.roles.value)
    loaded: dict[str, tuple[np.ndarray, float]] = {}
    for role in roles:
        if role.field not in loaded:  # the same input may play several roles
            array = sources[role.field]
            loaded[role.field] = measured(array, plan.dtype, f"/{role.field}", non_finite=spec.allow_non_finite)
    (query, query_norm), (key, key_norm), (value, value_norm) = (loaded[role.field] for role in roles)
    past_key = past_value = None
    if plan.roles.past_length or spec.past_key is not None:
        past_key, past_key_norm = _past(spec, plan, "past_key")
        past_value, past_value_norm = _past(spec, plan, "past_value")
        key_norm, value_norm = math.hypot(key_norm, past_key_norm), math.hypot(value_norm, past_value_norm)
    return Operands(
        query=plan.roles.query.view.of(query),
        key=plan.roles.key.view.of(key),
        value=plan.roles.value.view.of(value),
        past_key=past_key,
        past_value=past_value,
        norms=(query_norm, key_norm, value_norm),
        finite=not spec.allow_non_finite or _all_finite(query, key, value, past_key, past_value),
    )


def _all_finite(*arrays: np.ndarray | None) -> bool:
    return all(np.isfinite(array).all() for array in arrays if array is not None)


def _past(spec: AttentionSpec, plan: Plan, name: str) -> tuple[np.ndarray, float]:
    array = getattr(spec, name)
    features = plan.sizes.head_dim if name == "past_key" else plan.sizes.value_dim
    shaped = array.reshape(past_shape(plan.roles, plan.layout, features))
    typed, norm = measured(shaped, plan.dtype, f"/{name}", non_finite=spec.allow_non_finite)
    return typed if "b" in plan.layout else typed[None], norm
