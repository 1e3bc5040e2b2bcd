"""The term that hides all keys but those that a request lists for each query."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any, ClassVar, Final, Self

import numpy as np

from attention_service.attention.array_functions import Array
from attention_service.attention.arrays import integers, within
from attention_service.attention.score_term import Cause, Frame, Load, ScoreTerm
from attention_service.attention.shapes import Sizes, align
from attention_service.attention.spec import AttentionSpec
from attention_service.attention.tile import Tile
from attention_service.errors import InvalidArray

# Bytes for each index of `selected_keys` beside the number itself, to find those that count.
BOOLEANS: Final = 3


@dataclass(frozen=True, slots=True)
class SelectedKeys(ScoreTerm):
    """The only keys that a query may see: indices (b, h, q, n), b, h and q full or 1; -1 is no key."""

    indices: np.ndarray
    field: ClassVar[str] = "selected_keys"
    cause: ClassVar[Cause | None] = Cause(
        512,
        "#6f8f1f",
        "selected keys (the key is not one of those for this query)",
        "that is not selected for the query",
    )

    @classmethod
    def of(cls, spec: AttentionSpec, frame: Frame) -> Self | None:
        """The `selected_keys` of a request."""
        given, sizes = spec.selected_keys, frame.sizes
        if given is None:
            return None
        if not given.ndim or 0 in given.shape:
            raise InvalidArray.of("/selected_keys", "at least one index on every axis", given, "-1 selects no key")
        indices = integers(given, "/selected_keys", {given.shape: ""})
        within(indices, -1, sizes.key_length - 1, "/selected_keys")
        axes, lengths = frame.axes.replace("kq", "qk"), sizes._replace(key_length=given.shape[-1])
        return cls(align(indices, axes, lengths, "selected_keys", last="n"))

    @classmethod
    def example(cls, random: np.random.Generator, sizes: Sizes) -> Any:
        k = sizes.key_length
        return random.integers(-1, k, (sizes.batch_size, sizes.num_heads, sizes.query_length, k // 3))

    def gathered(self, tile: Tile) -> Tile:
        """The tile with the keys that are selected for its queries, in ascending order, as its columns."""
        return replace(tile, gathered=np.sort(self._of(tile), axis=-1))

    def _of(self, tile: Tile) -> np.ndarray:
        """The indices of the queries of a tile."""
        cuts = zip(self.indices.shape[:3], (tile.batch, tile.heads, tile.rows), strict=True)
        return self.indices[tuple(slice(None) if size == 1 else cut for size, cut in cuts)]

    def visible(self, tile: Tile, load: Load) -> Array | None:
        if tile.gathered is not None:
            first = tile.gathered >= 0
            first[..., 1:] &= tile.gathered[..., 1:] != tile.gathered[..., :-1]
            return load(first)
        indices, keys = self._of(tile), tile.columns.stop - tile.columns.start
        # Indices of no key, and of keys of other tiles, fall into a column that is cut off.
        places = indices - tile.columns.start
        places[(places < 0) | (places >= keys)] = keys
        seen = np.zeros((*indices.shape[:3], keys + 1), dtype=bool)
        np.put_along_axis(seen, places, True, axis=-1)
        return load(seen[..., :keys])

    def visible_bytes(self, tile: tuple[int, int, int, int]) -> tuple[int, int]:
        rows = prod(map(min, self.indices.shape[:3], tile[:3]))
        return rows * (tile[3] + 1), rows * self.indices.shape[3] * (self.indices.itemsize + BOOLEANS)


# In the order in which they are made.
TERMS: Final = (SelectedKeys,)
