"""The scores of tiles, from the product of query and key to weights and outputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from attention_service.attention.plan import Plan
from attention_service.attention.result import overflow
from attention_service.attention.tile import Tile, part_of
from attention_service.attention.tiles import key_blocks, tiles
from attention_service.attention.visibility import additions, hidden_parts, hiding_bits, visible
from attention_service.backends.base import Check, no_check
from attention_service.backends.dense.buffers import ResultBuffers, SoftmaxRows, TileSums
from attention_service.backends.dense.library import Array, ArrayLibrary
from attention_service.backends.dense.numerics import NumericPath
from attention_service.backends.dense.operands import LoadedOperands
from attention_service.backends.dense.products import gather, gathered_matmul, grouped_matmul


class TileComputation:
    """Computes tiles of a plan, which may run in several threads. Each step overwrites the scores of the step before.

    scaled: the query times the scale, if the path has `scales_query`
    head_outputs: (b, h, q, e), filled tile by tile; buffers: filled with what the plan returns of the scores
    check: raises to end the computation; called for each block of keys
    rows: of a softmax that was computed before: only weights are computed, in blocks of keys; None for all
    """

    def __init__(
        self,
        plan: Plan,
        lib: ArrayLibrary,
        loaded: LoadedOperands,
        path: NumericPath,
        scaled: Array | None,
        head_outputs: Array,
        buffers: ResultBuffers,
        check: Check = no_check,
        rows: SoftmaxRows | None = None,
    ) -> None:
        self._plan = plan
        self._lib = lib
        self._path = path
        self._scales: Array = scales(plan, lib)
        self._query = loaded.query if scaled is None else scaled
        # NumPy computes the product of a matrix and its own transpose in another way.
        self._copies_query = lib.writes_in_place and scaled is None and np.may_share_memory(loaded.query, loaded.key)
        self._key = lib.xp.permute_dims(loaded.key, (0, 1, 3, 2))  # b g d k
        self._loaded = loaded
        self._head_outputs = head_outputs
        self._buffers = buffers
        self._check = check
        includes_weights = "weights_without_sinks" in plan.selection.include
        self._keeps_sinks_apart = includes_weights and plan.all_sinks is not None
        streams = lib.writes_in_place and path.divides_last and not path.subtracts_max and buffers.streams
        streams = streams and plan.gathered is None
        self._rows = rows
        self._tiling = replace(lib.tiling, streams=streams if rows is None else True)

    def cut(self, entries: slice) -> Iterator[Tile]:
        """The tiles of these batch entries, each for a call of `run`."""
        for tile in tiles(self._plan, self._tiling, entries):
            yield from (tile,) if self._rows is None else key_blocks(tile, self._tiling)

    def run(self, tile: Tile) -> TileSums:
        """Write the head outputs of a tile, and what the plan returns of its scores."""
        if self._rows is not None:
            return self._softmax_again(tile, self._rows)
        steps = {"softmax": self._softmax, "sum": self._normalise_by_sum, "sigmoid": self._sigmoid}
        selected = self._plan.gathered
        outputs, sums = steps[self._plan.normalization](tile if selected is None else selected.gathered(tile))
        self._head_outputs[tile.batch, tile.heads, tile.rows] = outputs
        return replace(sums, tile=tile)  # which does not hold the gathered keys

    def _softmax_again(self, tile: Tile, rows: SoftmaxRows) -> TileSums:
        """Compute the weights of a block of keys once more, for the buffers. rows: of the softmax over all keys"""
        xp, place, weights = self._lib.xp, (tile.batch, tile.heads, tile.rows), self._masked_scores(tile)
        subtracted, log_total = rows.subtracted[place], rows.log_total[place]
        self._buffers.add("logsumexp", tile, (subtracted + log_total)[..., 0])
        if self._path.subtracts_max:  # by itself, as the digits of the logarithm would be lost in a sum of both
            weights -= subtracted
        weights -= log_total
        xp.exp(weights, out=weights)
        self._buffers.add_weights(tile, weights)
        return TileSums(tile, 0)

    def _softmax(self, tile: Tile) -> tuple[Array, TileSums]:
        """The head outputs (b, h, r, e) and sums of a tile. Its keys come in blocks if the tiling streams."""
        plan, lib, xp, buffers = self._plan, self._lib, self._lib.xp, self._buffers
        outputs = total = None
        for block in key_blocks(tile, self._tiling):
            weights = self._masked_scores(block)  # which become the weights in place
            subtracted, unseen = self._exponentials(weights, tile)
            total = _added(total, lib.row_sums(weights))  # b h r 1
            if self._path.divides_last:
                outputs = _added(outputs, self._times_values(weights, block))
        rows: Array = total == 0 if unseen is None else unseen
        masked = count_rows(plan, lib, rows[..., 0], tile) if plan.terms else 0
        if self._keeps_sinks_apart:
            total = self._total_with_sinks(tile, weights, total, subtracted)
        else:
            if plan.all_sinks is not None:
                total = total + xp.exp(self._sinks(tile) - subtracted)
            buffers.add_logsumexp(tile, subtracted, xp.log(total))
            total = xp.where(total == 0, xp.ones_like(total), total)  # rows that see no key stay 0
        if buffers.needs_weights or outputs is None:
            weights /= total
        if outputs is None:
            outputs = self._times_values(weights, tile)
        else:
            outputs /= total
        if buffers.needs_weights and plan.all_sinks is None:
            buffers.add_weights_without_sinks(tile, weights)
        received = buffers.add_weights(tile, weights) if buffers.needs_weights else None
        return outputs, TileSums(tile, masked, received=received)

    def _total_with_sinks(self, tile: Tile, exponentials: Array, total: Array, subtracted: Array | float) -> Array:
        """What the exponentials (b, h, r, k) of a tile are divided by to give weights, (b, h, r, 1), sinks included.

        The weights without sinks go to the buffers, and the logsumexp. Sinks may be far larger than scores: they are
        no part of what was subtracted, so that these weights are exact. total: (b, h, r, 1), of the exponentials
        """
        xp, sinks = self._lib.xp, self._sinks(tile)
        alone = xp.where(total == 0, xp.ones_like(total), total)
        self._buffers.add_weights_without_sinks(tile, exponentials / alone)
        of_keys = subtracted + xp.log(total)
        self._buffers.add("logsumexp", tile, xp.logaddexp(of_keys, xp.broadcast_to(sinks, of_keys.shape))[..., 0])
        return alone * (1 + xp.exp(sinks - of_keys))  # infinite for rows that see no key, whose exponentials are 0

    def _normalise_by_sum(self, tile: Tile) -> tuple[Array, TileSums]:
        """The head outputs (b, h, r, e) and sums of a tile, for scores divided by their sums; 0 where a sum is 0."""
        xp, hide, buffers = self._lib.xp, self._lib.hide, self._buffers
        weights = self._masked_scores(tile)  # which become the weights in place
        sees = xp.isfinite(weights)
        hide(weights, sees, 0.0)
        sees = xp.any(sees, axis=-1, keepdims=True)
        total = xp.sum(weights, axis=-1, keepdims=True)
        if not xp.all(xp.isfinite(total)):
            raise overflow(self._plan, "sums of scores")
        zero = total == 0
        hide(weights, xp.broadcast_to(~zero, weights.shape), 0.0)
        weights /= xp.where(zero, xp.ones_like(total), total)
        received = buffers.add_weights(tile, weights) if buffers.needs_weights else None
        masked = count_rows(self._plan, self._lib, ~sees[..., 0], tile)
        return self._times_values(weights, tile), TileSums(tile, masked, bool(xp.any(zero & sees)), received)

    def _sigmoid(self, tile: Tile) -> tuple[Array, TileSums]:
        """The head outputs (b, h, r, e) and sums of a tile, for each score by itself: 1 / (1 + exp(-score))."""
        xp, buffers = self._lib.xp, self._buffers
        weights = self._masked_scores(tile)  # which become the weights in place
        masked: Array = 0
        if self._plan.terms:
            unseen = xp.max(weights, axis=-1) == -np.inf
            masked = count_rows(self._plan, self._lib, unseen, tile)
        weights *= -1  # np.negative with out is wrong for some views (NumPy 2.4.6)
        xp.exp(weights, out=weights)  # infinite for hidden keys
        weights += 1
        xp.reciprocal(weights, out=weights)
        received = buffers.add_weights(tile, weights) if buffers.needs_weights else None
        return self._times_values(weights, tile), TileSums(tile, masked, received=received)

    def _masked_scores(self, tile: Tile) -> Array:
        """The masked scores of a tile, (b, h, r, k). The stages before them go to the buffers."""
        plan, lib, xp, buffers = self._plan, self._lib, self._lib.xp, self._buffers
        self._check()
        scores = self._products_with_terms(tile)
        buffers.add("scores", tile, scores)
        if not self._path.scales_query:
            scores *= plan.scale if plan.head_scales is None else self._scales[tile.heads]
        buffers.add("scaled_scores", tile, scores)
        if plan.softcap is not None:
            scores /= plan.softcap
            xp.tanh(scores, out=scores)
            scores *= plan.softcap
        buffers.add("capped_scores", tile, scores)
        for added in additions(plan.terms, tile, lib.load):
            scores += added
        if self._path.checks_overflow:
            self._check_finite(scores, tile)
        for columns, seen in hidden_parts(plan.terms, tile, lib.load):
            lib.hide(scores[..., columns], seen, -np.inf)
        buffers.add("masked_scores", tile, scores)
        if "hidden_by" in plan.selection.include:
            buffers.add("hidden_by", tile, xp.broadcast_to(hiding_bits(plan.terms, tile, lib.load), scores.shape))
        return scores

    def _products(self, tile: Tile) -> Array:
        """The products of the queries and keys of a tile, (b, h, r, k)."""
        query = self._query[tile.batch, tile.heads, tile.rows]
        if self._copies_query:
            query = self._lib.xp.asarray(query, copy=True)
        if tile.gathered is not None:
            key = gather(self._loaded.key, tile, self._lib)  # b s r n d
            return gathered_matmul(query, self._lib.xp.permute_dims(key, (0, 1, 2, 4, 3)), self._lib)
        key = self._key[tile.batch, tile.kv_heads, :, tile.columns]
        out = self._buffers.scores_of(tile)
        if out is None:
            out = self._lib.scratch((*query.shape[:3], key.shape[-1]))
        return grouped_matmul(query, key, self._lib, out)

    def _products_with_terms(self, tile: Tile) -> Array:
        """The products of a tile (b, h, r, k), and what terms add to them."""
        scores = self._products(tile)
        for term in self._plan.terms:
            if term.reads_query:
                scores += term.products(self._query[tile.batch, tile.heads, tile.rows], tile, self._lib)
        return scores

    def _check_finite(self, scores: Array, tile: Tile) -> None:
        """Check that visible scores and values are finite. Errors: Overflow."""
        xp = self._lib.xp
        bad = ~xp.isfinite(scores)
        if self._loaded.bad_values is not None:
            values = self._bad_values(self._loaded.bad_values, tile)
            bad = bad | xp.repeat(values, scores.shape[1] // values.shape[1], axis=1)
        if xp.any(bad):
            seen = visible(self._plan.terms, tile, self._lib.load)
            if seen is None or xp.any(bad & seen):
                raise overflow(self._plan, "scores")

    def _bad_values(self, bad: Array, tile: Tile) -> Array:
        """True where a value of a tile is not finite, (b, g or h, 1 or r, k). bad: (b, g, 1, k), of the plan"""
        if tile.gathered is None:
            return bad[tile.batch, tile.kv_heads, :, tile.columns]
        numbers = self._lib.xp.astype(bad[:, :, 0, :, None], self._loaded.value.dtype)
        return gather(numbers, tile, self._lib)[..., 0] > 0

    def _exponentials(self, scores: Array, tile: Tile) -> tuple[Array | float, Array | None]:
        """Turn scores into their exponentials, in place.

        Returns what was subtracted before, and True for rows that see no key, (b, h, r, 1) each. If nothing is
        subtracted no exponential can underflow: then None, as rows that see no key are those whose sum is 0.
        """
        xp = self._lib.xp
        if not self._path.subtracts_max:
            xp.exp(scores, out=scores)
            return 0.0, None
        largest = xp.max(scores, axis=-1, keepdims=True)
        unseen = largest == -np.inf
        if self._plan.all_sinks is not None and not self._keeps_sinks_apart:
            largest = xp.maximum(largest, self._sinks(tile))
        else:
            largest = xp.where(unseen, xp.zeros_like(largest), largest)
        scores -= largest
        xp.exp(scores, out=scores)
        return largest, unseen

    def _times_values(self, weights: Array, tile: Tile) -> Array:
        """Weights (b, h, r, k) times the values of a tile: (b, h, r, e)."""
        if tile.gathered is not None:
            return gathered_matmul(weights, gather(self._loaded.value, tile, self._lib), self._lib)
        return grouped_matmul(weights, self._loaded.value[tile.batch, tile.kv_heads, tile.columns], self._lib)

    def _sinks(self, tile: Tile) -> Array:
        """The sinks of the rows of a tile, (1, h, 1, 1) or (b, h, r, 1). For plans that have sinks."""
        assert self._plan.all_sinks is not None
        return self._lib.load(part_of(self._plan.all_sinks, tile))


def scales(plan: Plan, lib: ArrayLibrary) -> Array | float:
    """What scores are multiplied by: one number, or one for each head, (h, 1, 1)."""
    return plan.scale if plan.head_scales is None else lib.load(plan.head_scales[:, None, None])


def count_rows(plan: Plan, lib: ArrayLibrary, unseen: Array, tile: Tile) -> Array:
    """How many of these rows (b, h, r), each axis full or 1, are not padding.

    A number of the library, which may not be computed yet.
    """
    if plan.real_queries is not None:
        unseen = unseen & lib.load(part_of(plan.real_queries, tile)[..., 0])
    shape = tuple(part.stop - part.start for part in (tile.batch, tile.heads, tile.rows))
    return lib.xp.sum(lib.xp.broadcast_to(unseen, shape))


def _added(total: Array | None, part: Array) -> Array:
    """total + part, in place; `part` if there is no total yet."""
    if total is None:
        return part
    total += part
    return total
