"""The small path: softmax(scale · q kᵀ) v of few scores. Preparing tiles would take longer than computing them.

Shapes in comments: b batch, h heads, q queries, k keys, d and e features.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import numpy as np

from attention_service.attention.arrays import is_number, lost_to_underflow, norm
from attention_service.attention.options import ALWAYS
from attention_service.attention.outputs import OUTPUT
from attention_service.attention.plan import Plan
from attention_service.attention.result import Computed, Result, make_result, request_axes
from attention_service.attention.shapes import canonical, entry_after_entry, reordered
from attention_service.backends.dense.numerics import MAX_EXPONENT, MODERATE_SCALE, ROOM

WEIGHTS: Final = "attention_weights"
# The options that this path knows.
KNOWN: Final = ALWAYS | {"single_query", f"selection.include.{WEIGHTS}"}


def fits(plan: Plan) -> bool:
    """True if the plan uses no other options, and has no grouped heads, no halves, and no extreme scale."""
    low, high = MODERATE_SCALE
    is_grouped = plan.sizes.num_heads != plan.sizes.num_kv_heads
    is_plain = plan.dtype == plan.compute_dtype and low < abs(plan.scale) < high and not is_grouped
    return is_plain and plan.options <= KNOWN


class SmallProgram:
    """Computes a plan that fits. All that does not depend on the numbers is done once."""

    def __init__(self, plan: Plan) -> None:
        heads = plan.sizes.num_heads
        self._inputs = [(role.field, heads) for role in plan.roles.inputs]
        self._is_matrix = plan.layout == "ld" and heads == 1 and not plan.single_query  # without b and h, in less time
        self._layout, self._dtype = plan.layout, plan.dtype
        self._scale = np.array(plan.scale, plan.dtype)  # a Python number is converted by each product
        self._largest_scale, self._limit = abs(plan.scale), MAX_EXPONENT[plan.dtype]
        self._ones = np.ones((plan.sizes.key_length, 1), plan.dtype)
        self._output_axes = request_axes(OUTPUT, plan)
        self._weights_axes = request_axes(WEIGHTS, plan) if plan.selection.include else None
        self._metadata = make_result(plan, Computed({}, 0, "numpy", "cpu", "small")).metadata

    def run(self, sources: Mapping[str, np.ndarray]) -> Result | None:
        """The result for these arrays. None if they hold anything but finite numbers of which exp neither overflows
        nor underflows; the general path computes them, or says what is wrong.

        The steps are those of a tile. NumPy may warn of overflow on the way.
        """
        operands, norms = [], []
        for field, heads in self._inputs:
            array = entry_after_entry(sources[field], self._layout)
            if array.dtype != self._dtype:
                if not is_number(array.dtype):
                    return None
                array = array.astype(self._dtype)
            norms.append(norm(array))
            operands.append(array if self._is_matrix else canonical(array, self._layout, heads))
        query, key, value = operands  # b h l d
        # |q·k| <= |q| |k| (Cauchy-Schwarz), first for the norms of the arrays, then for the longest query and key: by
        # these a tile decides for each entry, and the norms leave room for rounding, so that it takes the same steps.
        scale, limit = self._largest_scale, self._limit
        if not (ROOM * norms[0] * norms[1] * scale <= limit or _bound(query, key) * scale <= limit):
            return None
        if not norms[2] < math.inf:
            return None
        if self._is_matrix:  # of two matrices, dot takes a third of the time of matmul
            weights = (query * self._scale).dot(key.T)
            np.exp(weights, out=weights)
            weights /= weights.dot(self._ones)  # a product is faster than a sum
            output = weights.dot(value)
            arrays = {OUTPUT: output} if self._weights_axes is None else {OUTPUT: output, WEIGHTS: weights}
            return Result(arrays, self._metadata)
        weights = np.matmul(query * self._scale, key.swapaxes(-1, -2))  # b h q k
        np.exp(weights, out=weights)
        weights /= np.matmul(weights, self._ones)
        output = np.matmul(weights, value)  # b h q e
        if "h" not in self._layout:
            output = output.transpose(0, 2, 1, 3).reshape(len(output), output.shape[2], -1)
        arrays = {OUTPUT: reordered(output, *self._output_axes)}
        if self._weights_axes is not None:
            arrays[WEIGHTS] = reordered(weights, *self._weights_axes)
        return Result(arrays, self._metadata)


def _bound(query: np.ndarray, key: np.ndarray) -> float:
    """A bound on |q·k|, from the longest query and the longest key."""
    lost = lost_to_underflow(query.dtype, query.shape[-1])
    longest = [math.sqrt(float(np.vecdot(x, x).max()) + lost) for x in (query, key)]
    return longest[0] * longest[1]
