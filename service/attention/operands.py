"""The numbers that a plan is executed on: checked, of one type, in one order of axes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from service.attention import shapes
from service.attention.arrays import cast, measured
from service.attention.roles import Role, past_shape
from service.attention.spec import AttentionSpec

if TYPE_CHECKING:
    from service.attention.plan import Plan


@dataclass(frozen=True, slots=True)
class Operands:
    """Query, key and value as heads (b, h, l, d); or, where their role has a map, as tokens (b, l, in).

    past_key, past_value: (b, g, past, d or e), to stand before the new ones
    norms: Euclidean norms of query, key and value, each taken as one vector; inf where one is not known
    finite: whether all numbers are; only a caller who allowed it has others
    """

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    past_key: np.ndarray | None
    past_value: np.ndarray | None
    norms: tuple[float, float, float]
    finite: bool


def make_operands(spec: AttentionSpec, plan: Plan) -> Operands:
    """The arrays of a request in the plan's dtype, views where that is possible.

    Errors: InvalidArray for what is no (finite) number, Overflow for what dtype cannot hold.
    """
    roles = (plan.roles.query, plan.roles.key, plan.roles.value)
    loaded: dict[str, tuple[np.ndarray, float]] = {}
    for role in roles:
        if role.field not in loaded:  # the same input may play several roles
            array = getattr(spec, role.field)
            loaded[role.field] = measured(array, plan.dtype, f"/{role.field}", non_finite=spec.allow_non_finite)
    (query, query_norm), (key, key_norm), (value, value_norm) = (loaded[role.field] for role in roles)
    past_key, past_value = _past(spec, plan, "past_key"), _past(spec, plan, "past_value")
    return Operands(
        query=_oriented(query, plan, plan.roles.query),
        key=_oriented(key, plan, plan.roles.key),
        value=_oriented(value, plan, plan.roles.value),
        past_key=past_key,
        past_value=past_value,
        norms=(query_norm, key_norm, value_norm),
        finite=not spec.allow_non_finite or _all_finite(query, key, value, past_key, past_value),
    )


def _all_finite(*arrays: np.ndarray | None) -> bool:
    return all(np.isfinite(array).all() for array in arrays if array is not None)


def _oriented(array: np.ndarray, plan: Plan, role: Role) -> np.ndarray:
    """The axes of `Operands`."""
    tokens = array[None, None] if array.ndim == 1 else shapes.to_canonical(array, plan.layout)
    if role.map is not None or "h" in plan.layout:
        return tokens
    return shapes.split_heads(tokens, role.heads)


def _past(spec: AttentionSpec, plan: Plan, name: str) -> np.ndarray | None:
    array = getattr(spec, name)
    if array is None:
        return None
    features = plan.sizes.head_dim if name == "past_key" else plan.sizes.value_dim
    shaped = array.reshape(past_shape(plan.roles, plan.layout, features))
    typed = cast(shaped, plan.dtype, f"/{name}", non_finite=spec.allow_non_finite)
    return typed if "b" in plan.layout else typed[None]
