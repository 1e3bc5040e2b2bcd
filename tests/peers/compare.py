"""Measures the difference of two tensors."""

from __future__ import annotations

import math

import numpy as np

TINY = 1e-30


def deviation(ours: np.ndarray, theirs: np.ndarray) -> float:
    """max|a - b| / max|b| over finite elements; infinite if shapes or the elements that are not finite differ."""
    a, b = np.asarray(ours).astype(np.float64), np.asarray(theirs).astype(np.float64)
    if a.shape != b.shape or not np.array_equal(np.isfinite(a), np.isfinite(b)):
        return math.inf
    finite = np.isfinite(b)
    if not np.array_equal(a[~finite], b[~finite]) or not finite.any():
        return 0.0 if np.array_equal(a[~finite], b[~finite]) else math.inf
    largest = np.max(np.abs(b[finite]))
    return float(np.max(np.abs(a[finite] - b[finite])) / max(largest, TINY))


def same_zeros(ours: np.ndarray, theirs: np.ndarray) -> bool:
    """True if both arrays are exactly zero at the same places."""
    return bool(np.array_equal(np.asarray(ours) == 0, np.asarray(theirs) == 0))
