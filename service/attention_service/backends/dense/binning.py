"""Scores or weights reduced to bins tile by tile, for pictures of matrices that are too large to keep."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from attention_service.attention.plan import Plan
from attention_service.attention.spec import Output
from attention_service.attention.tile import Tile
from attention_service.attention.tiles import Tiling, tiles
from attention_service.attention.visibility import hiding_bits
from attention_service.backends.dense.buffers import WEIGHTS, ResultBuffers
from attention_service.backends.dense.library import Array

Reduction = Literal["max", "mean"]

HIDDEN_BY: Final = "hidden_by"
LOGSUMEXP: Final = "logsumexp"


@dataclass(frozen=True, slots=True)
class Bins:
    """What is reduced, and to which bins.

    stage:        attention_weights, or an output of the step `scores`
    batch_entry:  the batch entry that is kept
    heads:        the heads that are kept, in order
    rows, columns: (q,) and (k,), the bin of each query and key, ascending from 0 without gaps; -1 leaves it out
    average_heads: True to reduce the mean of these heads, in which a cell is hidden only if it is in all
    """

    stage: Output
    batch_entry: int
    heads: np.ndarray
    rows: np.ndarray
    columns: np.ndarray
    reduction: Reduction
    average_heads: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        """Heads, bins of queries, bins of keys."""
        return 1 if self.average_heads else len(self.heads), int(self.rows.max()) + 1, int(self.columns.max()) + 1


@dataclass(frozen=True, slots=True)
class BinnedScores:
    """Scores or weights in bins, (h, rows, columns) each.

    values:    the largest or mean number of the visible cells of each bin; NaN where there is none
    hidden_by: 0 where a cell of the bin is visible, else all that hides its cells, as bits of the output `hidden_by`
    logsumexp, sums: (h, q), of the scores and of the weights of each query, of all kept heads
    """

    values: np.ndarray
    hidden_by: np.ndarray
    logsumexp: np.ndarray
    sums: np.ndarray


class BinnedBuffers(ResultBuffers):
    """Takes the place of ResultBuffers: keeps bins, not matrices. For NumPy."""

    def __init__(self, bins: Bins) -> None:
        # The constructor of the base class would make the matrices.
        self.arrays = {}
        self.fully_masked_rows = 0
        self.zero_sum = False
        self.streams = False
        self.needs_weights = bins.stage == WEIGHTS
        self._bins = bins
        self._lock = threading.Lock()
        # Bits of the tiles whose weights are still to come, by the tile.
        self._bits: dict[tuple[int, int], np.ndarray] = {}
        self._maximum = np.full(bins.shape, -np.inf)
        self._total = np.zeros(bins.shape)
        self._visible = np.zeros(bins.shape, np.int64)
        self._causes = np.zeros(bins.shape, np.int32)
        self._logsumexp = np.full((len(bins.heads), len(bins.rows)), -np.inf)
        self._sums = np.zeros_like(self._logsumexp)
        self._keeps_all = bool(bins.rows.min() >= 0)

    def result(self) -> BinnedScores:
        """The bins, after all tiles."""
        with np.errstate(invalid="ignore"):
            found = self._maximum if self._bins.reduction == "max" else self._total / self._visible
        seen = self._visible > 0
        return BinnedScores(np.where(seen, found, np.nan), np.where(seen, 0, self._causes), self._logsumexp, self._sums)

    def scores_of(self, tile: Tile) -> Array | None:
        """None: no memory is shared with what is returned."""
        return None

    def add(self, name: Output, tile: Tile, block: Array) -> None:
        """Reduce a block (b, h, r, k), or keep the logsumexp (b, h, r)."""
        heads, places = self._kept(tile)
        if not len(heads) or name not in (self._bins.stage, HIDDEN_BY, LOGSUMEXP):
            return
        chosen = np.asarray(block)[self._bins.batch_entry - tile.batch.start, places]
        if name == LOGSUMEXP:
            self._logsumexp[heads, tile.rows] = chosen
        elif name == HIDDEN_BY:
            self._add_causes(tile, heads, self._hidden(np.broadcast_to(chosen, (*chosen.shape[:2], self._width(tile)))))
        else:
            # The stages before the masks show all cells; in masked scores hidden cells are minus infinity.
            self._reduce(tile, heads, chosen, np.isfinite(chosen))

    def add_weights(self, tile: Tile, weights: Array) -> Array | None:
        """Reduce the weights of a tile, without those of hidden cells."""
        heads, places = self._kept(tile)
        if len(heads):
            chosen = weights[self._bins.batch_entry - tile.batch.start, places]
            self._sums[heads, tile.rows] = chosen.sum(axis=-1)
            bits = self._bits.pop(_key(tile), None)
            if self._bins.average_heads:
                chosen = chosen.mean(axis=0, keepdims=True)
            self._reduce(tile, heads, chosen, np.ones(chosen.shape, bool) if bits is None else bits == 0)
        return None

    def _kept(self, tile: Tile) -> tuple[np.ndarray, np.ndarray]:
        """The kept heads of a tile: their places among all that are kept, and in the tile."""
        if not tile.batch.start <= self._bins.batch_entry < tile.batch.stop:
            return np.arange(0), np.arange(0)
        heads = self._bins.heads
        kept = np.flatnonzero((tile.heads.start <= heads) & (heads < tile.heads.stop))
        if not _real(self._bins.rows[tile.rows]).size:
            kept = kept[:0]
        return kept, heads[kept] - tile.heads.start

    def _hidden(self, bits: np.ndarray) -> np.ndarray:
        """The bits of heads (h, r, k); with `average_heads` of their mean, which is hidden where all heads are."""
        if not self._bins.average_heads:
            return bits
        found: np.ndarray = np.where((bits != 0).all(axis=0), np.bitwise_or.reduce(bits, axis=0), 0)[None]
        return found

    def _add_causes(self, tile: Tile, heads: np.ndarray, bits: np.ndarray) -> None:
        if self.needs_weights:
            self._bits[_key(tile)] = bits
        causes = self._reduced(np.bitwise_or, tile, bits)
        with self._lock:
            self._causes[self._at(tile, heads)] |= causes

    def _reduce(self, tile: Tile, heads: np.ndarray, block: np.ndarray, seen: np.ndarray) -> None:
        if self._bins.reduction == "max":
            found = self._reduced(np.maximum, tile, np.where(seen, block, -np.inf))
        else:
            found = self._reduced(np.add, tile, np.where(seen, block, 0))
        count = self._reduced(np.add, tile, seen.astype(np.int32))
        places = self._at(tile, heads)
        with self._lock:
            self._visible[places] += count
            if self._bins.reduction == "max":
                self._maximum[places] = np.maximum(self._maximum[places], found)
            else:
                self._total[places] += found

    def _reduced(self, function: np.ufunc, tile: Tile, block: np.ndarray) -> np.ndarray:
        """A block (h, r, k) reduced to the bins that it meets."""
        columns = _starts(self._bins.columns[tile.columns])
        rows = _starts(_real(self._bins.rows[tile.rows]))
        if not self._keeps_all:
            block = block[:, self._bins.rows[tile.rows] >= 0]
        if len(rows) < block.shape[-2]:  # rows first, and not by reduceat, which is ten times slower for them
            ends = [*rows[1:], block.shape[-2]]
            parts = [function.reduce(block[:, start:end], axis=1) for start, end in zip(rows, ends, strict=True)]
            block = np.stack(parts, axis=1)
        found: np.ndarray = block if len(columns) == block.shape[-1] else function.reduceat(block, columns, axis=-1)
        return found

    def _at(self, tile: Tile, heads: np.ndarray) -> tuple[np.ndarray, ...]:
        """The indices of the bins that a tile meets."""
        rows, columns = np.unique(_real(self._bins.rows[tile.rows])), np.unique(self._bins.columns[tile.columns])
        return np.ix_(np.zeros(1, np.int64) if self._bins.average_heads else heads, rows, columns)

    def _width(self, tile: Tile) -> int:
        width: int = tile.columns.stop - tile.columns.start
        return width


def bin_weights(plan: Plan, tiling: Tiling, weights: np.ndarray, bins: Bins) -> BinnedScores:
    """The bins of weights that were computed before: only what hides keys is computed anew, and no logsumexp.

    plan: includes hidden_by; weights: (b, h, q, k), of all heads and queries
    """
    buffers = BinnedBuffers(bins)
    for tile in tiles(plan, tiling, slice(bins.batch_entry, bins.batch_entry + 1)):
        block = weights[tile.batch, tile.heads, tile.rows, tile.columns].astype(plan.compute_dtype, copy=False)
        if plan.terms:
            buffers.add(HIDDEN_BY, tile, np.broadcast_to(hiding_bits(plan.terms, tile, np.asarray), block.shape))
        buffers.add_weights(tile, block)
    return buffers.result()


def _key(tile: Tile) -> tuple[int, int]:
    return tile.heads.start, tile.rows.start


def _real(bins: np.ndarray) -> np.ndarray:
    return bins[bins >= 0]


def _starts(bins: np.ndarray) -> np.ndarray:
    """Where each bin begins among consecutive queries or keys."""
    return np.flatnonzero(np.diff(bins, prepend=-1))
