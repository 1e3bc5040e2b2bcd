"""Terms that add numbers to the scores."""

from __future__ import annotations

import math
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, Final, Self

import numpy as np

from attention_service.attention.array_functions import Array, BackwardFunctions
from attention_service.attention.arrays import cast, per_head
from attention_service.attention.score_term import Bound, Cause, Frame, Load, Part, ScoreTerm
from attention_service.attention.shapes import Sizes, align
from attention_service.attention.spec import AttentionSpec
from attention_service.attention.tile import Tile, part_of
from attention_service.errors import InvalidArray


@dataclass(frozen=True, slots=True)
class Bias(ScoreTerm):
    """Numbers (b, h, q, k), each axis full or 1; -inf hides."""

    numbers: np.ndarray
    field: ClassVar[str] = "bias"
    cause: ClassVar[Cause | None] = Cause(256, "#a0522d", "the bias (minus infinity is added)", "where it is −∞")

    @classmethod
    def of(cls, spec: AttentionSpec, frame: Frame) -> Self | None:
        """The `bias` of a request."""
        if spec.bias is None:
            return None
        if spec.bias.dtype == bool:
            raise InvalidArray.of("/bias", "numbers, added to the scores", spec.bias, "send booleans as mask")
        numbers = cast(spec.bias, frame.dtype, "/bias", minus_infinity=True)
        return cls(align(numbers, frame.axes, frame.sizes, "bias"))

    @classmethod
    def example(cls, random: np.random.Generator, sizes: Sizes) -> Any:
        return random.normal(size=(1, sizes.num_heads, sizes.query_length, sizes.key_length))

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        return (self.numbers,)

    def visible(self, tile: Tile, load: Load) -> Array | None:
        hidden = np.isneginf(part_of(self.numbers, tile))
        return load(~hidden) if hidden.any() else None

    def added(self, tile: Tile, load: Load) -> Array | None:
        return load(part_of(self.numbers, tile))

    @property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"bias": self.numbers.shape}

    def backward(self, grad: Array, tile: Tile, functions: BackwardFunctions) -> list[Part]:
        lengths = self.numbers.shape
        shared = tuple(axis for axis, length in enumerate(lengths) if length == 1)
        parts = (tile.batch, tile.heads, tile.rows, tile.columns)
        place = tuple(slice(0, 1) if length == 1 else part for length, part in zip(lengths, parts, strict=True))
        numbers = functions.xp.sum(grad, axis=shared, keepdims=True) if shared else grad
        return [Part("bias", place, numbers)]

    def largest_added(self, sizes: Sizes) -> Bound:
        axes = (1, 2, 3)
        low, high = self.numbers.min(axis=axes), self.numbers.max(axis=axes)
        if low.min() == -math.inf:
            low = np.min(self.numbers, axis=axes, where=np.isfinite(self.numbers), initial=0)
        largest: np.ndarray = np.maximum(np.maximum(-low, np.where(np.isfinite(high), high, 0)), 0)
        return largest.astype(np.float64)


@dataclass(frozen=True, slots=True)
class Alibi(ScoreTerm):
    """Linear biases (Press et al. 2021): adds -slope · |i + offset - j|. slopes (h,), offset (b or 1,)."""

    slopes: np.ndarray
    offset: np.ndarray
    field: ClassVar[str] = "alibi_slopes"
    reads_offset: ClassVar[bool] = True

    @classmethod
    def of(cls, spec: AttentionSpec, frame: Frame) -> Self | None:
        """The `alibi_slopes` of a request."""
        if spec.alibi_slopes is None:
            return None
        slopes = per_head(spec.alibi_slopes, "/alibi_slopes", frame.sizes.num_heads, frame.dtype)
        return cls(slopes, frame.offset(spec).astype(frame.dtype))

    @classmethod
    def example(cls, random: np.random.Generator, sizes: Sizes) -> Any:
        return 2.0 ** -np.arange(1, sizes.num_heads + 1)

    def added(self, tile: Tile, load: Load) -> Array | None:
        return self._distances(tile, load) * load(-self.slopes[tile.heads, None, None])

    def _distances(self, tile: Tile, load: Load) -> Array:
        """|i + offset - j| of the queries i and keys j of a tile, which broadcasts to its scores."""
        i = np.arange(tile.rows.start, tile.rows.stop)[:, None] + part_of(self.offset[:, None, None, None], tile)
        return abs(load(i) - load(tile.keys.astype(self.slopes.dtype)))

    @property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"alibi_slopes": self.slopes.shape}

    def backward(self, grad: Array, tile: Tile, functions: BackwardFunctions) -> list[Part]:
        numbers = -functions.xp.sum(grad * self._distances(tile, functions.load), axis=(0, 2, 3))
        return [Part("alibi_slopes", (tile.heads,), numbers)]

    def largest_added(self, sizes: Sizes) -> Bound:
        furthest: np.ndarray = np.abs(self.offset).astype(np.float64) + sizes.query_length + sizes.key_length
        return float(np.max(np.abs(self.slopes))) * furthest

    def added_size(self, tile: tuple[int, int, int, int]) -> int:
        return prod(tile) + 2 * tile[2] * tile[3]


# In the order in which they are made.
TERMS: Final = (Bias, Alibi)
