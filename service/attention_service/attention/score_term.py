"""The base of score terms: everything that hides scores or adds to them, see `terms`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from attention_service.attention.array_functions import Array, ArrayFunctions, BackwardFunctions
from attention_service.attention.arrays import integers
from attention_service.attention.shapes import Sizes
from attention_service.attention.spec import AttentionSpec
from attention_service.attention.tile import Tile
from attention_service.errors import MissingField

Load = Callable[[np.ndarray], Array]
# One number for each batch entry, (b,), or one for all.
Bound = np.ndarray | float


@dataclass(frozen=True, slots=True)
class Frame:
    """What terms and steps are made with, beside the request.

    axes: of score matrices, see `score_axes`; past: tokens of the cache; dtype: the type that is computed in
    """

    axes: str
    sizes: Sizes
    past: int
    dtype: np.dtype

    def offset(self, spec: AttentionSpec) -> np.ndarray:
        """The position of the first query among the keys, (b or 1,): as given, else the length of the past.

        Errors: InvalidArray, ShapeMismatch; MissingField if query and key differ in length and there is no past.
        """
        q, k = self.sizes.query_length, self.sizes.key_length
        if spec.query_offset is not None:
            one, b = "one integer", self.sizes.batch_size
            shapes = {(): one, (1,): one, (b,): f"({b},)"}
            return np.atleast_1d(integers(spec.query_offset, "/query_offset", shapes))
        if q != k and spec.past_key is None:
            choices = f"0 aligns the first query with the first key, {k - q} the last with the last"
            raise MissingField.at("/query_offset", "an offset, as query and key differ in length", "none", choices)
        return np.full(1, self.past)


class Part(NamedTuple):
    """What a tile adds to the gradient of an array: the field of the request, the place in the array, the numbers."""

    field: str
    place: tuple[slice, ...]
    numbers: Array


class Cause(NamedTuple):
    """How outputs, pictures, the page and its documentation show a term that hides keys.

    bit: in `hidden_by`; clients rely on it: it never changes
    tint: the colour of the keys that it hides, sRGB
    reason: after "hidden by": a name, and in parentheses what is true of one query and key, which pictures leave out;
      names between braces are filled in by `whyHidden` of page/row.js
    hides: which keys, as the end of a sentence that begins with "hides a key"
    """

    bit: int
    tint: str
    reason: str
    hides: str

    @property
    def name(self) -> str:
        """What hides the key, without what is true of one query and key."""
        return self.reason.partition(" (")[0]


class ScoreTerm:
    """Base of all terms. Subclasses are frozen dataclasses.

    field: of the request, which makes the term
    narrows: True if `columns` may leave keys out
    reads_query: True if it has `products`
    reads_offset: True if it reads `query_offset`
    cause: how it is shown that the term hides keys; None if it hides none
    """

    __slots__ = ()
    field: ClassVar[str]
    narrows: ClassVar[bool] = False
    reads_query: ClassVar[bool] = False
    reads_offset: ClassVar[bool] = False
    cause: ClassVar[Cause | None] = None

    @classmethod
    def of(cls, spec: AttentionSpec, frame: Frame) -> Self | None:
        """The term of a request; None if the request has none. Errors: InvalidRequest of every kind."""
        raise NotImplementedError

    @classmethod
    def example(cls, random: np.random.Generator, sizes: Sizes) -> Any:
        """A random value of the field, as a client sends it in layout bhld, for inputs of comparisons and suites."""
        raise NotImplementedError

    @classmethod
    def noun(cls) -> str:
        """The words for what the term does: "the kernel ignores" them."""
        return cls.field if cls.cause is None else cls.cause.name

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """Arrays with axes (b, h, q, k), each full or of length 1, that the term reads."""
        return ()

    def visible(self, tile: Tile, load: Load) -> Array | None:
        """Booleans that broadcast to the scores of a tile, True = visible; None if all are."""
        return None

    def added(self, tile: Tile, load: Load) -> Array | None:
        """Numbers that broadcast to the scores of a tile and are added to them; None for none."""
        return None

    def products(self, query: Array, tile: Tile, functions: ArrayFunctions) -> Array | None:
        """Numbers (b, h, r, k) that are added to the products of query and key, before the scale; None for none.

        query: (b, h, r, d), the queries of the tile
        """
        return None

    @property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the gradients that `backward` and `products_backward` add to, by the field of the request."""
        return {}

    def backward(self, grad: Array, tile: Tile, functions: BackwardFunctions) -> list[Part]:
        """The gradients of the arrays of the term whose numbers are added.

        grad: (b, h, r, k), the gradient of the masked scores of a tile
        """
        if type(self).added is not ScoreTerm.added:
            raise NotImplementedError  # not 0, which would be wrong in silence
        return []

    def products_backward(
        self, grad: Array, query: Array, tile: Tile, functions: BackwardFunctions
    ) -> tuple[Array, list[Part]] | None:
        """The gradients of the query (b, h, r, d) and of the arrays of the term by `products`; None without products.

        grad: (b, h, r, k), the gradient of the products
        """
        if self.reads_query:
            raise NotImplementedError  # not 0, which would be wrong in silence
        return None

    def largest_product(self, length: Bound) -> Bound:
        """A bound on the magnitude of the products for queries of at most this Euclidean norm."""
        return 0.0

    def largest_added(self, sizes: Sizes) -> Bound:
        """A bound on the magnitude of the finite numbers that are added, (b or 1,) or one for all entries."""
        return 0.0

    @property
    def differs(self) -> bool:
        """True if batch entries differ in what `columns` returns for them."""
        return False

    def columns(self, batch: slice, rows: slice, keys: slice) -> slice:
        """The part of these keys that some of these queries may see, by position, in some of these entries."""
        return keys

    def visible_columns(self, rows: slice, keys: slice) -> slice:
        """A part of these keys that all of these queries see, so that `visible` need not be called for it."""
        return slice(keys.start, keys.start)

    def added_size(self, tile: tuple[int, int, int, int]) -> int:
        """Elements of the new arrays that `added` or `products` makes for a tile of these lengths (b, h, r, k)."""
        return 0

    def visible_bytes(self, tile: tuple[int, int, int, int]) -> tuple[int, int]:
        """The bytes of the largest mask that `visible` makes or reads, and of what it needs beside the mask.

        tile: the lengths (b, h, r, k) of a tile
        """
        b, _, r, k = tile
        return max([b * r * k, *(prod(map(min, array.shape, tile)) for array in self.arrays)]), 0
