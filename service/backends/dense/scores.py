"""The scores of one tile, from the product of query and key to weights and outputs."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from service.attention.plan import Plan
from service.attention.result import overflow
from service.attention.tiles import Tile, part_of
from service.backends.dense.buffers import ResultBuffers, TileSums
from service.backends.dense.library import Array, ArrayLibrary
from service.backends.dense.numerics import NumericPath
from service.backends.dense.operands import LoadedOperands


class TileScores:
    """The scores of a tile. Each step overwrites the step before it."""

    def __init__(self, plan: Plan, lib: ArrayLibrary, loaded: LoadedOperands, path: NumericPath, tile: Tile) -> None:
        self._plan = plan
        self._lib = lib
        self._tile = tile
        self._path = path
        self._query = loaded.query[tile.batch, tile.heads, tile.rows]  # b h r d
        self._key = loaded.key[tile.batch, tile.kv_heads, :, tile.columns]  # b g d k
        self._value = loaded.value[tile.batch, tile.kv_heads, tile.columns]  # b g k e
        self._bad_values = loaded.bad_values
        # If exponentials are all that is made of the scores, hiding the columns that an edge of a band cuts is enough.
        # Every other step must know of each score if it is visible.
        self._edges: list[tuple[slice, Array]] = []
        if path.subtracts_max:
            self._visible = visible(plan, lib, tile)
        else:
            self._visible, self._edges = _visible_and_edges(plan, lib, tile)

    def run(self, head_outputs: Array, buffers: ResultBuffers) -> TileSums:
        """Write the head outputs of the tile, and what the plan returns of its scores."""
        tile = self._tile
        weights = self._masked_scores(buffers)
        zero_sum = False
        if self._plan.normalization == "sum":
            total, zero_sum = self._sum_scores(weights)
            weights /= total
            outputs = grouped_matmul(weights, self._value, self._lib)
            masked = count_fully_masked(self._plan, self._lib, self._visible, tile)
        else:
            outputs, masked = self._softmax(weights, buffers)
        received = buffers.add_weights(tile, weights) if buffers.needs_weights else None
        head_outputs[tile.batch, tile.heads, tile.rows] = outputs
        return TileSums(tile, masked, zero_sum, received)

    def _softmax(self, scores: Array, buffers: ResultBuffers) -> tuple[Array, Array]:
        """Turn scores into weights, in place. Returns the head outputs (b, h, r, e) and the number of masked rows."""
        subtracted = self._exponentials(scores)
        total = self._row_sums(scores)
        outputs = grouped_matmul(scores, self._value, self._lib) if self._path.divides_last else None
        masked = self._count_fully_masked(total)
        if self._plan.sinks is not None:
            total = total + self._lib.xp.exp(sinks_of(self._plan, self._lib, self._tile) - subtracted)
        buffers.add("logsumexp", self._tile, (subtracted + self._lib.xp.log(total))[..., 0])
        divisor = one_for_zero(total, self._lib) if self._hides else total
        if outputs is None:
            scores /= divisor
            return grouped_matmul(scores, self._value, self._lib), masked
        outputs /= divisor
        if buffers.needs_weights:
            scores /= divisor
        return outputs, masked

    def exponentials_times_values(self, buffers: ResultBuffers) -> tuple[Array, Array]:
        """Exponentials, without a maximum subtracted, times values (b, h, r, e), and their sums (b, h, r, 1)."""
        exponentials = self._lib.exp(self._masked_scores(buffers))
        return grouped_matmul(exponentials, self._value, self._lib), self._row_sums(exponentials)

    @property
    def _hides(self) -> bool:
        """True if a score of this tile may be hidden."""
        return self._visible is not None or bool(self._edges)

    def _count_fully_masked(self, total: Array) -> Array:
        """Rows that see no key: where no exponential can underflow, the rows whose sum is 0."""
        if self._path.subtracts_max:
            return count_fully_masked(self._plan, self._lib, self._visible, self._tile)
        return count_rows(self._plan, self._lib, total[..., 0] == 0, self._tile) if self._hides else 0

    def _masked_scores(self, buffers: ResultBuffers) -> Array:
        """masked_scores (b, h, r, k). The stages before them go to the buffers."""
        plan, xp = self._plan, self._lib.xp
        out = buffers.scores_of(self._tile)
        if out is None:
            out = self._lib.scratch((*self._query.shape[:3], self._key.shape[-1]))
        scores = grouped_matmul(self._query, self._key, self._lib, out)
        buffers.add("scores", self._tile, scores)
        if not self._path.scales_query:
            scores *= plan.scale
        buffers.add("scaled_scores", self._tile, scores)
        if plan.softcap is not None:
            scores /= plan.softcap
            xp.tanh(scores, out=scores)
            scores *= plan.softcap
        buffers.add("capped_scores", self._tile, scores)
        for added in additions(plan, self._lib, self._tile):
            scores += added
        if self._path.checks_overflow:
            self._check_finite(scores)
        if self._visible is not None:
            self._lib.hide(scores, self._visible, -np.inf)
        for columns, seen in self._edges:
            self._lib.hide(scores[..., columns], seen, -np.inf)
        buffers.add("masked_scores", self._tile, scores)
        return scores

    def _check_finite(self, scores: Array) -> None:
        """Errors: Overflow for a visible score, or a visible value, that is not finite."""
        xp = self._lib.xp
        bad = ~xp.isfinite(scores)
        if self._bad_values is not None:
            values = self._bad_values[self._tile.batch, self._tile.kv_heads, :, self._tile.columns]
            bad = bad | xp.repeat(values, scores.shape[1] // values.shape[1], axis=1)
        if self._visible is not None:
            bad = bad & self._visible
        if xp.any(bad):
            raise overflow(self._plan, "scores")

    def _exponentials(self, scores: Array) -> Array:
        """Turn scores into their exponentials, in place. Returns what was subtracted before, (b, h, r, 1)."""
        xp, plan = self._lib.xp, self._plan
        if not self._path.subtracts_max:
            self._lib.exp(scores)
            return xp.zeros((1, 1, 1, 1), dtype=scores.dtype, device=self._lib.device)
        largest = xp.max(scores, axis=-1, keepdims=True)
        if plan.sinks is not None:
            largest = xp.maximum(largest, sinks_of(plan, self._lib, self._tile))
        if self._visible is not None:  # a row that sees no key has no largest score
            largest = xp.where(xp.isfinite(largest), largest, xp.zeros_like(largest))
        scores -= largest
        self._lib.exp(scores)
        return largest

    def _row_sums(self, exponentials: Array) -> Array:
        """Sums over the keys (b, h, r, 1). A product with ones is faster than a reduction."""
        ones = self._lib.xp.ones((exponentials.shape[-1], 1), dtype=exponentials.dtype, device=self._lib.device)
        return self._lib.matmul(exponentials, ones)

    def _sum_scores(self, scores: Array) -> tuple[Array, bool]:
        """Set hidden scores to 0. Returns row sums (b, h, r, 1), and True if visible scores of a row sum to 0."""
        xp = self._lib.xp
        if self._visible is not None:
            self._lib.hide(scores, self._visible, 0.0)
        total = xp.sum(scores, axis=-1, keepdims=True)
        if not xp.all(xp.isfinite(total)):
            raise overflow(self._plan, "sums of scores")
        zero = total == 0
        if not xp.any(zero):
            return total, False
        sees = True if self._visible is None else xp.any(self._visible, axis=-1, keepdims=True)
        self._lib.hide(scores, xp.broadcast_to(~zero, scores.shape), 0.0)
        return xp.where(zero, xp.ones_like(total), total), bool(xp.any(zero & sees))


def run_in_blocks(
    plan: Plan, lib: ArrayLibrary, tile: Tile, blocks: Iterable[TileScores], head_outputs: Array, buffers: ResultBuffers
) -> TileSums:
    """Compute a tile whose keys come in blocks, of whose scores nothing is kept but sums."""
    outputs = total = None
    for block in blocks:
        part = block.exponentials_times_values(buffers)
        if outputs is None:
            outputs, total = part
        else:
            outputs += part[0]
            total += part[1]
    unseen: Array = total == 0
    if plan.sinks is not None:
        total = total + lib.xp.exp(sinks_of(plan, lib, tile))
    buffers.add("logsumexp", tile, lib.xp.log(total)[..., 0])
    outputs /= one_for_zero(total, lib)
    head_outputs[tile.batch, tile.heads, tile.rows] = outputs
    return TileSums(tile, count_rows(plan, lib, unseen[..., 0], tile))


def visible(plan: Plan, lib: ArrayLibrary, tile: Tile) -> Array | None:
    """Booleans that broadcast to the scores of a tile, True = visible; None if all are."""
    found = None
    for term in plan.terms:
        seen = term.visible(tile, lib.load)
        if seen is not None:
            found = seen if found is None else found & seen
    return found


def _visible_and_edges(plan: Plan, lib: ArrayLibrary, tile: Tile) -> tuple[Array | None, list[tuple[slice, Array]]]:
    """The same, the edges of bands apart: columns of the tile, with booleans for these columns."""
    found, edges = None, []
    for term in plan.terms:
        for columns, seen in term.edges(tile, lib.load):
            if columns != slice(None):
                edges.append((columns, seen))
            else:
                found = seen if found is None else found & seen
    return found, edges


def additions(plan: Plan, lib: ArrayLibrary, tile: Tile) -> list[Array]:
    """What is added to the scores of a tile; each array broadcasts to them."""
    return [added for term in plan.terms if (added := term.added(tile, lib.load)) is not None]


def count_fully_masked(plan: Plan, lib: ArrayLibrary, seen: Array | None, tile: Tile) -> Array:
    """How many rows of a tile see no key, those of padding not counted. seen: the result of `visible`

    A number of the library, which may not be computed yet.
    """
    return 0 if seen is None else count_rows(plan, lib, ~lib.xp.any(seen, axis=-1), tile)


def count_rows(plan: Plan, lib: ArrayLibrary, unseen: Array, tile: Tile) -> Array:
    """How many of these rows (b, h, r), each axis full or 1, are not padding."""
    if plan.real_queries is not None:
        unseen = unseen & lib.load(part_of(plan.real_queries[:, None, :, None], tile)[..., 0])
    shape = tuple(part.stop - part.start for part in (tile.batch, tile.heads, tile.rows))
    return lib.xp.sum(lib.xp.broadcast_to(unseen, shape))


def sinks_of(plan: Plan, lib: ArrayLibrary, tile: Tile) -> Array:
    """The sinks of the heads of a tile, (h, 1, 1). For plans that have sinks."""
    assert plan.sinks is not None
    return lib.load(plan.sinks[tile.heads, None, None])


def one_for_zero(total: Array, lib: ArrayLibrary) -> Array:
    """The sums, with 1 for 0: the exponentials of a row that sees no key are 0, and stay 0 when divided by 1."""
    return lib.xp.where(total == 0, lib.xp.ones_like(total), total)


def grouped_matmul(left: Array, right: Array, lib: ArrayLibrary, out: Array | None = None) -> Array:
    """(b, h, q, x) @ (b, g, x, y) -> (b, h, q, y), where head n of the left meets head n // (h // g) of the right.

    out: memory for the result, if the library writes in place
    """
    b, h, q, x = left.shape
    g, y = right.shape[1], right.shape[-1]
    if h == g:
        return lib.matmul(left, right, out)
    grouped = None if out is None else out.reshape((b, g, h // g, q, y))
    product = lib.matmul(lib.xp.reshape(left, (b, g, h // g, q, x)), right[:, :, None], grouped)
    return lib.xp.reshape(product, (b, h, q, y)) if out is None else out
