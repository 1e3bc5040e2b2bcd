"""The functions of an array library that steps and terms are computed with."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

Array = Any  # of the library of the backend


class ArrayFunctions(Protocol):
    """What steps and terms need of an array library."""

    @property
    def xp(self) -> Any:
        """Its namespace, with the functions of the Python array API."""

    @property
    def compute_dtype(self) -> np.dtype:
        """The type of the arrays."""

    def load(self, array: np.ndarray, /) -> Array:
        """An array of NumPy in the library, floats in that type."""


class BackwardFunctions(ArrayFunctions, Protocol):
    """What the backward passes of steps and terms need beside."""

    def sums_at(self, array: Array, places: np.ndarray, count: int, /) -> Array:
        """The numbers (…, x) with the same place, (…, x) each, in the last axis summed: (…, count)."""
