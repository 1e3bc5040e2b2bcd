"""Gates: numbers that head outputs are multiplied by, before heads are joined."""

from __future__ import annotations

from typing import Any, assert_never

from attention_service.attention.operands import Operands
from attention_service.attention.plan import Plan
from attention_service.attention.projections import DenseMap
from attention_service.attention.spec import Activation
from attention_service.backends.dense.library import Array, ArrayLibrary
from attention_service.backends.dense.products import split_heads


def load_gate(plan: Plan, operands: Operands, lib: ArrayLibrary) -> Array | None:
    """The gates (b, h, q, e or 1) of a plan, activated; None if it has none."""
    if plan.gate is not None:
        return lib.load(plan.gate)
    if plan.roles.gate_map is None or operands.gate_source is None:
        return None
    mapped = apply_map(plan.roles.gate_map, lib.load(operands.gate_source), lib)  # b q h·e, or b q h
    return activated(split_heads(mapped, plan.sizes.num_heads, lib.xp), plan.roles.gate_activation, lib.xp)


def activated(numbers: Array, activation: Activation, xp: Any) -> Array:
    """The numbers after an activation; exp may overflow, which is right in the limit."""
    match activation:
        case "sigmoid":
            return 1 / (1 + xp.exp(-numbers))
        case "silu":
            return numbers / (1 + xp.exp(-numbers))
        case "softplus":
            return xp.logaddexp(numbers, xp.zeros_like(numbers))
        case _:
            return numbers


def activation_slope(numbers: Array, activation: Activation, xp: Any) -> Array:
    """The derivative of an activation at these numbers."""
    if activation == "none":
        return xp.ones_like(numbers)
    sigmoid = activated(numbers, "sigmoid", xp)
    match activation:
        case "sigmoid":
            return logistic_slope(numbers, xp)
        case "silu":
            return sigmoid + numbers * logistic_slope(numbers, xp)
        case "softplus":
            return sigmoid
        case _:
            assert_never(activation)


def logistic_slope(numbers: Array, xp: Any) -> Array:
    """σ(x) (1 - σ(x)) without the cancellation of 1 - σ(x); 0 for infinite x."""
    exponentials = xp.exp(-xp.abs(numbers))
    return exponentials / ((1 + exponentials) * (1 + exponentials))


def gated(plan: Plan, lib: ArrayLibrary, gate: Array | None, head_outputs: Array) -> Array:
    """The head outputs (b, h, q, e) times the gates. They are overwritten unless the plan includes them."""
    if gate is None:
        return head_outputs
    found = head_outputs
    if "head_outputs" in plan.selection.include:
        found = lib.xp.asarray(head_outputs, copy=True)
    # The output of a row that sees no key is 0, whatever its gate.
    counts = head_outputs != 0
    found *= gate
    lib.hide(found, counts, 0.0)
    return found


def apply_map(linear: DenseMap, tokens: Array, lib: ArrayLibrary) -> Array:
    """y = x Wᵀ + bias over the last axis: (b, l, in) -> (b, l, out)."""
    mapped = lib.linear(tokens, lib.load(linear.weight))
    if linear.bias is not None:
        mapped += lib.load(linear.bias)
    return mapped
