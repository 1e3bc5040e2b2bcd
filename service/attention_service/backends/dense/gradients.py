"""The backward pass of scores and weights: each tile, while its weights are in the cache.

With P the weights, S the scaled scores, Z the masked scores, O the head outputs, dX the gradient of X, dL the cotangent
of the logsumexp:

    dV = Pᵀ dO,  dP = dO Vᵀ,  D = rowsum(P ⊙ dP) = rowsum(O ⊙ dO)
    softmax: dZ = P ⊙ (dP - D + dL)       (Dao et al. 2022, "FlashAttention", appendix B.2)
    sigmoid: dZ = P ⊙ (1 - P) ⊙ dP        sum: dZ = (dP - D) / rowsum(Z), 0 where Z sums to 0
    softcap: dS = dZ ⊙ (1 - tanh²(S / cap))
    dQ = scale · dS K,  dK = scale · dSᵀ Q,  dscale = Σ dS ⊙ (Q Kᵀ)

A hidden score has the gradient 0, whatever its key and value are.

Shapes in comments: b batch, h heads, g key/value heads, r the queries of a tile, k its keys, d and e features.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import numpy as np

from attention_service.attention.plan import Plan
from attention_service.attention.score_term import Part
from attention_service.attention.spec import Output
from attention_service.attention.tile import Tile, part_of
from attention_service.attention.visibility import visible
from attention_service.backends.dense.buffers import ResultBuffers
from attention_service.backends.dense.gates import logistic_slope
from attention_service.backends.dense.library import Array, ArrayLibrary, finite, largest_number
from attention_service.backends.dense.operands import LoadedOperands
from attention_service.backends.dense.products import grouped_matmul

DZ: Final = "grad_masked_scores"
DS: Final = "grad_scaled_scores"
DQK: Final = "grad_scores"


class GradientBuffers(ResultBuffers):
    """Buffers for what a plan returns, and for the gradients of its operands, terms, scale and sinks.

    What tiles add to a gradient is added in the order of the tiles, so that no bits depend on which thread is faster:
    each thread waits for its turn, and holds the numbers of one tile.

    output: (b, h, q, e), the cotangent of the head outputs; None for zeros
    gradients: by field, with the axes of the plan: key and value of past and new tokens together
    """

    def __init__(self, plan: Plan, lib: ArrayLibrary, loaded: LoadedOperands, output: Array | None) -> None:
        super().__init__(plan, lib)
        assert plan.gradients is not None
        self.needs_weights, self.streams = True, False
        self._plan = plan
        self._operands = _finite(plan, lib, loaded)
        self._output = output
        self._logsumexp = None if plan.gradients.logsumexp is None else lib.load(plan.gradients.logsumexp)
        self._hides = not _stays_finite(plan, lib, loaded, output)
        self.gradients = {name: lib.zeros(shape, plan.compute_dtype) for name, shape in plan.gradient_shapes.items()}
        # Of the tiles that are computed now, by the tile: scores of former stages, and what the tile adds to gradients.
        self._stages: dict[tuple[int, int, int], dict[str, Array]] = {}
        self._parts: dict[tuple[int, int, int], list[Part]] = {}
        self._turn = threading.Condition()
        self._next = 0
        self._has_failed = False
        kept = {"scores": "scale" in self.gradients, "scaled_scores": plan.softcap is not None}
        kept |= {"masked_scores": plan.normalization != "softmax", "logsumexp": "sinks" in self.gradients}
        self._kept = {name for name, is_kept in kept.items() if is_kept}

    def add(self, name: Output, tile: Tile, block: Array) -> None:
        """Write a block as `ResultBuffers` does, and keep it if the gradients of the tile need it."""
        super().add(name, tile, block)
        if name in self._kept:
            self._stages.setdefault(_key(tile), {})[name] = self._lib.xp.asarray(block, copy=True)

    def add_weights(self, tile: Tile, weights: Array) -> Array | None:
        """Write what the plan includes of the weights of a tile, and compute the gradients of the tile."""
        received = super().add_weights(tile, weights)
        stages = self._stages.pop(_key(tile), {})
        self._parts[_key(tile)] = self._backward(tile, weights, stages)
        return received

    @contextmanager
    def turn(self, number: int, tile: Tile) -> Iterator[None]:
        """Computes a tile inside, and adds to the gradients after the tiles before it. Errors: those of the tile."""
        try:
            yield
        except BaseException:
            with self._turn:  # the tiles after it need not wait
                self._has_failed = True
                self._turn.notify_all()
            raise
        with self._turn:
            self._turn.wait_for(lambda: self._next == number or self._has_failed)
            for part in self._parts.pop(_key(tile)):
                if part.field in self.gradients:
                    self.gradients[part.field][part.place] += part.numbers
            self._next += 1
            self._turn.notify_all()

    def _backward(self, tile: Tile, weights: Array, stages: Mapping[str, Array]) -> list[Part]:
        """What a tile adds to the gradients. weights: (b, h, r, k)"""
        plan, lib, parts = self._plan, self._lib, []
        seen = self._seen(tile, weights) if self._hides else None
        of_weights = None
        if self._output is not None:
            output, of_weights = self._weights_backward(tile)
            of_weights = self._shown(of_weights, seen)
            if "value" in self.gradients:
                product = transposed_product(weights, output, tile, lib)
                parts.append(Part("value", (tile.batch, tile.kv_heads, tile.columns), product))
        steps = {"softmax": self._softmax, "sum": self._sum, "sigmoid": self._sigmoid}
        gradient, of_sinks = steps[plan.normalization](tile, weights, of_weights, stages)
        super().add(DZ, tile, gradient)
        parts += of_sinks
        for term in plan.terms:
            parts += term.backward(gradient, tile, lib)
        if plan.softcap is not None:
            slope = 4 * logistic_slope(stages["scaled_scores"] * (2 / plan.softcap), lib.xp)  # 1 - tanh²
            gradient = gradient * self._shown(slope, seen)
        super().add(DS, tile, gradient)
        if "scale" in self.gradients:
            products = gradient * self._shown(stages["scores"], seen)
            parts.append(Part("scale", (tile.heads,), lib.xp.sum(products, axis=(0, 2, 3))))
        scale = plan.scale if plan.head_scales is None else lib.load(plan.head_scales[tile.heads, None, None])
        gradient = gradient * scale
        super().add(DQK, tile, gradient)
        return parts + self._products_backward(tile, gradient)

    def _weights_backward(self, tile: Tile) -> tuple[Array, Array]:
        """The cotangent (b, h, r, e) of the outputs of a tile, and the gradient (b, h, r, k) of its weights."""
        assert self._output is not None
        output = self._output[tile.batch, tile.heads, tile.rows]
        value = self._operands[2][tile.batch, tile.kv_heads, tile.columns]
        return output, grouped_matmul(output, self._lib.xp.permute_dims(value, (0, 1, 3, 2)), self._lib)

    def _softmax(
        self, tile: Tile, weights: Array, of_weights: Array | None, stages: Mapping[str, Array]
    ) -> tuple[Array, list[Part]]:
        """The gradient (b, h, r, k) of the masked scores, and what the tile adds to that of the sinks."""
        lib, shift = self._lib, self._lib.zeros((*weights.shape[:3], 1), self._plan.compute_dtype)
        if self._logsumexp is not None:
            shift = shift + self._logsumexp[tile.batch, tile.heads, tile.rows][..., None]
        if of_weights is not None:
            shift = shift - lib.row_sums(weights * of_weights)
            of_weights += shift
            of_weights *= weights
        gradient = weights * shift if of_weights is None else of_weights
        if self._plan.all_sinks is None or "sinks" not in self.gradients:
            return gradient, []
        sinks = lib.load(part_of(self._plan.all_sinks, tile))
        of_sinks = lib.xp.exp(sinks - stages["logsumexp"][..., None]) * shift  # b h r 1
        if self._plan.row_sinks is None:
            place: tuple[slice, ...] = (slice(0, 1), tile.heads)
            of_sinks = lib.xp.sum(of_sinks, axis=(0, 2), keepdims=True)
        else:
            place = (tile.batch, tile.heads, tile.rows)
        return gradient, [Part("sinks", place, of_sinks)]

    def _sum(
        self, tile: Tile, weights: Array, of_weights: Array | None, stages: Mapping[str, Array]
    ) -> tuple[Array, list[Part]]:
        """The gradient of the scores that are divided by their sum; 0 where the sum is 0."""
        assert of_weights is not None
        lib, xp, scores = self._lib, self._lib.xp, stages["masked_scores"]
        seen = xp.isfinite(scores)
        lib.hide(scores, seen, 0.0)
        total = xp.sum(scores, axis=-1, keepdims=True)
        seen = seen & (total != 0)
        gradient = (of_weights - lib.row_sums(weights * of_weights)) / xp.where(total == 0, xp.ones_like(total), total)
        lib.hide(gradient, seen, 0.0)
        return gradient, []

    def _sigmoid(
        self, tile: Tile, weights: Array, of_weights: Array | None, stages: Mapping[str, Array]
    ) -> tuple[Array, list[Part]]:
        """The gradient of the scores for σ' = σ (1 - σ)."""
        assert of_weights is not None
        return logistic_slope(stages["masked_scores"], self._lib.xp) * of_weights, []

    def _products_backward(self, tile: Tile, gradient: Array) -> list[Part]:
        """What a tile adds to the gradients of query and key. gradient: (b, h, r, k), of their products"""
        lib, parts = self._lib, []
        query = self._operands[0][tile.batch, tile.heads, tile.rows]
        key = self._operands[1][tile.batch, tile.kv_heads, tile.columns]
        found = [term.products_backward(gradient, query, tile, lib) for term in self._plan.terms]
        if "query" in self.gradients:
            of_query = grouped_matmul(gradient, key, lib)
            for relative in found:
                of_query = of_query if relative is None else of_query + relative[0]
            parts.append(Part("query", (tile.batch, tile.heads, tile.rows), of_query))
        if "key" in self.gradients:
            product = transposed_product(gradient, query, tile, lib)
            parts.append(Part("key", (tile.batch, tile.kv_heads, tile.columns), product))
        for relative in found:
            parts += [] if relative is None else relative[1]
        return parts

    def _seen(self, tile: Tile, weights: Array) -> Array | None:
        """True where a key has weight, or if weights may be 0 by chance, where it is visible; None if all are."""
        if self._plan.normalization == "sum":
            return visible(self._plan.terms, tile, self._lib.load)
        return weights != 0

    def _shown(self, numbers: Array, seen: Array | None) -> Array:
        """Numbers (b, h, r, k) of a tile, in place 0 where a key is hidden."""
        if seen is not None:
            self._lib.hide(numbers, self._lib.xp.broadcast_to(seen, numbers.shape), 0.0)
        return numbers


def transposed_product(left: Array, right: Array, tile: Tile, lib: ArrayLibrary) -> Array:
    """(b, h, r, x)ᵀ @ (b, h, r, y) -> (b, g, x, y), summed over the heads of each group of a tile."""
    xp, (b, h, r, _), groups = lib.xp, left.shape, tile.kv_heads.stop - tile.kv_heads.start
    left, right = (xp.reshape(x, (b, groups, h // groups * r, x.shape[-1])) for x in (left, right))
    return lib.matmul(xp.permute_dims(left, (0, 1, 3, 2)), right)


def _key(tile: Tile) -> tuple[int, int, int]:
    return tile.batch.start, tile.heads.start, tile.rows.start


def _finite(plan: Plan, lib: ArrayLibrary, loaded: LoadedOperands) -> tuple[Array, Array, Array]:
    """Query, key and value with 0 for each number that is not finite, which only hidden tokens may have."""
    limit = largest_number(plan)
    if _are_finite(loaded) and all(norms.max() < limit for norms in loaded.norms):
        return loaded.query, loaded.key, loaded.value
    return finite(loaded.query, lib.xp), finite(loaded.key, lib.xp), loaded.value  # which has none


def _are_finite(loaded: LoadedOperands) -> bool:
    """True if all numbers of the request are finite. A norm has a bound even for those that are not."""
    assert loaded.operands is not None
    return bool(loaded.operands.finite.all())


def _stays_finite(plan: Plan, lib: ArrayLibrary, loaded: LoadedOperands, output: Array | None) -> bool:
    """True if by the sizes of operands and cotangent no number of a hidden key becomes infinite or NaN on the way."""
    if not _are_finite(loaded):
        return False
    query, key, value = (float(norms.max()) for norms in loaded.norms)
    products = query * key + sum(float(np.max(term.largest_product(query))) for term in plan.terms)
    scaled = products * max(1.0, float(np.abs(plan.scales).max()))
    largest = 0.0 if output is None else float(lib.xp.max(lib.xp.abs(output)))
    limit = largest_number(plan)
    return scaled < limit and largest * math.sqrt(plan.sizes.value_dim) * value < limit
