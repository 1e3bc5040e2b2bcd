"""Terms that hide keys by their distance from the query."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Final, Self

import numpy as np

from attention_service.attention.array_functions import Array
from attention_service.attention.arrays import MAX_INTEGER, bounded_sum
from attention_service.attention.score_term import Cause, Frame, Load, ScoreTerm
from attention_service.attention.shapes import Sizes
from attention_service.attention.spec import AttentionSpec
from attention_service.attention.tile import Tile, part_of
from attention_service.errors import InvalidValue


@dataclass(frozen=True, slots=True)
class Band(ScoreTerm):
    """Query i sees keys from i + low to i + high, both inclusive, (b or 1,) each; None is unbounded."""

    low: np.ndarray | None = None
    high: np.ndarray | None = None
    narrows: ClassVar[bool] = True
    reads_offset: ClassVar[bool] = True

    def visible(self, tile: Tile, load: Load) -> Array | None:
        if tile.gathered is None and self.visible_columns(tile.rows, tile.columns) == tile.columns:
            return None
        edges = [edge for edge in (self.low, self.high) if edge is not None]
        if tile.gathered is None and all(len(edge) == 1 for edge in edges):
            return load(self._of_distances(tile.rows, tile.columns))
        i = np.arange(tile.rows.start, tile.rows.stop)[:, None]
        j = load(tile.keys)
        seen = None
        if self.low is not None:
            seen = j >= load(i + part_of(self.low[:, None, None, None], tile))
        if self.high is not None:
            below = j <= load(i + part_of(self.high[:, None, None, None], tile))
            seen = below if seen is None else seen & below
        return seen

    def _of_distances(self, rows: slice, keys: slice) -> np.ndarray:
        """`visible` (1, 1, r, k) where all entries have the same edges.

        Each row is that before it, moved by one key: copied from one vector, it takes a sixth of the comparisons.
        """
        distances = np.arange(keys.start - rows.stop + 1, keys.stop - rows.start)  # key - query
        seen = np.ones(len(distances), bool)
        if self.low is not None:
            seen &= distances >= self.low[0]
        if self.high is not None:
            seen &= distances <= self.high[0]
        count = rows.stop - rows.start
        moved = np.ndarray((1, 1, count, keys.stop - keys.start), bool, seen, count - 1, (0, 0, -1, 1))
        return moved.copy()  # also of one row, as torch takes no negative strides

    @property
    def differs(self) -> bool:
        return any(edge is not None and bool(np.ptp(edge)) for edge in (self.low, self.high))

    def columns(self, batch: slice, rows: slice, keys: slice) -> slice:
        start = keys.start if self.low is None else max(keys.start, rows.start + int(_of(self.low, batch).min()))
        stop = keys.stop if self.high is None else min(keys.stop, rows.stop + int(_of(self.high, batch).max()))
        return slice(start, stop)

    def visible_columns(self, rows: slice, keys: slice) -> slice:
        start = keys.start if self.low is None else max(keys.start, rows.stop - 1 + int(self.low.max()))
        stop = keys.stop if self.high is None else min(keys.stop, rows.start + 1 + int(self.high.min()))
        return slice(start, stop) if start < stop else slice(keys.start, keys.start)


class Causal(Band):
    """Query i sees key j only if j <= i + query_offset."""

    __slots__ = ()
    field: ClassVar[str] = "is_causal"
    cause: ClassVar[Cause | None] = Cause(
        128, "#6e7781", "the causal mask (key {key} comes after position {place})", "after the query"
    )

    @classmethod
    def of(cls, spec: AttentionSpec, frame: Frame) -> Self | None:
        """The band of `is_causal`."""
        return cls(high=_edge(frame.offset(spec), 0, frame.sizes)) if spec.is_causal else None

    @classmethod
    def example(cls, random: np.random.Generator, sizes: Sizes) -> Any:
        return True


class SlidingWindow(Band):
    """Query i sees keys from i + query_offset - left to i + query_offset + right."""

    __slots__ = ()
    field: ClassVar[str] = "window"
    cause: ClassVar[Cause | None] = Cause(
        32, "#b0762b", "the window (from position {place} only {keys})", "outside the window"
    )

    @classmethod
    def of(cls, spec: AttentionSpec, frame: Frame) -> Self | None:
        """The band of `window`."""
        if spec.window is None:
            return None
        left, right = spec.window.left, spec.window.right
        for side, width in (("left", left), ("right", right)):
            if width is not None and width < 0:
                raise InvalidValue.of(f"/window/{side}", "at least 0", width, "leave it out for an unbounded side")
        offset = frame.offset(spec)
        if left is None and right is None:
            return None
        low = None if left is None else _edge(offset, -left, frame.sizes)
        return cls(low, None if right is None else _edge(offset, right, frame.sizes))

    @classmethod
    def example(cls, random: np.random.Generator, sizes: Sizes) -> Any:
        return {"left": 7, "right": 3}


@dataclass(frozen=True, slots=True)
class Chunks(ScoreTerm):
    """Query i sees key j only if (i + offset) // size = j // size. offset (b or 1,)"""

    size: int
    offset: np.ndarray
    narrows: ClassVar[bool] = True
    reads_offset: ClassVar[bool] = True
    field: ClassVar[str] = "chunk_size"
    cause: ClassVar[Cause | None] = Cause(
        64,
        "#8250df",
        "chunks (position {place} and key {key} are in different ones of {chunk})",
        "of another chunk",
    )

    @classmethod
    def of(cls, spec: AttentionSpec, frame: Frame) -> Self | None:
        """The chunks of `chunk_size`."""
        if spec.chunk_size is None:
            return None
        if spec.chunk_size < 1:
            raise InvalidValue.of("/chunk_size", "at least 1", spec.chunk_size, "leave it out for no chunks")
        longest = frame.sizes.query_length + frame.sizes.key_length
        return cls(min(spec.chunk_size, longest), _reduced(frame.offset(spec), spec.chunk_size, longest))

    @classmethod
    def example(cls, random: np.random.Generator, sizes: Sizes) -> Any:
        return 7

    def visible(self, tile: Tile, load: Load) -> Array | None:
        i = np.arange(tile.rows.start, tile.rows.stop)[:, None] + part_of(self.offset[:, None, None, None], tile)
        seen: Array = load(i // self.size) == load(tile.keys // self.size)
        return seen

    @property
    def differs(self) -> bool:
        return bool(np.ptp(self.offset))

    def columns(self, batch: slice, rows: slice, keys: slice) -> slice:
        offset = _of(self.offset, batch)
        first = (rows.start + int(offset.min())) // self.size * self.size
        last = (rows.stop - 1 + int(offset.max())) // self.size * self.size + self.size
        return slice(max(keys.start, first), min(keys.stop, last))


def _of(numbers: np.ndarray, batch: slice) -> np.ndarray:
    """Those of numbers (b or 1,) that belong to these entries."""
    return numbers if len(numbers) == 1 else numbers[batch]


def _edge(offset: np.ndarray, shift: int, sizes: Sizes) -> np.ndarray:
    """offset + shift, no further out than where all or nothing is visible."""
    return bounded_sum(offset, shift, -sizes.query_length, sizes.key_length)


def _reduced(offset: np.ndarray, size: int, longest: int) -> np.ndarray:
    """Offsets that put queries into the same chunks of min(size, longest), without large numbers.

    longest: at least the number of queries and of keys
    """
    size = min(size, MAX_INTEGER)
    reduced = min(size, longest)
    chunk, place = np.divmod(offset, size)
    start = np.clip(chunk, -longest - 1, longest + 1) * reduced
    reduced_offset: np.ndarray = start + reduced - np.minimum(size - place, reduced)
    return reduced_offset


# In the order in which they are made.
TERMS: Final = (SlidingWindow, Chunks, Causal)
