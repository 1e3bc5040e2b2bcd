"""Buffers for what a plan returns of its scores and weights, filled tile by tile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from service.attention.outputs import OUTPUTS, TOP_INDICES, output_dtype, output_shape, outputs_of
from service.attention.plan import Plan
from service.attention.spec import Output
from service.attention.tiles import Tile
from service.backends.dense.library import Array, ArrayLibrary

WEIGHTS: Final = "attention_weights"
# Features of a plan whose weights are returned just as they are computed, so that they can be computed in their buffer.
_UNCHANGED_SELECTION: Final = frozenset(f"selection.include.{name}" for name in OUTPUTS)


@dataclass(frozen=True, slots=True)
class TileSums:
    """What a tile adds to numbers that several tiles have in common.

    fully_masked_rows: a number of the library, which may not be computed yet
    zero_sum: True if the visible scores of a row sum to 0, with normalization sum
    received: (b, h, k)
    """

    tile: Tile
    fully_masked_rows: Array
    zero_sum: bool = False
    received: Array | None = None


class ResultBuffers:
    """What is returned of the scores and weights, cut to the heads and queries that were asked for.

    Each tile writes to its own part. What tiles have in common is added up in their order, by one thread.

    arrays: by name; streams: True if no more than a number a row is returned; needs_weights: True if weights are
    """

    def __init__(self, plan: Plan, lib: ArrayLibrary) -> None:
        include, chosen = plan.selection.include, plan.selection
        self.arrays: dict[str, Array] = {}
        self.fully_masked_rows: Array = 0
        self.zero_sum = False
        self.streams = not include & outputs_of("scores", "weights")
        self.needs_weights = bool(include & outputs_of("weights"))
        self._chosen = chosen
        self._lib = lib
        sizes = plan.sizes
        self._heads = np.arange(sizes.num_heads) if chosen.heads is None else chosen.heads
        self._queries = np.arange(sizes.query_length) if chosen.queries is None else chosen.queries
        names: list[str] = [name for name, row in OUTPUTS.items() if name in include and row.is_selected]
        for name in names if chosen.top_k is None else [*names, TOP_INDICES]:
            # What tiles leave out stays 0, and `received` is a sum.
            make = lib.zeros if plan.skips_hidden_keys or name in ("received", TOP_INDICES) else lib.empty
            self.arrays[name] = make(output_shape(name, plan), output_dtype(name, plan))
        selected = {name for name in plan.features if name.startswith("selection.")}
        self._shares_memory = (
            lib.writes_in_place
            and WEIGHTS in include
            and plan.dtype == plan.compute_dtype
            and selected <= _UNCHANGED_SELECTION
        )

    def scores_of(self, tile: Tile) -> Array | None:
        """The memory for the scores of a tile if its weights are returned from there; None if they are copied."""
        return self.arrays[WEIGHTS][tile.batch, tile.heads, tile.rows, tile.columns] if self._shares_memory else None

    def add(self, name: Output, tile: Tile, block: Array) -> None:
        """Keep a block (b, h, r, k) or (b, h, r) of an output, if the plan includes it."""
        if name in self.arrays:
            places, block = self._select_heads(tile, block)
            self._write(name, tile, places, block)

    def add_weights(self, tile: Tile, weights: Array) -> Array | None:
        """Keep the weights of a tile, or what the plan includes of them. Returns what the keys receive, (b, h, k)."""
        xp = self._lib.xp
        if "entropy" in self.arrays:
            self.add("entropy", tile, -xp.sum(_x_log_x(weights, xp), axis=-1))
        if not self.arrays.keys() & {WEIGHTS, "received"}:
            return None
        places, kept = self._select_heads(tile, weights)
        if self._shares_memory:
            return xp.sum(kept, axis=2) if "received" in self.arrays else None
        if self._chosen.average_heads:
            places, kept = np.zeros(1, np.int64), xp.mean(kept, axis=1, keepdims=True)
        received = xp.sum(kept, axis=2) if "received" in self.arrays else None
        if WEIGHTS in self.arrays:
            if self._chosen.top_k is not None:
                order = self._lib.top_indices(kept, self._chosen.top_k)
                self._write(TOP_INDICES, tile, places, order)
                kept = xp.take_along_axis(kept, order, axis=-1)
            self._write(WEIGHTS, tile, places, kept)
        return received

    def add_sums(self, sums: TileSums) -> None:
        """Add up what tiles have in common."""
        self.fully_masked_rows += sums.fully_masked_rows
        self.zero_sum |= sums.zero_sum
        if sums.received is not None:
            heads: slice | Array = sums.tile.heads
            if self._chosen.average_heads:
                heads = slice(1)
            elif self._chosen.heads is not None:
                heads = self._lib.load(_indices_within(self._heads, sums.tile.heads))
            self.arrays["received"][sums.tile.batch, heads, sums.tile.columns] += sums.received

    def _select_heads(self, tile: Tile, block: Array) -> tuple[np.ndarray, Array]:
        """The heads of a block that were asked for: their places in the buffer, and their part of the block."""
        places = _indices_within(self._heads, tile.heads)
        if self._chosen.heads is None:
            return places, block
        return places, block[:, self._lib.load(self._heads[places] - tile.heads.start)]

    def _write(self, name: str, tile: Tile, places: np.ndarray, block: Array) -> None:
        target = self.arrays[name]
        if block.dtype != target.dtype:
            block = self._lib.xp.astype(block, target.dtype)
        has_all_keys = self._chosen.top_k is None or name not in (WEIGHTS, TOP_INDICES)
        columns = (tile.columns,) if has_all_keys and block.ndim == 4 else ()
        if self._chosen.queries is None and len(places):
            is_whole = self._chosen.heads is None
            heads = slice(int(places[0]), int(places[-1]) + 1) if is_whole else self._lib.load(places)
            target[(tile.batch, heads, tile.rows, *columns)] = block
            return
        rows = _indices_within(self._queries, tile.rows)
        if len(rows) and len(places):
            block = block[:, :, self._lib.load(self._queries[rows] - tile.rows.start)]
            target[(tile.batch, self._lib.load(places[:, None]), self._lib.load(rows[None, :]), *columns)] = block


def _indices_within(chosen: np.ndarray, part: slice) -> np.ndarray:
    """Where the chosen indices lie in a part."""
    return np.nonzero((part.start <= chosen) & (chosen < part.stop))[0]


def _x_log_x(weights: Array, xp: Any) -> Array:
    """w ln w, and 0 for 0."""
    return weights * xp.log(xp.where(weights > 0, weights, xp.ones_like(weights)))
