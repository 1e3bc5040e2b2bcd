"""The small path: softmax(scale · q kᵀ) v of few scores without tiles, whose preparation takes longer than computing.

Shapes in comments: b batch, h heads, q queries, k keys, d and e features; b and h are left out if both are 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import numpy as np

from service.attention.features import ALWAYS
from service.attention.plan import Plan
from service.attention.result import Computed, Result, make_result
from service.attention.shapes import UNCHANGED, View
from service.backends.dense.numerics import MAX_EXPONENT, MODERATE_SCALE

# All that a plan may have to take this path.
KNOWN: Final = ALWAYS | {"single_query", "selection.include.attention_weights"}
NUMBERS: Final = frozenset("fiu")


class Small:
    """Everything that does not depend on the numbers of a request, worked out once for a plan."""

    def __init__(self, plan: Plan) -> None:
        roles, sizes, layout, axes = plan.roles, plan.sizes, plan.layout, plan.score_axes
        stack = "bh" if sizes.batch_size * sizes.num_heads > 1 else ""
        self._product = np.matmul if stack else np.ndarray.dot  # which takes half the time
        views = roles.query.view, _transposed(roles.key.view), roles.value.view
        fields = roles.query.field, roles.key.field, roles.value.field
        self._operands = [
            (field, view.shape, None if view.axes in UNCHANGED else view.axes)
            for field, view in zip(fields, views if stack else map(_matrix, views), strict=True)
        ]
        self._dtype, self._scale = plan.dtype, plan.scale
        # exp can neither overflow nor underflow below this, as |q·k| <= |q| |k| (Cauchy-Schwarz).
        self._limit = (MAX_EXPONENT[plan.dtype] / abs(plan.scale)) ** 2
        self._ones = np.ones((sizes.key_length, 1), plan.dtype)  # by which rows are summed
        lengths = {"b": sizes.batch_size, "h": sizes.num_heads, "l": sizes.query_length, "d": sizes.value_dim}
        if "h" not in layout:
            lengths["d"] *= sizes.num_heads
        shown = layout[-1] if plan.single_query else layout
        packed = layout if "h" in layout else layout.replace("d", "hd")
        self._output = Order(f"{stack}ld", packed, tuple(lengths[axis] for axis in shown))
        self._weights = Order(f"{stack}qk", axes.names, tuple(axes.sizes[axis] for axis in axes.names))
        self._includes_weights = bool(plan.selection.include)
        self._facts = make_result(plan, Computed({}, 0, "numpy", "cpu", "small")).facts

    @staticmethod
    def of(plan: Plan) -> Small | None:
        """The small path of a plan; None if the plan has other features, grouped heads, halves, or an extreme scale."""
        low, high = MODERATE_SCALE
        sizes = plan.sizes
        is_grouped = sizes.num_heads != sizes.num_kv_heads
        fits = plan.dtype == plan.compute_dtype and low < abs(plan.scale) < high and not is_grouped
        return Small(plan) if fits and plan.features <= KNOWN else None

    def run(self, sources: Mapping[str, np.ndarray]) -> Result | None:
        """The result; None if numbers are too large for this path, or an array holds none.

        The steps are those of a tile, so that a request gets the same numbers whatever else it includes. NumPy may warn
        of overflow on the way.
        """
        operands, squares = [], []  # of Euclidean norms, each of an array as one vector
        for field, shape, axes in self._operands:
            array = sources[field]
            if array.dtype != self._dtype:
                if array.dtype.kind not in NUMBERS:
                    return None
                array = array.astype(self._dtype)
            squares.append(float(np.vdot(array, array)))
            if array.shape != shape:
                array = array.reshape(shape)
            operands.append(array if axes is None else array.transpose(axes))
        query, key, value = operands
        if not squares[2] < math.inf:  # infinite, or NaN
            return None
        if not (squares[0] * squares[1] <= self._limit or _bound(query, key) <= self._limit):
            return None
        weights = self._product(query * self._scale, key)  # b h q k
        np.exp(weights, out=weights)
        weights /= self._product(weights, self._ones)
        arrays = {"output": self._output.of(self._product(weights, value))}
        if self._includes_weights:
            arrays["attention_weights"] = self._weights.of(weights)
        return Result(arrays, self._facts)


class Order:
    """Reorders axes, joins neighbours, and drops or inserts axes of length 1."""

    __slots__ = ("_axes", "_shape")

    def __init__(self, have: str, wanted: str, shape: tuple[int, ...]) -> None:
        dropped = [axis for axis in have if axis not in wanted]
        axes = tuple(have.index(axis) for axis in (*dropped, *wanted) if axis in have)
        self._axes = None if axes == tuple(range(len(have))) else axes
        self._shape = shape

    def of(self, array: np.ndarray) -> np.ndarray:
        """The array with these axes: a view, or a copy where joined axes are not neighbours."""
        ordered = array if self._axes is None else array.transpose(self._axes)
        return ordered if ordered.shape == self._shape else ordered.reshape(self._shape)


def _bound(query: np.ndarray, key: np.ndarray) -> float:
    """A bound on (q·k)², from the longest query (…, q, d) and the longest key (…, d, k)."""
    rows = key.swapaxes(-1, -2)
    return float(np.vecdot(query, query).max()) * float(np.vecdot(rows, rows).max())


def _transposed(view: View) -> View:
    *stack, tokens, features = view.axes
    return View(view.shape, (*stack, features, tokens))


def _matrix(view: View) -> View:
    """The view of a single head in a batch of one, without axes b and h."""
    *_, first, second = view.axes
    shape = view.shape[first], view.shape[second]
    return View(shape, (0, 1)) if first < second else View(shape[::-1], (1, 0))
