"""What the dense computation needs of an array library."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Final, TypeVar

import numpy as np

from attention_service.attention.arrays import is_float
from attention_service.attention.plan import Plan
from attention_service.attention.tiles import Tiling

Array = Any  # of the library
S = TypeVar("S")
T = TypeVar("T")
# No output has negative integers.
UNWRITTEN: Final = -1


class ArrayLibrary(ABC):
    """An array library, on one device, for the types of one plan.

    xp: its namespace, with the functions of the Python array API
    tiling: how tiles are cut for it
    is_asynchronous: True if reading a number waits for everything that the device was asked to compute before
    fill: what `empty` fills arrays with. Tests set it to NaN, so that a number that was never computed shows;
          integers, which have no NaN, are UNWRITTEN then.
    writes_in_place: True if `matmul` can write into a given array, and arrays can be reshaped without a copy
    """

    xp: Any
    device: Any
    tiling: Tiling
    is_asynchronous: ClassVar[bool] = False
    writes_in_place: ClassVar[bool] = False
    fill: ClassVar[float | None] = None

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    @property
    def compute_dtype(self) -> np.dtype:
        """The type that the plan is computed in."""
        return self.plan.compute_dtype

    @abstractmethod
    def load(self, array: np.ndarray) -> Array:
        """The array on the device; floats in the type that the plan is computed in."""

    @abstractmethod
    def store(self, arrays: dict[str, Array]) -> dict[str, np.ndarray]:
        """The arrays as NumPy arrays, by name."""

    @abstractmethod
    def native(self, dtype: np.dtype) -> Any:
        """The type of the library for a type of NumPy."""

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Array:
        """A new array whose elements all get a value later."""
        found = self.xp.empty(shape, dtype=self.native(dtype), device=self.device)
        if self.fill is not None:
            found[...] = self.fill if is_float(dtype) else UNWRITTEN
        return found

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype) -> Array:
        """A new array of zeros."""
        return self.xp.zeros(shape, dtype=self.native(dtype), device=self.device)

    @abstractmethod
    def hide(self, array: Array, visible: Array, number: float) -> None:
        """Put a number wherever `visible` is False, in place."""

    @abstractmethod
    def top_indices(self, array: Array, count: int) -> Array:
        """The indices of the largest numbers of the last axis, in descending order, equal ones by lower index."""

    @abstractmethod
    def sums_at(self, array: Array, places: np.ndarray, count: int) -> Array:
        """The numbers (…, x) with the same place, (…, x) each, in the last axis summed: (…, count)."""

    @abstractmethod
    def take(self, array: Array, indices: Array, out: Array) -> None:
        """Write the rows of an array (k, x) at indices (r, n) to an array (r, n, x); for -1 any row."""

    def matmul(self, left: Array, right: Array, out: Array | None = None) -> Array:
        """The product over the last two axes. out: the array for the result, only if the library writes in place"""
        return left @ right

    def row_sums(self, array: Array) -> Array:
        """The sums over the last axis, (…, x) -> (…, 1)."""
        return self.xp.sum(array, axis=-1, keepdims=True)

    def linear(self, tokens: Array, weight: Array) -> Array:
        """tokens (b, l, in) @ weight (out, in) transposed: (b, l, out)."""
        return tokens @ weight.T

    def scratch(self, shape: tuple[int, ...]) -> Array | None:
        """Memory of the calling thread for one tile, in the type of the plan; None if each tile allocates its own."""
        return None

    @abstractmethod
    def run(self, function: Callable[[S], T], tiles: Iterable[S]) -> Iterable[T]:
        """The results of a function for each tile or part, in order."""


def largest_number(plan: Plan) -> float:
    """The limit for intermediate results: a fourth of the largest float, so that a sum of two cannot overflow."""
    return float(np.finfo(plan.compute_dtype).max) / 4


def finite(array: Array, xp: Any) -> Array:
    """The array with 0 for each number that is not finite; the array itself if all are."""
    good = xp.isfinite(array)
    return array if xp.all(good) else xp.where(good, array, xp.zeros_like(array))
