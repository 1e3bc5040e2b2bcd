"""Score terms: everything that hides scores or adds to them, one class each.

A key is visible to a query only if every term allows it. What terms add is added to the scaled and capped scores.

To add a term write a class with `of`, and with `visible` and `cause`, or `added`, and put it into TERMS. The dense
backend, the cost model and the tiles use nothing but these. Fast paths refuse it until they are taught.

Shapes in comments: b batch, h heads, r the queries of a tile, k its keys. `load` takes a NumPy array to the library
and device of the backend; arrays that it returns know comparison, `&`, `~`, arithmetic and `abs`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar, Final, Self

import numpy as np

from attention_service.attention.arrays import cast, integers, per_head, per_token, within
from attention_service.attention.score_term import Array, Frame, Load, ScoreTerm
from attention_service.attention.shapes import Sizes, align
from attention_service.attention.spec import AttentionSpec
from attention_service.attention.tile import Tile, part_of
from attention_service.errors import InvalidArray, InvalidValue, MissingField, ShapeMismatch, shape

# Bytes for each index of `selected_keys` beside the number itself, to find those that count.
BOOLEANS: Final = 3


@dataclass(frozen=True, slots=True)
class Bias(ScoreTerm):
    """Numbers (b, h, q, k), each axis full or 1; -inf hides."""

    numbers: np.ndarray
    cause: ClassVar[str] = "bias"

    @classmethod
    def of(cls, spec: AttentionSpec, frame: Frame) -> Self | None:
        """The `bias` of a request."""
        if spec.bias is None:
            return None
        if spec.bias.dtype == bool:
            raise InvalidArray.of("/bias", "numbers, added to the scores", spec.bias, "send booleans as mask")
        numbers = cast(spec.bias, frame.dtype, "/bias", minus_infinity=True)
        return cls(align(numbers, frame.axes, frame.sizes, "bias"))

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        return (self.numbers,)

    def visible(self, tile: Tile, load: Load) -> Array | None:
        hidden = np.isneginf(part_of(self.numbers, tile))
        return load(~hidden) if hidden.any() else None

    def added(self, tile: Tile, load: Load) -> Array | None:
        return load(part_of(self.numbers, tile))

    def largest_added(self, sizes: Sizes) -> float:
        low, high = float(self.numbers.min()), float(self.numbers.max())
        if low == -math.inf:
            low = float(np.min(self.numbers, where=np.isfinite(self.numbers), initial=0))
        return max(-low, high if math.isfinite(high) else 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Alibi(ScoreTerm):
    """Linear biases (Press et al. 2021): adds -slope · |i + offset - j|. slopes (h,), offset (b or 1,)."""

    slopes: np.ndarray
    offset: np.ndarray

    @classmethod
    def of(cls, spec: AttentionSpec, frame: Frame) -> Self | None:
        """The `alibi_slopes` of a request."""
        if spec.alibi_slopes is None:
            return None
        slopes = per_head(spec.alibi_slopes, "/alibi_slopes", frame.sizes.num_heads, frame.dtype)
        return cls(slopes, frame.offset(spec).astype(frame.dtype))

    def added(self, tile: Tile, load: Load) -> Array | None:
        i = np.arange(tile.rows.start, tile.rows.stop)[:, None] + part_of(self.offset[:, None, None, None], tile)
        return abs(load(i) - load(tile.keys.astype(self.slopes.dtype))) * load(-self.slopes[tile.heads, None, None])

    def largest_added(self, sizes: Sizes) -> float:
        furthest = float(np.max(np.abs(self.offset))) + sizes.query_length + sizes.key_length
        return float(np.max(np.abs(self.slopes))) * furthest

    def added_size(self, tile: tuple[int, int, int, int]) -> int:
        return prod(tile) + 2 * tile[2] * tile[3]


@dataclass(frozen=True, slots=True)
class Mask(ScoreTerm):
    """Booleans (b, h, q, k), each axis full or 1; True = visible."""

    booleans: np.ndarray
    cause: ClassVar[str] = "mask"

    @classmethod
    def of(cls, spec: AttentionSpec, frame: Frame) -> Self | None:
        """The `mask` of a request."""
        if spec.mask is None:
            return None
        return cls(align(_booleans(spec.mask, "/mask"), frame.axes, frame.sizes, "mask"))

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        return (self.booleans,)

    def visible(self, tile: Tile, load: Load) -> Array | None:
        return load(part_of(self.booleans, tile))


class KeyMask(Mask):
    """Keys (b or 1, 1, 1, k); False hides a key from all queries."""

    __slots__ = ()
    cause: ClassVar[str] = "key_mask"

    @classmethod
    def of(cls, spec: AttentionSpec, frame: Frame) -> Self | None:
        """The `key_mask` of a request."""
        if spec.key_mask is None:
            return None
        keys, b, k = _booleans(spec.key_mask, "/key_mask"), frame.sizes.batch_size, frame.sizes.key_length
        if keys.shape not in ((k,), (b, k)):
            raise ShapeMismatch.of("/key_mask", f"{shape((k,))} or {shape((b, k))}", keys)
        return cls(keys.reshape(-1, 1, 1, k))


class KeyLengths(KeyMask):
    """Keys beyond `key_lengths` are padding."""

    __slots__ = ()
    cause: ClassVar[str] = "key_lengths"

    @classmethod
    def of(cls, spec: AttentionSpec, frame: Frame) -> Self | None:
        """The `key_lengths` of a request."""
        if spec.key_lengths is None:
            return None
        real = _real_tokens(spec.key_lengths, "/key_lengths", frame.sizes.batch_size, frame.sizes.key_length)
        return cls(real[:, None, None, :])


class QueryLengths(Mask):
    """Queries (b or 1, 1, q, 1); False is padding, which sees no key and is not counted as a masked row."""

    __slots__ = ()
    cause: ClassVar[str] = "query_lengths"

    @classmethod
    def of(cls, spec: AttentionSpec, frame: Frame) -> Self | None:
        """The `query_lengths` of a request."""
        if spec.query_lengths is None:
            return None
        real = _real_tokens(spec.query_lengths, "/query_lengths", frame.sizes.batch_size, frame.sizes.query_length)
        return cls(real[:, None, :, None])


@dataclass(frozen=True, slots=True)
class Segments(ScoreTerm):
    """Only tokens with equal ids see each other: query (b or 1, q), key (b or 1, k)."""

    query: np.ndarray
    key: np.ndarray
    cause: ClassVar[str] = "segment_ids"

    @classmethod
    def of(cls, spec: AttentionSpec, frame: Frame) -> Self | None:
        """The `segment_ids` of a request."""
        ids, sizes = spec.segment_ids, frame.sizes
        if ids is None:
            return None
        if ids.query is None or ids.key is None:
            missing = "query" if ids.query is None else "key"
            raise MissingField.at(f"/segment_ids/{missing}", "ids for both query and key", "none")
        return cls(
            per_token(ids.query, "/segment_ids/query", sizes.batch_size, sizes.query_length),
            per_token(ids.key, "/segment_ids/key", sizes.batch_size, sizes.key_length),
        )

    def visible(self, tile: Tile, load: Load) -> Array | None:
        ids = load(part_of(self.query[:, None, :, None], tile))
        seen: Array = ids == load(part_of(self.key[:, None, None, :], tile))
        return seen


@dataclass(frozen=True, slots=True)
class Band(ScoreTerm):
    """Query i sees keys from i + low to i + high, both inclusive, (b or 1,) each; None is unbounded."""

    low: np.ndarray | None = None
    high: np.ndarray | None = None
    narrows: ClassVar[bool] = True

    def visible(self, tile: Tile, load: Load) -> Array | None:
        if tile.gathered is None and self.visible_columns(tile.rows, tile.columns) == tile.columns:
            return None
        i = np.arange(tile.rows.start, tile.rows.stop)[:, None]
        j = load(tile.keys)
        seen = None
        if self.low is not None:
            seen = j >= load(i + part_of(self.low[:, None, None, None], tile))
        if self.high is not None:
            below = j <= load(i + part_of(self.high[:, None, None, None], tile))
            seen = below if seen is None else seen & below
        return seen

    def columns(self, rows: slice, keys: slice) -> slice:
        start = keys.start if self.low is None else max(keys.start, rows.start + int(self.low.min()))
        stop = keys.stop if self.high is None else min(keys.stop, rows.stop + int(self.high.max()))
        return slice(start, stop)

    def visible_columns(self, rows: slice, keys: slice) -> slice:
        start = keys.start if self.low is None else max(keys.start, rows.stop - 1 + int(self.low.max()))
        stop = keys.stop if self.high is None else min(keys.stop, rows.start + 1 + int(self.high.min()))
        return slice(start, stop) if start < stop else slice(keys.start, keys.start)


class Causal(Band):
    """Query i sees key j only if j <= i + query_offset."""

    __slots__ = ()
    cause: ClassVar[str] = "is_causal"

    @classmethod
    def of(cls, spec: AttentionSpec, frame: Frame) -> Self | None:
        """The band of `is_causal`."""
        return cls(high=_edge(frame.offset(spec), 0, frame.sizes)) if spec.is_causal else None


class SlidingWindow(Band):
    """Query i sees keys from i + query_offset - left to i + query_offset + right."""

    __slots__ = ()
    cause: ClassVar[str] = "window"

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


@dataclass(frozen=True, slots=True)
class Chunks(ScoreTerm):
    """Query i sees key j only if (i + offset) // size = j // size. offset (b or 1,)"""

    size: int
    offset: np.ndarray
    narrows: ClassVar[bool] = True
    cause: ClassVar[str] = "chunk_size"

    @classmethod
    def of(cls, spec: AttentionSpec, frame: Frame) -> Self | None:
        """The chunks of `chunk_size`."""
        if spec.chunk_size is None:
            return None
        if spec.chunk_size < 1:
            raise InvalidValue.of("/chunk_size", "at least 1", spec.chunk_size, "leave it out for no chunks")
        longest = frame.sizes.query_length + frame.sizes.key_length
        offset = [_reduced_offset(int(x), spec.chunk_size, longest) for x in frame.offset(spec)]
        return cls(min(spec.chunk_size, longest), np.array(offset, dtype=np.int64))

    def visible(self, tile: Tile, load: Load) -> Array | None:
        i = np.arange(tile.rows.start, tile.rows.stop)[:, None] + part_of(self.offset[:, None, None, None], tile)
        seen: Array = load(i // self.size) == load(tile.keys // self.size)
        return seen

    def columns(self, rows: slice, keys: slice) -> slice:
        first = (rows.start + int(self.offset.min())) // self.size * self.size
        last = (rows.stop - 1 + int(self.offset.max())) // self.size * self.size + self.size
        return slice(max(keys.start, first), min(keys.stop, last))


@dataclass(frozen=True, slots=True)
class SelectedKeys(ScoreTerm):
    """The only keys that a query may see: indices (b, h, q, n), b, h and q full or 1; -1 is no key."""

    indices: np.ndarray
    cause: ClassVar[str] = "selected_keys"

    @classmethod
    def of(cls, spec: AttentionSpec, frame: Frame) -> Self | None:
        """The `selected_keys` of a request."""
        given, sizes = spec.selected_keys, frame.sizes
        if given is None:
            return None
        if 0 in given.shape:
            raise InvalidArray.of("/selected_keys", "at least one index on every axis", given, "-1 selects no key")
        indices = integers(given, "/selected_keys", {given.shape: ""})
        within(indices, -1, sizes.key_length - 1, "/selected_keys")
        axes, lengths = frame.axes.replace("kq", "qk"), sizes._replace(key_length=given.shape[-1])
        return cls(align(indices, axes, lengths, "selected_keys", last="n"))

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


# In the order in which they are made, and in which their errors are found.
TERMS: Final[tuple[type[ScoreTerm], ...]] = (
    Bias,
    Alibi,
    Mask,
    KeyMask,
    KeyLengths,
    QueryLengths,
    Segments,
    SlidingWindow,
    Chunks,
    Causal,
    SelectedKeys,
)


def make_terms(spec: AttentionSpec, frame: Frame) -> tuple[ScoreTerm, ...]:
    """The terms of a request. Errors: InvalidRequest of every kind."""
    if spec.query_offset is not None:
        frame.offset(spec)  # a wrong offset is refused even if no term needs it
    return tuple(term for kind in TERMS if (term := kind.of(spec, frame)) is not None)


def _real_tokens(lengths: np.ndarray, pointer: str, batch: int, length: int) -> np.ndarray:
    """Which of (b or 1, l) tokens are not padding. Errors: InvalidArray, ShapeMismatch."""
    counts = integers(lengths, pointer, {(): "one integer", (batch,): f"({batch},)"})
    within(counts, 0, length, pointer)
    real: np.ndarray = np.arange(length) < np.atleast_1d(counts)[:, None]
    return real


def _booleans(array: np.ndarray, pointer: str) -> np.ndarray:
    """The array itself. Errors: InvalidArray for numbers, whose hint depends on whether all are 0 or 1."""
    if array.dtype != bool:
        field = pointer.removeprefix("/")
        if ((array == 0) | (array == 1)).all():
            advice = f"if 1 means takes part, send {field} != 0; else {field} == 0"
        else:
            advice = "for numbers to be added to the scores use bias"
        raise InvalidArray.of(pointer, "booleans, true = takes part", array, advice)
    return array


def _edge(offset: np.ndarray, shift: int, sizes: Sizes) -> np.ndarray:
    """offset + shift, no further out than where all or nothing is visible, so that nothing overflows."""
    inside = [max(-sizes.query_length, min(sizes.key_length, int(x) + shift)) for x in offset]
    return np.array(inside, dtype=np.int64)


def _reduced_offset(offset: int, size: int, longest: int) -> int:
    """An offset that puts queries into the same chunks of min(size, longest), without large numbers.

    longest: at least the number of queries and of keys
    """
    chunk, place = divmod(offset, size)
    reduced = min(size, longest)
    return max(-longest - 1, min(longest + 1, chunk)) * reduced + reduced - min(size - place, reduced)
