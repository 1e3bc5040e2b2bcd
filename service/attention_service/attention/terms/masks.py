"""Terms that hide keys by booleans, lengths or ids of a request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Final, Self

import numpy as np

from attention_service.attention.array_functions import Array
from attention_service.attention.arrays import integers, is_number, per_token, within
from attention_service.attention.score_term import Cause, Frame, Load, ScoreTerm
from attention_service.attention.shapes import Sizes, align
from attention_service.attention.spec import AttentionSpec
from attention_service.attention.tile import Tile, part_of
from attention_service.errors import InvalidArray, MissingField, ShapeMismatch, shape


@dataclass(frozen=True, slots=True)
class Mask(ScoreTerm):
    """Booleans (b, h, q, k), each axis full or 1; True = visible."""

    booleans: np.ndarray
    field: ClassVar[str] = "mask"
    cause: ClassVar[Cause | None] = Cause(1, "#b5466f", "the mask (false for this query and key)", "where it is false")

    @classmethod
    def of(cls, spec: AttentionSpec, frame: Frame) -> Self | None:
        """The `mask` of a request."""
        if spec.mask is None:
            return None
        return cls(align(_booleans(spec.mask, "/mask"), frame.axes, frame.sizes, "mask"))

    @classmethod
    def example(cls, random: np.random.Generator, sizes: Sizes) -> Any:
        shape = (sizes.batch_size, sizes.num_heads, sizes.query_length, sizes.key_length)
        mask = random.random(shape) < 0.6
        mask[0, 0, sizes.query_length // 3] = False  # a row that sees nothing
        return mask

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        return (self.booleans,)

    def visible(self, tile: Tile, load: Load) -> Array | None:
        return load(part_of(self.booleans, tile))


class KeyMask(Mask):
    """Keys (b or 1, 1, 1, k); False hides a key from all queries."""

    __slots__ = ()
    field: ClassVar[str] = "key_mask"
    cause: ClassVar[Cause | None] = Cause(2, "#2f81a8", "the key mask (false for this key)", "where it is false")

    @classmethod
    def of(cls, spec: AttentionSpec, frame: Frame) -> Self | None:
        """The `key_mask` of a request."""
        if spec.key_mask is None:
            return None
        keys, b, k = _booleans(spec.key_mask, "/key_mask"), frame.sizes.batch_size, frame.sizes.key_length
        if keys.shape not in ((k,), (b, k)):
            raise ShapeMismatch.of("/key_mask", f"{shape((k,))} or {shape((b, k))}", keys)
        return cls(keys.reshape(-1, 1, 1, k))

    @classmethod
    def example(cls, random: np.random.Generator, sizes: Sizes) -> Any:
        return random.random((sizes.batch_size, sizes.key_length)) < 0.7


class KeyLengths(KeyMask):
    """Keys beyond `key_lengths` are padding."""

    __slots__ = ()
    field: ClassVar[str] = "key_lengths"
    cause: ClassVar[Cause | None] = Cause(
        4, "#3b6ea8", "key padding (the key comes after those that count)", "that is padding"
    )

    @classmethod
    def of(cls, spec: AttentionSpec, frame: Frame) -> Self | None:
        """The `key_lengths` of a request."""
        if spec.key_lengths is None:
            return None
        real = _real_tokens(spec.key_lengths, "/key_lengths", frame.sizes.batch_size, frame.sizes.key_length)
        return cls(real[:, None, None, :])

    @classmethod
    def example(cls, random: np.random.Generator, sizes: Sizes) -> Any:
        return random.integers(sizes.key_length // 2, sizes.key_length, sizes.batch_size)


class QueryLengths(Mask):
    """Queries (b or 1, 1, q, 1); False is padding, which sees no key and is not counted as a masked row."""

    __slots__ = ()
    field: ClassVar[str] = "query_lengths"
    cause: ClassVar[Cause | None] = Cause(
        8,
        "#5b8db8",
        "query padding (the query comes after those that count)",
        "every key of a query that is padding",
    )

    @classmethod
    def of(cls, spec: AttentionSpec, frame: Frame) -> Self | None:
        """The `query_lengths` of a request."""
        if spec.query_lengths is None:
            return None
        real = _real_tokens(spec.query_lengths, "/query_lengths", frame.sizes.batch_size, frame.sizes.query_length)
        return cls(real[:, None, :, None])

    @classmethod
    def example(cls, random: np.random.Generator, sizes: Sizes) -> Any:
        return random.integers(sizes.query_length // 2, sizes.query_length, sizes.batch_size)


@dataclass(frozen=True, slots=True)
class Segments(ScoreTerm):
    """Only tokens with equal ids see each other: query (b or 1, q), key (b or 1, k)."""

    query: np.ndarray
    key: np.ndarray
    field: ClassVar[str] = "segment_ids"
    cause: ClassVar[Cause | None] = Cause(
        16, "#1a7f64", "segments (query and key are in different ones)", "with another id than the query"
    )

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

    @classmethod
    def example(cls, random: np.random.Generator, sizes: Sizes) -> Any:
        lengths = {"query": sizes.query_length, "key": sizes.key_length}
        return {role: random.integers(0, 2, (sizes.batch_size, length)) for role, length in lengths.items()}

    def visible(self, tile: Tile, load: Load) -> Array | None:
        ids = load(part_of(self.query[:, None, :, None], tile))
        seen: Array = ids == load(part_of(self.key[:, None, None, :], tile))
        return seen


def _real_tokens(lengths: np.ndarray, pointer: str, batch: int, length: int) -> np.ndarray:
    """Which of (b or 1, l) tokens are not padding. Errors: InvalidArray, ShapeMismatch."""
    counts = integers(lengths, pointer, {(): "one integer", (1,): "one integer", (batch,): f"({batch},)"})
    within(counts, 0, length, pointer)
    real: np.ndarray = np.arange(length) < np.atleast_1d(counts)[:, None]
    return real


def _booleans(array: np.ndarray, pointer: str) -> np.ndarray:
    """The array itself. Errors: InvalidArray for numbers, whose hint depends on whether all are 0 or 1."""
    if array.dtype != bool:
        field = pointer.removeprefix("/")
        if is_number(array.dtype) and ((array == 0) | (array == 1)).all():
            advice = f"if 1 means takes part, send {field} != 0; else {field} == 0"
        else:
            advice = "for numbers to be added to the scores use bias"
        raise InvalidArray.of(pointer, "booleans, true = takes part", array, advice)
    return array


# In the order in which they are made.
TERMS: Final = (Mask, KeyMask, KeyLengths, QueryLengths, Segments)
