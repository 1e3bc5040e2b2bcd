"""Operands: the arrays that a plan is executed on, checked, in one type and one order of axes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from attention_service.attention.arrays import cast, cast_and_norms, compute_dtype
from attention_service.attention.plan import Plan
from attention_service.attention.shapes import canonical, entry_after_entry
from attention_service.attention.spec import AttentionSpec, Operand, Parameter, field_types


@np.errstate(all="ignore")
def as_cast(spec: AttentionSpec, dtype: np.dtype) -> AttentionSpec:
    """The request with its arrays in the types that are computed from. dtype: of the request, whose plan is valid

    Scales stay as they are. Errors: InvalidArray, Overflow for an operand that the type cannot hold.
    """
    return spec._replace(**_cast_fields(spec, dtype, "", non_finite=spec.allow_non_finite))


def _cast_fields(part: Any, dtype: np.dtype, pointer: str, *, non_finite: bool) -> dict[str, Any]:
    """The fields of a request, or of an object in it, that are arrays with a type or have such arrays in them."""
    changed: dict[str, Any] = {}
    kind: Any = type(part)
    for name, declared in field_types(kind).items():
        value, place = getattr(part, name), f"{pointer}/{name}"
        if is_dataclass(value):
            inner = _cast_fields(value, dtype, place, non_finite=non_finite)
            changed[name] = replace(value, **inner)  # type: ignore[type-var]  # no class
        elif isinstance(value, np.ndarray) and declared == Operand | None:
            changed[name] = cast(value, dtype, place, non_finite=non_finite)
        elif isinstance(value, np.ndarray) and declared == Parameter | None:
            changed[name] = value.astype(compute_dtype(dtype), copy=False)
    return changed


class Operands(NamedTuple):
    """Query, key and value as heads (b, h, l, d); or, where their role has a map, as tokens (b, l, in).

    past_key, past_value: (b, g, past, d or e), which stand before the new ones
    norms: for query, key and value (b,) bounds on the Euclidean norm of each batch entry, with its past as one vector;
           inf if not known
    finite: (b,), True if all numbers of an entry are finite; others exist only if the request allows them
    gate_source: (b, q, in), the source of the query, if gates are made of it
    """

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    past_key: np.ndarray | None
    past_value: np.ndarray | None
    norms: tuple[np.ndarray, np.ndarray, np.ndarray]
    finite: np.ndarray
    gate_source: np.ndarray | None = None


def make_operands(spec: AttentionSpec, plan: Plan, sources: Mapping[str, np.ndarray]) -> Operands:
    """The arrays of a request in the dtype of the plan, as views where possible.

    sources: the fields that query, key and value come from; all other fields are in spec

    NumPy may warn of overflow on the way. Errors: InvalidArray for anything but (finite) numbers, Overflow for a number
    that dtype cannot hold.
    """
    non_finite, roles = spec.allow_non_finite, plan.roles
    batch_axis = plan.layout.index("b") if "b" in plan.layout else None
    loaded: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for role in roles.inputs:
        field = role.field
        if field not in loaded:  # the same input may play several roles
            source, place = entry_after_entry(sources[field], plan.layout), f"/{field}"
            loaded[field] = cast_and_norms(source, plan.dtype, place, batch_axis, non_finite=non_finite)
    (query, query_norm), (key, key_norm), (value, value_norm) = (loaded[role.field] for role in roles.inputs)
    past_key = past_value = None
    if spec.past_key is not None and spec.past_value is not None:
        batch_axis = None if batch_axis is None else 0  # in every layout
        past_key, norm = cast_and_norms(spec.past_key, plan.dtype, "/past_key", batch_axis, non_finite=non_finite)
        key_norm = np.hypot(key_norm, norm)
        past_value, norm = cast_and_norms(spec.past_value, plan.dtype, "/past_value", batch_axis, non_finite=non_finite)
        value_norm = np.hypot(value_norm, norm)
        leading = plan.sizes.batch_size, plan.sizes.num_kv_heads, roles.past_length
        past_key = past_key.reshape(*leading, plan.sizes.head_dim)
        past_value = past_value.reshape(*leading, plan.sizes.value_dim)
    h, g = plan.sizes.num_heads, plan.sizes.num_kv_heads
    query, source = canonical(query, plan.layout, None if roles.query.map else h), query
    key = canonical(key, plan.layout, None if roles.key.map else g)
    value = canonical(value, plan.layout, None if roles.value.map else g)
    finite = np.ones(plan.sizes.batch_size, bool)
    if non_finite and not (query_norm + key_norm + value_norm).max() < np.inf:  # or a square overflows
        finite = _finite(query, key, value, past_key, past_value)
    return Operands(
        query=query,
        key=key,
        value=value,
        past_key=past_key,
        past_value=past_value,
        norms=(query_norm, key_norm, value_norm),
        finite=finite,
        gate_source=None if roles.gate_map is None else canonical(source, plan.layout, None),
    )


def _finite(*arrays: np.ndarray | None) -> np.ndarray:
    """For each entry of the first axis, True if its numbers in all arrays are finite."""
    by_array = [np.isfinite(array).all(axis=tuple(range(1, array.ndim))) for array in arrays if array is not None]
    found: np.ndarray = np.all(by_array, axis=0)
    return found
