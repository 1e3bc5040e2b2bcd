"""How far right gradients are apart by rounding: a limit for each number.

Two parts are added. What the type that is computed in leaves open is bounded by the sizes of all terms of a sum, which
cancel: a gradient may be far smaller than its terms. And in half types kernels round weights and the gradients of
scores before products, as tensor cores take them; how much this moves each gradient is measured with random roundings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from attention_service.attention.arrays import compute_dtype
from attention_service.attention.gradients import PREFIX
from attention_service.attention.plan import Plan
from attention_service.attention.score_term import Part
from attention_service.attention.spec import ROLES
from attention_service.attention.tile import Tile
from attention_service.backends.dense.backward import Backward
from attention_service.backends.dense.gradients import TileBackward
from attention_service.backends.dense.library import Array, ArrayLibrary
from attention_service.backends.dense.operands import LoadedOperands
from attention_service.backends.dense.products import grouped_matmul
from attention_service.comparison.errors import epsilon, largest_number, smallest_normal, ulp
from attention_service.comparison.floors import UNKNOWN
from attention_service.comparison.gradients.case import GradientCase, Gradients, Sums, stored_dtype
from attention_service.comparison.legal import TANH_ERROR

# Random roundings whose errors count as one: as many numbers as tell the spread of errors.
SPREAD: Final = 64
MOST_DRAWS: Final = 16
FEWEST_DRAWS: Final = 2
# The root mean square of the errors of rounding, in half units of the last place, up to which all are as likely.
MEAN: Final = 1 / math.sqrt(3)
# Right gradients are within so many root mean squares of the errors.
DEVIATIONS: Final = 3.5
# Queries or keys of a tile whose sums some kernels round before they add the next (torch on a CPU).
ADDED: Final = 32
# What is rounded at random, one after the other.
SOURCES: Final = ("scores", "delta", "weights", "products")
# Signs that are drawn for errors on their way through maps and norms.
SIGNS: Final = 4


class Bounds(TileBackward):
    """Sums the magnitudes of all terms of a gradient, times the steps of ε/4 that each may be wrong by.

    A weight is wrong by the √k steps of its sum, those of its dot product with the query, |q| · |k| · (√d + 2), and
    those of the dot product of cotangent and value.
    """

    def __init__(
        self,
        plan: Plan,
        lib: ArrayLibrary,
        loaded: LoadedOperands,
        output: Array | None,
        of_type: np.dtype,
        slope: float,
    ) -> None:
        super().__init__(plan, lib, loaded, None if output is None else np.abs(output))
        self.query, self.key, self.value = (np.abs(array) for array in (self.query, self.key, self.value))
        self.logsumexp = None if self.logsumexp is None else np.abs(self.logsumexp)
        self._slope = slope
        sizes = plan.sizes
        self._group = sizes.num_heads // sizes.num_kv_heads
        self._lengths = [np.sqrt(np.vecdot(array, array)) for array in (self.query, self.key)]
        self._added = sum(float(np.max(term.largest_added(sizes))) for term in plan.terms)
        self._roots = 8 + math.sqrt(sizes.key_length) + math.sqrt(sizes.value_dim) + math.sqrt(sizes.query_length)
        # Weights below the smallest normal number may be 0, or have few digits.
        self._least = smallest_normal(of_type) / (epsilon(of_type) / 4)
        self._steps = np.zeros(())  # of the tile that is computed
        self.reads = self.reads | {"masked_scores"}

    def _steps_of(self, tile: Tile, weights: Array, masked: np.ndarray) -> np.ndarray:
        """The error of weights in steps, relative to them, (b, h, r, 1): by the longest key that a query sees.

        What is added to a score counts by the weight of its key, as a bias of -1e9 hides it; a sink by its own weight.
        masked: scores after masks
        """
        seen = np.isfinite(masked)
        keys = np.repeat(self._lengths[1][tile.batch, tile.kv_heads, tile.columns], self._group, axis=1)
        most = np.max(np.broadcast_to(keys[:, :, None], seen.shape), axis=-1, where=seen, initial=0.0)
        scales = np.reshape(np.abs(self.scale(tile)), (-1, 1))  # one, or h
        products = self._lengths[0][tile.batch, tile.heads, tile.rows] * most * scales
        added = self._added
        if self.plan.normalization == "softmax":
            weighted = 2 * (weights * np.abs(np.where(weights > 0, masked, 0))).sum(axis=-1)
            added = np.minimum(added, weighted + products)  # masked scores have both
            added = added + self._sinks_of(tile, np.max(masked, axis=-1, where=seen, initial=-np.inf))
        found: np.ndarray = self._roots + (math.sqrt(self.plan.sizes.head_dim) + 2) * (products + added)
        return found[..., None]

    def _sinks_of(self, tile: Tile, most: np.ndarray) -> np.ndarray | float:
        """The magnitudes of the sinks of rows, each times a bound on its weight. most: the largest score of each row"""
        sinks = self.plan.all_sinks
        if sinks is None:
            return 0.0
        entries, rows = (
            slice(None) if sinks.shape[axis] == 1 else at for axis, at in ((0, tile.batch), (2, tile.rows))
        )
        own = sinks[entries, tile.heads, rows, 0].astype(np.float64)
        own, is_none = np.where(np.isfinite(own), own, 0.0), ~np.isfinite(own)
        found: np.ndarray = np.where(is_none, 0.0, np.abs(own) * np.exp(np.minimum(own - most, 0.0)))
        return found

    def run(self, tile: Tile, weights: Array, stages: Mapping[str, Array], write: Any) -> list[Part]:
        """The bounds on what a tile adds, as of TileBackward."""
        seen = np.isfinite(stages["masked_scores"])
        self._steps = self._steps_of(tile, weights, stages["masked_scores"])
        magnitudes = {name: np.abs(array) if name == "scores" else array for name, array in stages.items()}
        if "logsumexp" in stages:  # what sinks weigh, times their steps
            magnitudes["logsumexp"] = stages["logsumexp"] - np.log(self._steps[..., 0])
        errors = weights * self._steps
        if self.plan.normalization == "sum":
            total, relative = self._of_sum(stages["masked_scores"])
            errors = np.abs(weights) * relative + np.where(seen, self._steps - self._roots, 0) / total
        parts = super().run(tile, errors + self._least * seen, magnitudes, write)
        return [part._replace(numbers=np.abs(part.numbers)) for part in parts]

    def delta(self, tile: Tile, weights: Array, of_weights: Array) -> Array:
        """The sum of the magnitudes of the terms of D, which are added."""
        return -super().delta(tile, weights, of_weights) / self._steps

    def scale(self, tile: Tile) -> Array | float:
        """The magnitude of the scale."""
        found: Array = np.abs(super().scale(tile))
        return found

    def sigmoid(
        self, tile: Tile, weights: Array, of_weights: Array | None, stages: Mapping[str, Array]
    ) -> tuple[Array, list[Part]]:
        """The derivative of the sigmoid, with the errors of its score."""
        gradient, parts = super().sigmoid(tile, weights, of_weights, stages)
        return gradient * self._steps, parts

    def sum(
        self, tile: Tile, weights: Array, of_weights: Array | None, stages: Mapping[str, Array]
    ) -> tuple[Array, list[Part]]:
        """Magnitudes over the sum of the scores, whose relative error counts, too. weights: their errors"""
        assert of_weights is not None
        total, relative = self._of_sum(stages["masked_scores"])
        gradient = (of_weights * relative + (weights * of_weights).sum(axis=-1, keepdims=True)) / total
        return np.where(np.isfinite(stages["masked_scores"]), gradient, 0.0), []

    def _of_sum(self, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The magnitude of the sum of the finite scores of each row, and its relative error, (b, h, r, 1) both."""
        finite = np.isfinite(scores)
        scores = np.where(finite, scores, 0.0)
        total = np.abs(scores.sum(axis=-1, keepdims=True))
        total[total == 0] = np.inf  # such rows are 0
        spread = np.sqrt(finite.sum(axis=-1, keepdims=True)) * (self._steps - self._roots) * DEVIATIONS
        return total, self._roots + (spread + self._roots * np.abs(scores).sum(axis=-1, keepdims=True)) / total

    def softcap_slope(self, stages: Mapping[str, Array]) -> Array:
        """The slope, and its absolute error: kernels subtract the square of tanh from 1."""
        return super().softcap_slope(stages) + self._slope


class Dithered(TileBackward):
    """Rounds at random what kernels of half types round before products, one of SOURCES at a time: scores, by a query
    that was scaled; D, of the rounded output; weights, of which some kernels make the gradients of scores, too (torch's
    efficient attention); gradients of scores, and what is added up."""

    def __init__(
        self,
        plan: Plan,
        lib: ArrayLibrary,
        loaded: LoadedOperands,
        output: Array | None,
        case: GradientCase,
        source: str,
        seed: int | None,
    ) -> None:
        super().__init__(plan, lib, loaded, output)
        self._case, self._source, self._unit = case, source, epsilon(case.dtype) / 2
        self._least = 2.0**-25 if case.dtype == np.float16 else 0.0
        self._random, self._is_random = np.random.default_rng(seed or 0), seed is not None
        self.reads = self.reads | {"scaled_scores"}
        self._of_scores = np.zeros(())  # of the tile that is computed

    def noise(self, shape: tuple[int, ...]) -> np.ndarray:
        """Errors in half units, as large as the mean ones; without a seed alike in all rows."""
        return np.where(self._random.integers(0, 2, shape if self._is_random else shape[-1:], np.int8), MEAN, -MEAN)

    def rounded(self, array: np.ndarray, source: str = "products") -> np.ndarray:
        """An array, each number rounded up or down if that is the source; without a seed to the nearest of the type."""
        if self._source != source:
            return array
        if not self._is_random:
            return array.astype(self._case.dtype).astype(array.dtype)
        noise = self.noise(array.shape)
        noise *= np.abs(array) * self._unit + self._least * (array != 0)
        noise += array
        if self._random.random() < 1 / 2:
            noise[np.abs(array) <= self._least] = 0  # all alike, so that their errors add up
        return noise

    def run(self, tile: Tile, weights: Array, stages: Mapping[str, Array], write: Any) -> list[Part]:
        """What a tile adds, from weights of scores whose query or key was multiplied by the scale and rounded."""
        if self._source in ("scores", "delta"):
            self._of_scores = self._errors_of_scores(tile, stages["scaled_scores"])
        if self._source != "scores":
            return super().run(tile, self.rounded(weights, "weights"), stages, write)
        errors = self._of_scores
        if self.plan.normalization == "softmax":  # the sum of a row moves all of its weights, but one that is 1
            of_sums = np.linalg.norm(weights * errors, axis=-1, keepdims=True)
            errors = np.sqrt(np.maximum(np.square(errors) * (1 - 2 * weights) + np.square(of_sums), 0))
        return super().run(tile, weights * (1 + self.noise(errors.shape) / MEAN * errors), stages, write)

    def _errors_of_scores(self, tile: Tile, scores: Array) -> np.ndarray:
        """The errors of the scores of a tile, by a query that was rounded after it was multiplied by the scale."""
        scores = np.abs(scores, where=np.isfinite(scores), out=np.zeros_like(scores))
        query, key = self.query[tile.batch, tile.heads, tile.rows], self.key[tile.batch, tile.kv_heads, tile.columns]
        squares = grouped_matmul(np.square(query), np.square(key).swapaxes(-1, -2), self.lib)
        return np.asarray(MEAN * self._unit * (scores + np.sqrt(squares) * np.abs(self.scale(tile))))

    def of_terms(self, gradient: Array, tile: Tile) -> list[Part]:
        """What a tile adds to a bias, from rounded gradients of scores."""
        return super().of_terms(self.rounded(gradient), tile)

    def over_rows(self, left: Array, right: Array, tile: Tile) -> Array:
        """The product of each head, rounded before heads are added. Few draws of errors of heads could all cancel, so
        that the sum has one error, as large as all of them."""
        each = self.added(np.matmul(left.swapaxes(-1, -2), right), self.plan.sizes.query_length)
        b, h, k, x = each.shape
        each = each.reshape(b, h // self._case.group, self._case.group, k, x)
        found: Array = each.sum(axis=2)
        if self._source != "products" or not self._is_random:
            return found
        errors = np.abs(each) * self._unit + self._least * (each != 0)
        if self._random.random() < 1 / 2:  # what is next to 0 is 0 in all heads, so that these errors add up
            found = each.sum(axis=2, where=np.abs(each) > self._least)
        return found + self.noise(found.shape) * np.sqrt(np.square(errors).sum(axis=2))

    def delta(self, tile: Tile, weights: Array, of_weights: Array) -> Array:
        """D, from an output that was rounded, and made of rounded weights and scores: one number for all features."""
        place, is_softmax = (tile.batch, tile.heads, tile.rows), self.plan.normalization == "softmax"
        is_right = is_softmax and self.output is not None and self._source in ("scores", "delta")
        found = self._case.delta[place][..., None] if is_right else super().delta(tile, weights, of_weights)
        if self._source != "delta" or self.output is None:
            return found
        outputs = (np.abs(self._case.outputs[place]) * self._unit + self._least) * self.output[place]
        products = weights * of_weights * self._unit
        squares = np.vecdot(outputs, outputs) + np.vecdot(products, products)
        if is_softmax:
            moved = weights * self._of_scores * (of_weights - found)
            squares += np.vecdot(moved, moved)
        return found + self.noise((*squares.shape, 1)) / MEAN * np.sqrt(squares)[..., None]

    def products(self, tile: Tile, gradient: Array) -> list[Part]:
        """What a tile adds to query and key, from rounded gradients of scores."""
        parts = super().products(tile, self.rounded(gradient))
        count = gradient.shape[-1]
        return [one._replace(numbers=self.added(one.numbers, count)) if one.field == "query" else one for one in parts]

    def added(self, array: np.ndarray, count: int) -> np.ndarray:
        """A sum of so many terms, rounded, and rounded before the terms of each further tile were added."""
        if self._source != "products" or not self._is_random:
            return array
        noise = self.noise(array.shape)
        noise *= np.abs(array) * self._unit * math.sqrt(count / ADDED)
        noise += array
        return noise


@dataclass(frozen=True, eq=False)
class Limits:
    """What rounding explains of each gradient. limits: like the gradients; worst: gradients of a legal rounding"""

    limits: Gradients
    worst: Gradients


def limits_of(case: GradientCase, right: Gradients, served: Gradients) -> Limits:
    """The limits of gradients. right: in float64; served: as the service computes them in the type of the request"""
    of_type = compute_dtype(case.dtype)
    step = epsilon(of_type) / 4
    approximates = case.dtype.itemsize < 4
    tanh = 4 * TANH_ERROR if approximates else 8 * step
    bounds = _bounds(case, step, tanh)
    spreads, worst = _spreads(case, right) if approximates else ({}, dict(served))
    found = {}
    for name, array in right.items():
        limit = bounds[name] * step + DEVIATIONS * spreads.get(name, 0.0)
        if not _is_of_tiles(case, name):
            apart = np.abs(served[name].astype(np.float64) - array).max(initial=0.0)
            limit = np.maximum(limit, DEVIATIONS * apart + step * (2 + np.abs(array).max(initial=0.0)))
        stored = stored_dtype(case, name)
        least = np.minimum(np.abs(array), largest_number(stored))
        last = np.where(least > 0, ulp(least, stored), 0.0)  # 0 is 0 in every type
        limit = np.asarray(limit + last / 4 + smallest_normal(of_type))  # below it, products may be 0
        found[name] = np.where(limit < UNKNOWN, limit, UNKNOWN)  # also where it is NaN
    return Limits(found, worst)


def _is_of_tiles(case: GradientCase, name: str) -> bool:
    """True if tiles alone make a gradient: no gate, map or output norm has a part in it."""
    field = name.removeprefix(PREFIX).partition(".")[0]
    return field not in ("gate", "projection", "output_norm", "input", "context")


def _bounds(case: GradientCase, step: float, tanh: float) -> dict[str, np.ndarray]:
    """Bounds in steps of ε/4, like the gradients. tanh: the absolute error of 1 - tanh²"""
    slope = tanh / step

    of_tiles = partial(
        Bounds, of_type=compute_dtype(case.dtype), slope=0.0 if case.plan.softcap is None else _relative(case, slope)
    )
    sums: Sums = {}

    def kept(found: Sums) -> Sums:
        sums.update(found)
        return dict(found)

    first = case.run(of_tiles, kept)
    if not any(case.plan.steps) and all(role.map is None for role in case.plan.roles.inputs):
        return {name: np.abs(array) for name, array in first.items()}
    return _through(case, sums, first)


def _relative(case: GradientCase, slope: float) -> float:
    """The absolute error of a slope over the steps that it is multiplied by, the fewest of all rows."""
    return slope / (8 + math.sqrt(case.plan.sizes.key_length))


def _through(case: GradientCase, sums: Sums, first: Gradients) -> dict[str, np.ndarray]:
    """Bounds after the way back through rotations, norms and maps, from errors with random signs."""
    random = np.random.default_rng(0)
    base = _fields(case, {name: np.zeros_like(array) for name, array in sums.items()})
    most = {name: np.zeros(np.shape(array)) for name, array in base.items()}
    for _ in range(SIGNS):
        signed = {name: array * random.choice((-1.0, 1.0), array.shape) for name, array in sums.items()}
        for name, array in _fields(case, signed).items():
            most[name] = np.maximum(most[name], np.abs(array - base[name]))
    widened = {name: _of_row(case, name, array, mean=False) for name, array in most.items() if name in case.names}
    matrices = {name: np.abs(array) for name, array in first.items() if name not in widened}
    return widened | matrices


def _fields(case: GradientCase, sums: Sums) -> dict[str, np.ndarray]:
    backward = Backward(case.plan, case.library(), case.loaded)
    backward.output(case.outputs)
    return {name: np.asarray(array) for name, array in backward.fields(case.outputs, dict(sums)).items()}


def _spreads(case: GradientCase, right: Gradients) -> tuple[dict[str, np.ndarray], Gradients]:
    """The root mean square of the errors of random roundings, like the gradients; and the gradients of one of them."""
    sizes = case.plan.sizes
    few = any(name.removeprefix(PREFIX) not in ROLES for name in right)
    draws = MOST_DRAWS if few else -(-SPREAD // min(sizes.head_dim, sizes.value_dim))
    draws = max(FEWEST_DRAWS, min(MOST_DRAWS, draws) // len(SOURCES))
    squares = {name: np.zeros(array.shape) for name, array in right.items()}
    worst: dict[str, np.ndarray] = {}
    for seed in range(draws):
        worst = {name: np.array(array) for name, array in right.items()}
        for source in SOURCES:  # apart, so that their errors do not cancel
            found = case.run(partial(Dithered, case=case, source=source, seed=seed))
            for name, array in found.items():
                apart = array - right[name]
                worst[name] += apart
                squares[name] += np.square(apart)
    nearest = {name: np.zeros(array.shape) for name, array in right.items()}
    for source in SOURCES:  # equal rows have equal errors, which add up
        for name, array in case.run(partial(Dithered, case=case, source=source, seed=None)).items():
            nearest[name] += np.abs(array - right[name])
    spreads = {}
    for name, total in squares.items():
        mean = np.maximum(total / draws, np.square(nearest[name] / 2))
        # Where one term makes the error of a row, a large feature of it has a large error.
        spreads[name] = np.sqrt(np.maximum(mean, _of_row(case, name, mean, mean=True)))
    return spreads, worst


def _of_row(case: GradientCase, name: str, array: np.ndarray, *, mean: bool) -> np.ndarray:
    """The mean or the maximum of each row of query, key, value and what they come from.

    Others stay as they are; but parameters in objects have one maximum for all numbers, as norms and maps make features
    of each other.
    """
    field = name.removeprefix(PREFIX)
    of_role = {"query": 0, "key": 1, "value": 2, "past_key": 1, "past_value": 2}
    if field not in of_role and field not in ("input", "context"):
        if mean or "." not in field:
            return array
        return np.full(array.shape, array.max(initial=0.0))
    layout = case.plan.layout if array.ndim == len(case.plan.layout) else "d"
    axis = layout.index("d")
    heads = 1
    role = of_role.get(field)
    if role is not None and "h" not in layout and case.plan.roles.inputs[role].map is None:
        heads = case.plan.sizes.num_heads if role == 0 else case.plan.sizes.num_kv_heads
    split = array.reshape(*array.shape[:axis], heads, -1, *array.shape[axis + 1 :])
    reduced = split.mean(axis=axis + 1, keepdims=True) if mean else split.max(axis=axis + 1, keepdims=True, initial=0.0)
    return np.broadcast_to(reduced, split.shape).reshape(array.shape)
