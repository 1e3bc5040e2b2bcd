"""What tests with a tolerance say of an output: those of public projects, and the caller's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np


@dataclass(frozen=True, slots=True)
class Tolerance:
    """A test that accepts |actual - expected| <= atol + rtol · |expected|.

    mismatches: the share of elements that may fail it
    either:     True to refuse an element only if its absolute error is above atol and its relative error above rtol
    finite:     True to accept no infinity and no NaN, even where it is right
    """

    name: str
    rtol: float
    atol: float
    mismatches: float = 0.0
    either: bool = False
    finite: bool = False

    def passes(self, actual: np.ndarray, expected: np.ndarray) -> bool:
        """True if the test accepts an array."""
        with np.errstate(all="ignore"):
            apart, size = np.abs(actual - expected), np.abs(expected)
            if self.either:
                good = ~((apart > self.atol) & (apart / size > self.rtol))
            else:
                good = apart <= self.atol + self.rtol * size
        if self.finite and not np.isfinite(actual).all():
            return False
        if not self.finite and np.isnan(apart).any():
            good |= actual == expected  # of infinities, which have no difference
        return bool(good.size - np.count_nonzero(good) <= self.mismatches * good.size)

    def passes_all(self, actual: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> bool:
        """True if the test accepts each of some arrays. expected: by the same names"""
        return all(self.passes(array, expected[name]) for name, array in actual.items())


# torch.testing.assert_close, by type (https://docs.pytorch.org/docs/stable/testing.html).
TORCH: Final = {
    "float64": (1e-7, 1e-7),
    "float32": (1.3e-6, 1e-5),
    "float16": (1e-3, 1e-5),
    "bfloat16": (1.6e-2, 1e-5),
}
# KernelBench's tolerance for rtol and atol, by type (get_tolerance_for_precision in src/eval.py).
KERNEL_BENCH: Final = {"float64": 1e-4, "float32": 1e-4, "float16": 1e-2, "bfloat16": 1e-2}
# FlashInfer-Bench: wrong only if absolute and relative error are above 1e-2; anything infinite is wrong.
FLASHINFER_BENCH: Final = 1e-2


def usual_tolerances(dtype: np.dtype) -> tuple[Tolerance, ...]:
    """The tests of public projects, for a type."""
    rtol, atol = TORCH[dtype.name]
    same = KERNEL_BENCH[dtype.name]
    return (
        Tolerance("torch.testing", rtol, atol),
        Tolerance("KernelBench", same, same),
        Tolerance("FlashInfer-Bench", FLASHINFER_BENCH, FLASHINFER_BENCH, either=True, finite=True),
    )
