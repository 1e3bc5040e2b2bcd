"""The small path: softmax(scale · q kᵀ) v of few scores. Preparing tiles would take longer than computing them.

Shapes in comments: b batch, h heads, q queries, k keys, d and e features.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from service.attention.features import ALWAYS
from service.attention.operands import Operands
from service.attention.outputs import OUTPUT
from service.attention.plan import Plan
from service.attention.result import Computed
from service.backends.dense.numerics import MAX_EXPONENT, MODERATE_SCALE

# The features that this path knows.
KNOWN: Final = ALWAYS | {"single_query", "selection.include.attention_weights"}


def fits(plan: Plan) -> bool:
    """True if the plan has no other features, no grouped heads, no halves, and no extreme scale."""
    low, high = MODERATE_SCALE
    is_grouped = plan.sizes.num_heads != plan.sizes.num_kv_heads
    is_plain = plan.dtype == plan.compute_dtype and low < abs(plan.scale) < high and not is_grouped
    return is_plain and plan.features <= KNOWN


def compute(plan: Plan, operands: Operands) -> Computed | None:
    """Compute a plan that fits; None if its numbers are so large that exp could overflow or underflow.

    The steps are those of a tile, so that a request gets the same numbers whatever else it includes. NumPy may warn
    of overflow on the way.
    """
    query, key, value = operands[:3]  # b h l d
    # |q·k| <= |q| |k| (Cauchy-Schwarz), first for the norms of the arrays, then for the longest query and key.
    limit = MAX_EXPONENT[plan.dtype] / abs(plan.scale)
    if not operands.finite or not (operands.norms[0] * operands.norms[1] <= limit or _bound(query, key) <= limit):
        return None
    weights = np.matmul(query * plan.scale, key.swapaxes(-1, -2))  # b h q k
    np.exp(weights, out=weights)
    weights /= np.matmul(weights, np.ones((weights.shape[-1], 1), plan.dtype))  # a product is faster than a sum
    outputs = np.matmul(weights, value)  # b h q e
    if "h" not in plan.layout:
        outputs = outputs.transpose(0, 2, 1, 3).reshape(len(outputs), outputs.shape[2], -1)
    arrays = {OUTPUT: outputs}
    if plan.selection.include:
        arrays["attention_weights"] = weights
    return Computed(arrays, 0, "numpy", "cpu", "small")


def _bound(query: np.ndarray, key: np.ndarray) -> float:
    """A bound on |q·k|, from the longest query and the longest key."""
    return float(np.sqrt(np.vecdot(query, query).max() * np.vecdot(key, key).max()))
