"""A tile: the part of the scores that is computed at once."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, slots=True)
class Tile:
    """A part of the scores: batch entries, heads, queries (rows), and the keys that these queries may see (columns).

    gathered: (b, h, r, n), each axis but the last full or 1: a list of keys for each query, which are the columns
              then; None if the columns are consecutive keys
    """

    batch: slice
    kv_heads: slice
    heads: slice
    rows: slice
    columns: slice
    gathered: np.ndarray | None = field(default=None, compare=False)

    @property
    def keys(self) -> np.ndarray:
        """The index of the key of each column, which broadcasts to the scores."""
        return np.arange(self.columns.start, self.columns.stop) if self.gathered is None else self.gathered


def part_of(array: np.ndarray, tile: Tile) -> np.ndarray:
    """The part of an array (b, h, q, k), each axis full or of length 1, that belongs to a tile.

    It is a view, but a copy if the keys of the tile are gathered and the array has all keys.
    """
    is_gathered = tile.gathered is not None and array.shape[3] > 1
    cuts = (tile.batch, tile.heads, tile.rows, slice(None) if is_gathered else tile.columns)
    part = array[tuple(slice(None) if size == 1 else cut for size, cut in zip(array.shape, cuts, strict=True))]
    return np.take_along_axis(part, tile.keys, axis=3) if is_gathered else part
