"""Buffers for what a plan returns of its scores and weights, filled tile by tile."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from attention_service.attention.outputs import OUTPUTS, TOP_INDICES, outputs_of
from attention_service.attention.plan import Plan
from attention_service.attention.spec import Output
from attention_service.attention.tile import Tile
from attention_service.backends.dense.library import Array, ArrayLibrary

WEIGHTS: Final = "attention_weights"
WITHOUT_SINKS: Final = "weights_without_sinks"
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
    """Buffers for the scores and weights that a plan returns, cut to the heads and queries that it selects.

    Each tile writes to its own part. What tiles have in common is added up in their order, by one thread.

    arrays: by name
    streams: True if nothing is returned of scores and weights but one number a row
    needs_weights: True if an output is made of the weights
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
        names: list[str] = [name for name, row in OUTPUTS.items() if name in include and row.is_selected]
        for name in names if chosen.top_k is None else [*names, TOP_INDICES]:
            # What tiles leave out stays 0, and `received` is a sum.
            make = lib.zeros if plan.skips_hidden_keys or name in ("received", TOP_INDICES) else lib.empty
            self.arrays[name] = make(plan.output_shape(name), plan.output_dtype(name))
        selected = {name for name in plan.options if name.startswith("selection.")}
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
        """Write a block (b, h, r, k) or (b, h, r) of an output to its buffer, if the plan includes the output."""
        if name in self.arrays:
            places, heads = self._heads_within(tile)
            self._write(name, tile, places, *self._selected_rows(tile, block[:, heads]))

    def add_logsumexp(self, tile: Tile, subtracted: Array | float, log_total: Array) -> None:
        """Write the logsumexp of the rows of a tile, if it is included: the sum of both parts, (b, h, r, 1) each."""
        self.add("logsumexp", tile, (subtracted + log_total)[..., 0])

    def add_weights(self, tile: Tile, weights: Array) -> Array | None:
        """Write what the plan includes of the weights of a tile. Returns `received` of the tile, (b, h, k)."""
        xp, chosen = self._lib.xp, self._chosen
        if "entropy" in self.arrays:
            self.add("entropy", tile, -xp.sum(_x_log_x(weights, xp), axis=-1))
        if not self.arrays.keys() & {WEIGHTS, "received"}:
            return None
        places, kept = self._kept_heads(tile, weights)
        received = xp.sum(kept, axis=2) if "received" in self.arrays else None
        if WEIGHTS in self.arrays and not self._shares_memory:
            rows, kept = self._selected_rows(tile, kept)  # before they are sorted
            if chosen.top_k is not None:
                order = self._lib.top_indices(kept, chosen.top_k)
                self._write(TOP_INDICES, tile, places, rows, order)
                kept = xp.take_along_axis(kept, order, axis=-1)
            self._write(WEIGHTS, tile, places, rows, kept)
        return received

    def add_weights_without_sinks(self, tile: Tile, weights: Array) -> None:
        """Write the weights of a tile (b, h, r, k) that the softmax over the keys alone gives, if they are included."""
        if WITHOUT_SINKS in self.arrays:
            places, kept = self._kept_heads(tile, weights)
            self._write(WITHOUT_SINKS, tile, places, *self._selected_rows(tile, kept))

    def _kept_heads(self, tile: Tile, weights: Array) -> tuple[slice | Array, Array]:
        """The places of the selected heads of a tile in the buffers, and their weights, averaged if so selected."""
        places, heads = self._heads_within(tile)
        kept = weights[:, heads]
        if self._chosen.average_heads:
            return slice(1), self._lib.xp.mean(kept, axis=1, keepdims=True)
        return places, kept

    def turn(self, number: int, tile: Tile) -> AbstractContextManager[None]:
        """The context in which a tile is computed. number: of the tile, in the order of all"""
        return nullcontext()

    def add_sums(self, sums: TileSums) -> None:
        """Add the sums of a tile to those of the plan."""
        self.fully_masked_rows += sums.fully_masked_rows
        self.zero_sum |= sums.zero_sum
        if sums.received is not None:
            places = slice(1) if self._chosen.average_heads else self._heads_within(sums.tile)[0]
            self.arrays["received"][sums.tile.batch, places, sums.tile.columns] += sums.received

    def _heads_within(self, tile: Tile) -> tuple[slice | Array, slice | Array]:
        """The places of the selected heads of a tile, in the buffers and in the tile."""
        if self._chosen.heads is None:
            return tile.heads, slice(None)
        return self._places(self._chosen.heads, tile.heads)

    def _places(self, chosen: np.ndarray, part: slice) -> tuple[Array, Array]:
        """The places of the chosen indices that lie in `part`: among all chosen indices, and in `part`."""
        places = np.nonzero((part.start <= chosen) & (chosen < part.stop))[0]
        return self._lib.load(places), self._lib.load(chosen[places] - part.start)

    def _selected_rows(self, tile: Tile, block: Array) -> tuple[slice | Array, Array]:
        """The places of the selected queries of a tile in the buffers, and their rows of a block (b, h, r, ...)."""
        if self._chosen.queries is None:
            return tile.rows, block
        places, within = self._places(self._chosen.queries, tile.rows)
        return places, block[:, :, within]

    def _write(self, name: str, tile: Tile, heads: slice | Array, rows: slice | Array, block: Array) -> None:
        """Write a block of a tile, already cut to the selected heads and queries, to their places in a buffer."""
        target = self.arrays[name]
        if block.dtype != target.dtype:
            block = self._lib.xp.astype(block, target.dtype)
        has_all_keys = self._chosen.top_k is None or name not in (WEIGHTS, TOP_INDICES)
        columns = (tile.columns,) if has_all_keys and block.ndim == 4 else ()
        if not isinstance(heads, slice) and not isinstance(rows, slice):
            heads = heads[:, None]
        self.put(name, (tile.batch, heads, rows, *columns), block)

    def put(self, name: str, place: tuple[Any, ...], block: Array) -> None:
        """Write numbers to their place in a buffer."""
        self.arrays[name][place] = block


class SoftmaxRows(NamedTuple):
    """The parts of the logsumexp of all rows, (b, h, q, 1) each, whose sum it is; 0 for rows that see no key."""

    subtracted: Array
    log_total: Array


class RowBuffers(ResultBuffers):
    """Buffers that keep the parts of the logsumexp, for a second pass over the scores of a softmax."""

    def __init__(self, plan: Plan, lib: ArrayLibrary) -> None:
        super().__init__(plan, lib)
        shape = plan.sizes.batch_size, plan.sizes.num_heads, plan.sizes.query_length, 1
        self.softmax = SoftmaxRows(*(lib.empty(shape, plan.compute_dtype) for _ in range(2)))

    def add_logsumexp(self, tile: Tile, subtracted: Array | float, log_total: Array) -> None:
        """Keep both parts, and write the logsumexp as `ResultBuffers` does."""
        super().add_logsumexp(tile, subtracted, log_total)
        xp, place = self._lib.xp, (tile.batch, tile.heads, tile.rows)
        self.softmax.subtracted[place] = subtracted
        self.softmax.log_total[place] = xp.where(log_total == -np.inf, xp.zeros_like(log_total), log_total)


def _x_log_x(weights: Array, xp: Any) -> Array:
    """w ln w, and 0 for 0."""
    return weights * xp.log(xp.where(weights > 0, weights, xp.ones_like(weights)))
