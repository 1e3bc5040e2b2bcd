"""From the operands of a request to query, key and value as attention sees them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from attention_service.attention.arrays import norm
from attention_service.attention.operands import Operands
from attention_service.attention.plan import Plan
from attention_service.attention.roles import Role
from attention_service.attention.rotary import Rotation
from attention_service.attention.spec import Norm
from attention_service.backends.dense.gates import apply_map, load_gate
from attention_service.backends.dense.library import Array, ArrayLibrary, largest_number

# Options that are applied while operands are loaded, or while outputs are joined: a kernel between need not know them.
OPERAND_OPTIONS: Final = frozenset(
    {"roles.past_length", "single_query"}
    | {
        f"roles.{role}.map.{name}"
        for role in ("query", "key", "value")
        for name in ("weight", "pointer", "bias", "heads")
    }
    | {f"roles.output_map.{name}" for name in ("weight", "pointer", "bias")}
    | {
        f"{role}_norm.{name}"
        for role in ("query", "key", "value")
        for name in ("kind", "over", "position", "weight", "bias", "eps")
    }
    | {f"{role}_norm" for role in ("query", "key", "value")}
    | {f"{role}_rotation.{name}" for role in ("query", "key") for name in ("cos", "sin", "interleaved")}
    | {
        f"selection.include.{name}"
        for name in ("query", "key", "value", "present_key", "present_value", "head_outputs")
    }
    | {"notices.Notice.code", "notices.Notice.message"}
)


@dataclass(frozen=True, slots=True)
class LoadedOperands:
    """Query (b, h, q, d), key (b, g, k, d) and value (b, g, k, e) on the device, the past included.

    norms: bounds of their Euclidean norms, as in Operands
    bad_values: (b, g, 1, k), True where a value is not finite (it is 0 here instead); None if all are finite
    """

    query: Array
    key: Array
    value: Array
    norms: tuple[float, float, float]
    bad_values: Array | None = None
    gate: Array | None = None


def load_operands(plan: Plan, operands: Operands, lib: ArrayLibrary) -> LoadedOperands:
    """The operands as attention sees them: projected, split into heads, normalised, rotated, appended to the cache."""
    xp, roles = lib.xp, plan.roles
    query = _heads(operands.query, roles.query, plan.sizes.num_heads, lib)
    key = _heads(operands.key, roles.key, plan.sizes.num_kv_heads, lib)
    value = _heads(operands.value, roles.value, plan.sizes.num_kv_heads, lib)
    mapped = _norms_after_maps(plan, operands)
    query = _prepared(query, plan.query_norm, plan.query_rotation, mapped[0], lib)
    key = _prepared(key, plan.key_norm, plan.key_rotation, mapped[1], lib)
    value = _normalised(value, plan.value_norm, mapped[2], lib)
    if operands.past_key is not None and operands.past_value is not None:
        key = xp.concat([lib.load(operands.past_key), key], axis=2)
        value = xp.concat([lib.load(operands.past_value), value], axis=2)
    norms, most = _known_norms(plan, operands, mapped), largest_number(plan)
    gate = load_gate(plan, operands, lib)
    is_finite = operands.finite and (roles.value.map is None or mapped[2] < most)
    if is_finite and (plan.value_norm is None or norms[2] < most):
        return LoadedOperands(query, key, value, norms, gate=gate)
    good = xp.isfinite(value)
    if xp.all(good):
        return LoadedOperands(query, key, value, norms, gate=gate)
    bad_values = ~xp.all(good, axis=-1)[:, :, None, :]
    return LoadedOperands(query, key, xp.where(good, value, xp.zeros_like(value)), norms, bad_values, gate)


def _heads(tokens: np.ndarray, role: Role, heads: int, lib: ArrayLibrary) -> Array:
    """An operand as (b, heads, l, d), projected if it has a map."""
    array = lib.load(tokens)
    if role.map is None:
        return array
    mapped = apply_map(role.map, array, lib)  # b l heads·d
    b, length, features = mapped.shape
    return lib.xp.permute_dims(lib.xp.reshape(mapped, (b, length, heads, features // heads)), (0, 2, 1, 3))


def _prepared(array: Array, norm: Norm | None, rotation: Rotation | None, bound: float, lib: ArrayLibrary) -> Array:
    """Query or key (b, h, l, d) after norm and rotation. bound: on its Euclidean norm before"""
    if norm is not None and norm.position == "after":
        return _normalised(_rotated(array, rotation, lib), norm, bound * _largest_turn(rotation), lib)
    return _rotated(_normalised(array, norm, bound, lib), rotation, lib)


def _normalised(array: Array, norm: Norm | None, bound: float, lib: ArrayLibrary) -> Array:
    """The array (b, h, l, d) normalised over the features of each head, or of all. bound: on its Euclidean norm"""
    if norm is None:
        return array
    xp, axis, eps = lib.xp, (1, 3) if norm.over == "all" else (3,), norm.eps
    if not bound < math.sqrt(largest_number(lib.plan)) or _is_tiny(eps, lib.plan):  # squares could over- or underflow
        low, high = xp.min(array, axis=axis, keepdims=True), xp.max(array, axis=axis, keepdims=True)
        largest = xp.maximum(high, -low)
        largest = xp.where(largest > 0, largest, xp.ones_like(largest))
        array, eps = array / largest, eps / largest / largest
    if norm.kind == "layer":
        first = array[:, :1, :, :1] if norm.over == "all" else array[..., :1]
        array = array - first  # so that equal features become 0, however the mean is rounded
        array -= xp.mean(array, axis=axis, keepdims=True)
    size = xp.sqrt(xp.mean(array * array, axis=axis, keepdims=True) + eps)
    scaled = array / xp.where(size == 0, xp.ones_like(size), size)
    if norm.weight is not None:
        scaled *= lib.load(norm.weight)
    if norm.bias is not None:
        scaled += lib.load(norm.bias)
    return scaled


def _rotated(array: Array, rotation: Rotation | None, lib: ArrayLibrary) -> Array:
    """Pairs (x, y) of the first features become (x cos - y sin, x sin + y cos)."""
    if rotation is None:
        return array
    xp = lib.xp
    cos, sin = lib.load(rotation.cos)[:, None], lib.load(rotation.sin)[:, None]  # b 1 l dim/2
    half = cos.shape[-1]
    turned, rest = array[..., : 2 * half], array[..., 2 * half :]
    if rotation.interleaved:
        x, y = turned[..., 0::2], turned[..., 1::2]
        pairs = xp.stack([x * cos - y * sin, x * sin + y * cos], axis=-1)
        turned = xp.reshape(pairs, turned.shape)
    else:
        x, y = turned[..., :half], turned[..., half:]
        turned = xp.concat([x * cos - y * sin, x * sin + y * cos], axis=-1)
    return xp.concat([turned, rest], axis=-1)


def _norms_after_maps(plan: Plan, operands: Operands) -> list[float]:
    """Bounds on the norms of query, key and value after their maps: |xWᵀ + b| <= |x| |W| + |b|."""
    queries, keys = plan.sizes.batch_size * plan.sizes.query_length, plan.sizes.batch_size * plan.sizes.key_length
    found = []
    for role, bound, tokens in zip(plan.roles.inputs, operands.norms, (queries, keys, keys), strict=True):
        after = bound
        if role.map is not None:
            bias = 0.0 if role.map.bias is None else norm(role.map.bias)
            after = bound * norm(role.map.weight) + math.sqrt(tokens) * bias
        found.append(after)
    return found


def _known_norms(plan: Plan, operands: Operands, mapped: list[float]) -> tuple[float, float, float]:
    """Bounds on the norms of query, key and value after all steps; inf if none is known. mapped: after their maps"""
    roles, sizes = plan.roles, plan.sizes
    queries, keys = sizes.batch_size * sizes.query_length, sizes.batch_size * sizes.key_length
    found = []
    for role, bound, after, tokens, step, rotation in zip(
        roles.inputs,
        operands.norms,
        mapped,
        (queries, keys, keys),
        (plan.query_norm, plan.key_norm, plan.value_norm),
        (plan.query_rotation, plan.key_rotation, None),
        strict=True,
    ):
        features = sizes.value_dim if role is roles.value else sizes.head_dim
        if step is not None:
            after = _norm_after(plan, step, tokens, features)
        if step is None or step.position == "before":
            after *= _largest_turn(rotation)
        # The norms of operands count the past, which no step changes.
        found.append(after + bound if roles.past_length and role is not roles.query else after)
    query, key, value = found
    return query, key, value


def _largest_turn(rotation: Rotation | None) -> float:
    """By how much a rotation may make a vector longer: tables of a request may hold more than a cosine and a sine."""
    return 1.0 if rotation is None else max(1.0, math.hypot(np.max(np.abs(rotation.cos)), np.max(np.abs(rotation.sin))))


def _is_tiny(eps: float, plan: Plan) -> bool:
    return eps < float(np.finfo(plan.compute_dtype).tiny)


def _norm_after(plan: Plan, step: Norm, tokens: int, features: int) -> float:
    """A bound on the norm after a normalisation; inf if eps is so small that a zero vector may be divided by 0.

    The root mean square is 1, times the weights.
    """
    if _is_tiny(step.eps, plan):
        return math.inf
    heads = plan.sizes.num_heads
    weight = 1.0 if step.weight is None else float(np.max(np.abs(step.weight)))
    bias = 0.0 if step.bias is None else norm(step.bias) * math.sqrt(tokens * heads)
    return weight * math.sqrt(tokens * heads * features) + bias
