"""The backward pass of scores and weights: each tile, while its weights are in the cache.

A tile has whole rows, and their weights and outputs are computed just before. Long rows come in blocks of keys, whose
weights are computed once more from the logsumexp (Dao et al. 2022, "FlashAttention", algorithm 4).

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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import numpy as np

from attention_service.attention.plan import Plan
from attention_service.attention.score_term import Part
from attention_service.attention.spec import Output
from attention_service.attention.tile import Tile, part_of
from attention_service.attention.tiles import columns_of
from attention_service.attention.visibility import visible
from attention_service.backends.dense.buffers import ResultBuffers
from attention_service.backends.dense.gates import logistic_slope
from attention_service.backends.dense.library import Array, ArrayLibrary, finite, largest_number
from attention_service.backends.dense.operands import LoadedOperands
from attention_service.backends.dense.products import grouped_matmul

DZ: Final = "grad_masked_scores"
DS: Final = "grad_scaled_scores"
DQK: Final = "grad_scores"
# Writes a gradient (b, h, r, k) of a stage of the scores of a tile, if the plan returns it.
Write = Callable[[Output, Tile, Array], None]


class GradientBuffers(ResultBuffers):
    """Buffers for what a plan returns, and for the gradients that its tiles add up.

    What tiles add to a gradient is added in the order of the tiles, so that no bits depend on which thread is faster:
    each thread waits for its turn, and holds the numbers of one tile.

    backward: of the tiles
    gradients: by field, with the axes of the plan: key and value of past and new tokens together
    """

    def __init__(self, plan: Plan, lib: ArrayLibrary, backward: TileBackward) -> None:
        super().__init__(plan, lib)
        self.needs_weights, self.streams = True, False
        self.backward = backward
        self.gradients = {name: lib.zeros(shape, plan.compute_dtype) for name, shape in plan.gradient_shapes.items()}
        # Of the tiles that are computed now, by the tile: scores of former stages, and what the tile adds to gradients.
        self._stages: dict[tuple[int, ...], dict[str, Array]] = {}
        self._parts: dict[tuple[int, ...], list[Part]] = {}
        self._turn = threading.Condition()
        self._next = 0
        self._has_failed = False

    def add(self, name: Output, tile: Tile, block: Array) -> None:
        """Write a block as `ResultBuffers` does, and keep it if the gradients of the tile need it."""
        super().add(name, tile, block)
        if name in self.backward.reads:
            self._stages.setdefault(_key(tile), {})[name] = self._lib.xp.asarray(block, copy=True)

    def add_weights(self, tile: Tile, weights: Array) -> Array | None:
        """Write what the plan includes of the weights of a tile, and compute the gradients of the tile."""
        received = super().add_weights(tile, weights)
        stages = self._stages.pop(_key(tile), {})
        self._parts[_key(tile)] = self.backward.run(tile, weights, stages, super().add)
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


class TileBackward:
    """The backward pass of tiles: from the cotangent of their outputs to what each adds to the gradients of a plan.

    output: (b, h, q, e), the cotangent of the head outputs; None for zeros
    reads: the stages before the weights that `run` needs
    """

    def __init__(self, plan: Plan, lib: ArrayLibrary, loaded: LoadedOperands, output: Array | None) -> None:
        assert plan.gradients is not None
        self.plan, self.lib, self.output = plan, lib, output
        self.query, self.key, self.value = _finite(plan, lib, loaded)
        self.logsumexp = None if plan.gradients.logsumexp is None else lib.load(plan.gradients.logsumexp)
        self.wanted = frozenset(plan.gradient_shapes)
        self._hides = not _stays_finite(plan, lib, loaded, output)
        reads = {"scores": "scale" in self.wanted, "scaled_scores": plan.softcap is not None}
        reads |= {"masked_scores": plan.normalization != "softmax", "logsumexp": "sinks" in self.wanted}
        self.reads = {name for name, is_read in reads.items() if is_read}

    def run(self, tile: Tile, weights: Array, stages: Mapping[str, Array], write: Write) -> list[Part]:
        """What a tile adds to the gradients. weights: (b, h, r, k); stages: those that it reads

        write: takes the gradients of the stages of the scores, which are overwritten afterwards
        """
        plan, lib, parts = self.plan, self.lib, []
        seen = self._seen(tile, weights) if self._hides else None
        of_weights = None
        if self.output is not None:
            output = self.output[tile.batch, tile.heads, tile.rows]
            of_weights = self._shown(self.of_weights(output, tile), seen)
            if "value" in self.wanted:
                product = self.over_rows(weights, output, tile)
                parts.append(Part("value", (tile.batch, tile.kv_heads, tile.columns), product))
        steps = {"softmax": self.softmax, "sum": self.sum, "sigmoid": self.sigmoid}
        gradient, of_sinks = steps[plan.normalization](tile, weights, of_weights, stages)
        write(DZ, tile, gradient)
        parts += of_sinks
        parts += self.of_terms(gradient, tile)
        if plan.softcap is not None:
            gradient = gradient * self._shown(self.softcap_slope(stages), seen)
        write(DS, tile, gradient)
        if "scale" in self.wanted:
            products = gradient * self._shown(stages["scores"], seen)
            parts.append(Part("scale", (tile.heads,), lib.xp.sum(products, axis=(0, 2, 3))))
        gradient = gradient * self.scale(tile)  # terms hold it as it was
        write(DQK, tile, gradient)
        return parts + self.products(tile, gradient)

    def of_weights(self, output: Array, tile: Tile) -> Array:
        """The gradient (b, h, r, k) of the weights. output: (b, h, r, e), the cotangent of the outputs of the tile"""
        value = self.value[tile.batch, tile.kv_heads, tile.columns]
        return grouped_matmul(output, self.lib.xp.permute_dims(value, (0, 1, 3, 2)), self.lib)

    def over_rows(self, left: Array, right: Array, tile: Tile) -> Array:
        """(b, h, r, x)ᵀ @ (b, h, r, y) -> (b, g, x, y), summed over the heads of each group."""
        xp, (b, h, r, _), groups = self.lib.xp, left.shape, tile.kv_heads.stop - tile.kv_heads.start
        left, right = (xp.reshape(x, (b, groups, h // groups * r, x.shape[-1])) for x in (left, right))
        return self.lib.matmul(xp.permute_dims(left, (0, 1, 3, 2)), right)

    def of_terms(self, gradient: Array, tile: Tile) -> list[Part]:
        """What a tile adds to the arrays of terms. gradient: (b, h, r, k), of the masked scores"""
        return [part for term in self.plan.terms for part in term.backward(gradient, tile, self.lib)]

    def softcap_slope(self, stages: Mapping[str, Array]) -> Array:
        """The derivative (b, h, r, k) of the capped scores: 1 - tanh², as 4 σ' for its digits near 0."""
        assert self.plan.softcap is not None
        return 4 * logistic_slope(stages["scaled_scores"] * (2 / self.plan.softcap), self.lib.xp)

    def scale(self, tile: Tile) -> Array | float:
        """What the products of query and key are multiplied by: one number, or (h, 1, 1)."""
        plan = self.plan
        return plan.scale if plan.head_scales is None else self.lib.load(plan.head_scales[tile.heads, None, None])

    def delta(self, tile: Tile, weights: Array, of_weights: Array) -> Array:
        """D (b, h, r, 1), the mean of the gradient of the weights."""
        return self.lib.row_sums(weights * of_weights)

    def softmax(
        self, tile: Tile, weights: Array, of_weights: Array | None, stages: Mapping[str, Array]
    ) -> tuple[Array, list[Part]]:
        """The gradient (b, h, r, k) of the masked scores, and what the tile adds to that of the sinks."""
        shift = self.lib.zeros((*weights.shape[:3], 1), self.plan.compute_dtype)
        if self.logsumexp is not None:
            shift = shift + self.logsumexp[tile.batch, tile.heads, tile.rows][..., None]
        if of_weights is not None:
            shift = shift - self.delta(tile, weights, of_weights)
            of_weights += shift
            of_weights *= weights
        gradient = weights * shift if of_weights is None else of_weights
        return gradient, self.of_sinks(tile, shift, stages)

    def of_sinks(self, tile: Tile, shift: Array, stages: Mapping[str, Array]) -> list[Part]:
        """What a tile adds to the gradient of the sinks. shift: (b, h, r, 1), dL - D"""
        if self.plan.all_sinks is None or "sinks" not in self.wanted:
            return []
        lib, sinks = self.lib, self.lib.load(part_of(self.plan.all_sinks, tile))
        of_sinks = lib.xp.exp(sinks - stages["logsumexp"][..., None]) * shift  # b h r 1
        if self.plan.row_sinks is None:
            place: tuple[slice, ...] = (slice(0, 1), tile.heads)
            of_sinks = lib.xp.sum(of_sinks, axis=(0, 2), keepdims=True)
        else:
            place = (tile.batch, tile.heads, tile.rows)
        return [Part("sinks", place, of_sinks)]

    def sum(
        self, tile: Tile, weights: Array, of_weights: Array | None, stages: Mapping[str, Array]
    ) -> tuple[Array, list[Part]]:
        """The gradient of the scores that are divided by their sum; 0 where the sum is 0."""
        assert of_weights is not None
        lib, xp, scores = self.lib, self.lib.xp, stages["masked_scores"]
        seen = xp.isfinite(scores)
        lib.hide(scores, seen, 0.0)
        total = xp.sum(scores, axis=-1, keepdims=True)
        seen = seen & (total != 0)
        gradient = (of_weights - self.delta(tile, weights, of_weights)) / xp.where(
            total == 0, xp.ones_like(total), total
        )
        lib.hide(gradient, seen, 0.0)
        return gradient, []

    def sigmoid(
        self, tile: Tile, weights: Array, of_weights: Array | None, stages: Mapping[str, Array]
    ) -> tuple[Array, list[Part]]:
        """The gradient of the scores for σ' = σ (1 - σ)."""
        assert of_weights is not None
        return logistic_slope(stages["masked_scores"], self.lib.xp) * of_weights, []

    def products(self, tile: Tile, gradient: Array) -> list[Part]:
        """What a tile adds to the gradients of query and key. gradient: (b, h, r, k), of their products"""
        lib, parts = self.lib, []
        query = self.query[tile.batch, tile.heads, tile.rows]
        key = self.key[tile.batch, tile.kv_heads, tile.columns]
        found = [term.products_backward(gradient, query, tile, lib) for term in self.plan.terms]
        if "query" in self.wanted:
            of_query = grouped_matmul(gradient, key, lib)
            for relative in found:
                of_query = of_query if relative is None else of_query + relative[0]
            parts.append(Part("query", (tile.batch, tile.heads, tile.rows), of_query))
        if "key" in self.wanted:
            product = self.over_rows(gradient, query, tile)
            parts.append(Part("key", (tile.batch, tile.kv_heads, tile.columns), product))
        for relative in found:
            parts += [] if relative is None else relative[1]
        return parts

    def _seen(self, tile: Tile, weights: Array) -> Array | None:
        """True where a key has weight, or if weights may be 0 by chance, where it is visible; None if all are."""
        if self.plan.normalization == "sum":
            return visible(self.plan.terms, tile, self.lib.load)
        return weights != 0

    def _shown(self, numbers: Array, seen: Array | None) -> Array:
        """Numbers (b, h, r, k) of a tile, in place 0 where a key is hidden."""
        if seen is not None:
            self.lib.hide(numbers, self.lib.xp.broadcast_to(seen, numbers.shape), 0.0)
        return numbers


class BlockBackward(TileBackward):
    """The backward pass of blocks of keys: D comes from the outputs of their rows. head_outputs: (b, h, q, e)"""

    def __init__(
        self, plan: Plan, lib: ArrayLibrary, loaded: LoadedOperands, output: Array | None, head_outputs: Array
    ) -> None:
        super().__init__(plan, lib, loaded, output)
        self._head_outputs = head_outputs

    def delta(self, tile: Tile, weights: Array, of_weights: Array) -> Array:
        """D (b, h, r, 1) of the rows of a block."""
        assert self.output is not None
        place = tile.batch, tile.heads, tile.rows
        return self.lib.row_sums(self._head_outputs[place] * self.output[place])

    def of_sinks(self, tile: Tile, shift: Array, stages: Mapping[str, Array]) -> list[Part]:
        """What the first block of its rows adds to the gradient of the sinks, which have no keys; [] for the others."""
        is_first = tile.columns.start == columns_of(self.plan, tile.batch, tile.rows).start
        return super().of_sinks(tile, shift, stages) if is_first else []


def _key(tile: Tile) -> tuple[int, int, int, int]:
    return tile.batch.start, tile.heads.start, tile.rows.start, tile.columns.start


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
