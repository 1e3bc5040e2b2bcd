"""The term that multiplies queries by keys for distances."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Self

import numpy as np

from attention_service.attention.array_functions import Array, ArrayFunctions, BackwardFunctions
from attention_service.attention.arrays import bounded_sum, cast, lost_to_underflow
from attention_service.attention.score_term import Bound, Frame, Part, ScoreTerm
from attention_service.attention.shapes import Sizes
from attention_service.attention.spec import AttentionSpec
from attention_service.attention.tile import Tile, part_of
from attention_service.errors import MissingField, ShapeMismatch, shape


@dataclass(frozen=True, slots=True)
class RelativeKeys(ScoreTerm):
    """Relative positions (Shaw et al. 2018, Dai et al. 2019): adds (query i + bias) · keys[j - i - offset - first].

    keys (h or 1, n, d): those of distances from `first` on, the outermost of them also for distances beyond
    bias (h, 1, d) or None; offset (b or 1,)
    """

    keys: np.ndarray
    first: int
    offset: np.ndarray
    bias: np.ndarray | None = None
    field: ClassVar[str] = "relative_keys"
    reads_query: ClassVar[bool] = True
    reads_offset: ClassVar[bool] = True

    @classmethod
    def of(cls, spec: AttentionSpec, frame: Frame) -> Self | None:
        """The `relative_keys` of a request."""
        given, sizes = spec.relative_keys, frame.sizes
        if given is None:
            return None
        if given.key is None:
            raise MissingField.at("/relative_keys/key", "a key for each distance", "none")
        h, d, leading = sizes.num_heads, sizes.head_dim, given.key.shape[:-2]
        if (
            given.key.ndim not in (2, 3)
            or leading not in ((), (h,))
            or given.key.shape[-1] != d
            or 0 in given.key.shape
        ):
            expected = f"(distances, {d}) or ({h}, distances, {d})"
            raise ShapeMismatch.of("/relative_keys/key", expected, given.key)
        if given.query_bias is not None and given.query_bias.shape != (h, d):
            raise ShapeMismatch.of("/relative_keys/query_bias", shape((h, d)), given.query_bias)
        keys = cast(given.key, frame.dtype, "/relative_keys/key")
        bias = None if given.query_bias is None else cast(given.query_bias, frame.dtype, "/relative_keys/query_bias")
        count = int(given.key.shape[-2])
        furthest = sizes.query_length + sizes.key_length + count
        wanted = -(count // 2) if given.first is None else given.first
        first = max(-furthest, min(furthest, wanted))
        offset = bounded_sum(frame.offset(spec), wanted, -furthest, furthest) - first  # only its sum with first counts
        return cls(
            keys if keys.ndim == 3 else keys[None],
            first,
            offset,
            None if bias is None else bias[:, None],
        )

    @classmethod
    def example(cls, random: np.random.Generator, sizes: Sizes) -> Any:
        h, q, d = sizes.num_heads, sizes.query_length, sizes.head_dim
        key = random.normal(size=(h, q + sizes.key_length - 1, d))
        return {"key": key, "first": 1 - q, "query_bias": random.normal(size=(h, d))}

    def distances(self, tile: Tile) -> np.ndarray:
        """j - i - offset for the queries i and keys j of a tile, (b or 1, h or 1, r, k)."""
        i = np.arange(tile.rows.start, tile.rows.stop)[:, None] + part_of(self.offset[:, None, None, None], tile)
        distances: np.ndarray = tile.keys - i
        return distances

    def products(self, query: Array, tile: Tile, functions: ArrayFunctions) -> Array | None:
        xp, load = functions.xp, functions.load
        rows, seen = self._keys_of(tile)
        keys = self.keys if len(self.keys) == 1 else self.keys[tile.heads]
        if self.bias is not None:
            query = query + load(self.bias[tile.heads])
        products = query @ xp.permute_dims(load(keys[:, seen]), (0, 2, 1))  # b h r distances
        return xp.take_along_axis(products, load(np.broadcast_to(rows, (*products.shape[:3], rows.shape[3]))))

    def _keys_of(self, tile: Tile) -> tuple[np.ndarray, slice]:
        """The places (b or 1, h or 1, r, k) of the key of each query and key of a tile among those that it has."""
        rows = np.clip(self.distances(tile) - self.first, 0, self.keys.shape[1] - 1)
        low = int(rows.min())
        return rows - low, slice(low, int(rows.max()) + 1)

    @property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = {"relative_keys.key": self.keys.shape}
        return shapes if self.bias is None else shapes | {"relative_keys.query_bias": self.bias.shape}

    def products_backward(
        self, grad: Array, query: Array, tile: Tile, functions: BackwardFunctions
    ) -> tuple[Array, list[Part]]:
        xp, load = functions.xp, functions.load
        rows, seen = self._keys_of(tile)
        is_shared = len(self.keys) == 1
        keys = load((self.keys if is_shared else self.keys[tile.heads])[:, seen])
        if self.bias is not None:
            query = query + load(self.bias[tile.heads])
        of_distances = functions.sums_at(grad, np.broadcast_to(rows, grad.shape), seen.stop - seen.start)
        of_query = of_distances @ keys  # b h r d
        of_keys = xp.sum(xp.permute_dims(of_distances, (0, 1, 3, 2)) @ query, axis=(0, 1) if is_shared else 0)
        place = (slice(0, 1) if is_shared else tile.heads, seen)
        parts = [Part("relative_keys.key", place, of_keys[None] if is_shared else of_keys)]
        if self.bias is not None:
            parts.append(Part("relative_keys.query_bias", (tile.heads,), xp.sum(of_query, axis=(0, 2))[:, None]))
        return of_query, parts

    def largest_product(self, length: Bound) -> Bound:
        bias = 0.0 if self.bias is None else _longest(self.bias)
        return (length + bias) * _longest(self.keys)

    def added_size(self, tile: tuple[int, int, int, int]) -> int:
        b, h, r, k = tile
        distances = min(self.keys.shape[1], r + k + int(np.ptp(self.offset)))
        biased = 0 if self.bias is None else self.keys.shape[2]
        # Queries with the bias, all products and those of the keys; three times the places, in eight bytes each.
        size: int = b * h * r * (biased + distances + k) + 6 * len(self.offset) * r * k
        size += self.keys.shape[0] * self.keys.shape[1]  # their lengths
        return size


def _longest(vectors: np.ndarray) -> float:
    """An upper bound of the Euclidean norms of vectors (h, n, d)."""
    largest = float(np.vecdot(vectors, vectors).max())
    return math.sqrt(largest + lost_to_underflow(vectors.dtype, vectors.shape[-1]))


# In the order in which they are made.
TERMS: Final = (RelativeKeys,)
