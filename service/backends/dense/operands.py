"""From the operands of a request to query, key and value as attention sees them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from service.attention.arrays import norm
from service.attention.operands import Operands
from service.attention.plan import Plan
from service.attention.projections import DenseMap
from service.attention.roles import Role
from service.attention.rotary import Rotation
from service.attention.spec import Norm
from service.backends.dense.library import Array, ArrayLibrary, largest_number

# Options that are applied while operands are loaded, or while outputs are joined: a kernel between need not know them.
OPERAND_OPTIONS: Final = frozenset(
    {"roles.past_length", "single_query"}
    | {
        f"roles.{role}.map.{name}"
        for role in ("query", "key", "value")
        for name in ("weight", "pointer", "bias", "heads")
    }
    | {f"roles.output_map.{name}" for name in ("weight", "pointer", "bias")}
    | {f"{role}_norm.{name}" for role in ("query", "key") for name in ("weight", "eps")}
    | {f"{role}_norm" for role in ("query", "key")}
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


def load_operands(plan: Plan, operands: Operands, lib: ArrayLibrary) -> LoadedOperands:
    """The operands as attention sees them: projected, split into heads, normalised, rotated, appended to the cache."""
    xp, roles = lib.xp, plan.roles
    query = _heads(operands.query, roles.query, plan.sizes.num_heads, lib)
    key = _heads(operands.key, roles.key, plan.sizes.num_kv_heads, lib)
    value = _heads(operands.value, roles.value, plan.sizes.num_kv_heads, lib)
    query = _rotated(_normalised(query, plan.query_norm, lib), plan.query_rotation, lib)
    key = _rotated(_normalised(key, plan.key_norm, lib), plan.key_rotation, lib)
    if operands.past_key is not None and operands.past_value is not None:
        key = xp.concat([lib.load(operands.past_key), key], axis=2)
        value = xp.concat([lib.load(operands.past_value), value], axis=2)
    norms = _known_norms(plan, operands)
    if operands.finite and (roles.value.map is None or norms[2] < largest_number(plan)):
        return LoadedOperands(query, key, value, norms)
    good = xp.isfinite(value)
    if xp.all(good):
        return LoadedOperands(query, key, value, norms)
    bad_values = ~xp.all(good, axis=-1)[:, :, None, :]
    return LoadedOperands(query, key, xp.where(good, value, xp.zeros_like(value)), norms, bad_values)


def apply_map(linear: DenseMap, tokens: Array, lib: ArrayLibrary) -> Array:
    """y = x Wᵀ + bias over the last axis: (b, l, in) -> (b, l, out)."""
    mapped = tokens @ lib.load(linear.weight.T)
    if linear.bias is not None:
        mapped += lib.load(linear.bias)
    return mapped


def _heads(tokens: np.ndarray, role: Role, heads: int, lib: ArrayLibrary) -> Array:
    """An operand as (b, heads, l, d), projected if it has a map."""
    array = lib.load(tokens)
    if role.map is None:
        return array
    mapped = apply_map(role.map, array, lib)  # b l heads·d
    b, length, features = mapped.shape
    return lib.xp.permute_dims(lib.xp.reshape(mapped, (b, length, heads, features // heads)), (0, 2, 1, 3))


def _normalised(array: Array, norm: Norm | None, lib: ArrayLibrary) -> Array:
    """RMS normalisation over the last axis."""
    if norm is None:
        return array
    scaled = array / lib.xp.sqrt(lib.xp.mean(array * array, axis=-1, keepdims=True) + norm.eps)
    return scaled if norm.weight is None else scaled * lib.load(norm.weight)


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


def _known_norms(plan: Plan, operands: Operands) -> tuple[float, float, float]:
    """Bounds on the norms of query, key and value after all steps; inf if none is known."""
    roles, sizes = plan.roles, plan.sizes
    queries, keys = sizes.batch_size * sizes.query_length, sizes.batch_size * sizes.key_length
    found = []
    for role, bound, tokens, rms, rotation in zip(
        roles.inputs,
        operands.norms,
        (queries, keys, keys),
        (plan.query_norm, plan.key_norm, None),
        (plan.query_rotation, plan.key_rotation, None),
        strict=True,
    ):
        after = _norm_after_map(bound, role, tokens)
        if rms is not None:
            after = _norm_after_rms(plan, rms, tokens)
        if rotation is not None:  # tables of a request may hold larger numbers than a cosine and a sine
            after *= max(1.0, math.hypot(np.max(np.abs(rotation.cos)), np.max(np.abs(rotation.sin))))
        # The norms of operands count the past, which no step changes.
        found.append(after + bound if roles.past_length and role is not roles.query else after)
    query, key, value = found
    return query, key, value


def _norm_after_map(bound: float, role: Role, tokens: int) -> float:
    """A bound on the norm after the map of a role: |xWᵀ + b| <= |x| |W| + |b|."""
    if role.map is None:
        return bound
    bias = 0.0 if role.map.bias is None else norm(role.map.bias)
    return bound * norm(role.map.weight) + math.sqrt(tokens) * bias


def _norm_after_rms(plan: Plan, rms: Norm, tokens: int) -> float:
    """A bound on the norm after RMS normalisation; inf if eps is so small that a zero vector may be divided by 0.

    The root mean square of each head is 1, times the weights.
    """
    if rms.eps < float(np.finfo(plan.compute_dtype).tiny):
        return math.inf
    weight = 1.0 if rms.weight is None else float(np.max(np.abs(rms.weight)))
    return weight * math.sqrt(tokens * plan.sizes.num_heads * plan.sizes.head_dim)
