"""From the operands of a request to query, key and value as attention sees them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from attention_service.attention.arrays import norm
from attention_service.attention.operands import Operands
from attention_service.attention.options import ALWAYS
from attention_service.attention.plan import Plan
from attention_service.attention.roles import Role
from attention_service.attention.steps import OPTIONS as STEP_OPTIONS
from attention_service.attention.steps import Steps
from attention_service.backends.dense.gates import apply_map, load_gate
from attention_service.backends.dense.library import Array, ArrayLibrary, largest_number
from attention_service.backends.dense.products import split_heads

# Options that are applied while operands are loaded, or while outputs are joined: a kernel between need not know them.
OPERAND_OPTIONS: Final = frozenset(
    {"roles.past_length", "single_query"}
    | STEP_OPTIONS
    | {
        f"roles.{role}.map.{name}"
        for role in ("query", "key", "value")
        for name in ("weight", "pointer", "bias", "heads")
    }
    | {f"roles.output_map.{name}" for name in ("weight", "pointer", "bias")}
    | {
        f"selection.include.{name}"
        for name in ("query", "key", "value", "present_key", "present_value", "head_outputs")
    }
    | {"notices.Notice.code", "notices.Notice.message"}
)

# Options of the dense computation beside score terms and outputs.
DENSE_OPTIONS: Final = (
    ALWAYS
    | OPERAND_OPTIONS
    | {f"roles.gate_map.{name}" for name in ("weight", "pointer", "bias", "heads")}
    | {"roles.gate_activation", "gate", "head_scales", "softcap", "sinks", "row_sinks", "normalization"}
    | {f"selection.{name}" for name in ("heads", "queries", "average_heads", "top_k")}
)


@dataclass(frozen=True, slots=True)
class LoadedOperands:
    """Query (b, h, q, d), key (b, g, k, d) and value (b, g, k, e) on the device, the past included.

    norms: bounds of their Euclidean norms, (b,) each, as in Operands
    operands: what they were loaded from, kept for gradients
    bad_values: (b, g, 1, k), True where a value is not finite (it is 0 here instead); None if all are finite
    """

    query: Array
    key: Array
    value: Array
    norms: tuple[np.ndarray, np.ndarray, np.ndarray]
    bad_values: Array | None = None
    gate: Array | None = None
    operands: Operands | None = None


def load_operands(plan: Plan, operands: Operands, lib: ArrayLibrary) -> LoadedOperands:
    """The operands as attention sees them: projected, split into heads, after their steps, appended to the cache."""
    xp, roles = lib.xp, plan.roles
    query = heads_of(lib.load(operands.query), roles.query, plan.sizes.num_heads, lib)
    key = heads_of(lib.load(operands.key), roles.key, plan.sizes.num_kv_heads, lib)
    value = heads_of(lib.load(operands.value), roles.value, plan.sizes.num_kv_heads, lib)
    mapped = norms_after_maps(plan, operands)
    query, query_norm = stepped(query, plan.query_steps, mapped[0], lib)
    key, key_norm = stepped(key, plan.key_steps, mapped[1], lib)
    value, value_norm = stepped(value, plan.value_steps, mapped[2], lib)
    if operands.past_key is not None and operands.past_value is not None:
        key = xp.concat([lib.load(operands.past_key), key], axis=2)
        value = xp.concat([lib.load(operands.past_value), value], axis=2)
        # The norms of operands count the past, which no step changes.
        key_norm, value_norm = key_norm + operands.norms[1], value_norm + operands.norms[2]
    norms, most = (query_norm, key_norm, value_norm), largest_number(plan)
    gate = load_gate(plan, operands, lib)
    kept = None if plan.gradients is None else operands
    is_finite = operands.finite.all() and (roles.value.map is None or mapped[2].max() < most)
    if is_finite and (not plan.value_steps or value_norm.max() < most):
        return LoadedOperands(query, key, value, norms, gate=gate, operands=kept)
    good = xp.isfinite(value)
    if xp.all(good):
        return LoadedOperands(query, key, value, norms, gate=gate, operands=kept)
    bad_values = ~xp.all(good, axis=-1)[:, :, None, :]
    return LoadedOperands(query, key, xp.where(good, value, xp.zeros_like(value)), norms, bad_values, gate, kept)


def heads_of(tokens: Array, role: Role, heads: int, lib: ArrayLibrary) -> Array:
    """An operand as (b, heads, l, d), projected if it has a map."""
    if role.map is None:
        return tokens
    return split_heads(apply_map(role.map, tokens, lib), heads, lib.xp)


def stepped(array: Array, steps: Steps, bounds: np.ndarray, lib: ArrayLibrary) -> tuple[Array, np.ndarray]:
    """An operand or head outputs (b, h, l, d) after steps, and bounds on the Euclidean norms of its entries, (b,).

    bounds: on those before
    """
    for step in steps:
        shape = tuple(array.shape)
        array, after = step.apply(array, lib, bounds), step.bound(bounds, shape, lib.compute_dtype)
        bounds = np.broadcast_to(after, bounds.shape)
    return array, bounds


def stepped_outputs(plan: Plan, lib: ArrayLibrary, loaded: LoadedOperands, head_outputs: Array) -> Array:
    """The head outputs (b, h, q, e) after the steps of the plan."""
    return stepped(head_outputs, plan.output_steps, norms_of_outputs(plan, loaded), lib)[0]


def norms_of_outputs(plan: Plan, loaded: LoadedOperands) -> np.ndarray:
    """Bounds on the Euclidean norms of the head outputs of each entry, (b,): those of a softmax are means of values."""
    h, _, _, q, *_ = plan.sizes
    return loaded.norms[2] * (math.sqrt(h * q) if plan.normalization == "softmax" else math.inf)


def norms_after_maps(plan: Plan, operands: Operands) -> list[np.ndarray]:
    """Bounds on the norms of query, key and value after their maps, (b,) each: |xWᵀ + b| <= |x| |W| + |b|."""
    queries, keys = plan.sizes.query_length, plan.sizes.key_length
    found = []
    for role, bound, tokens in zip(plan.roles.inputs, operands.norms, (queries, keys, keys), strict=True):
        after = bound
        if role.map is not None:
            bias = 0.0 if role.map.bias is None else norm(role.map.bias)
            after = bound * norm(role.map.weight) + math.sqrt(tokens) * bias
        found.append(after)
    return found
