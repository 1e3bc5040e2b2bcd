"""How far an array is from the truth, as numbers that a report shows."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from attention_service.attention.arrays import FLOATS
from attention_service.schemas.compare import ArrayErrors, UlpErrors

# Relative errors count where the truth is at least this part of its largest magnitude.
RELATIVE_FLOOR: Final = 1e-3
# Numbers whose squares can be summed up in float64.
SQUARABLE: Final = 1e140
# Bits of the significand, with the leading one, and the exponent of the smallest normal number.
_FORMATS: Final = {"float64": (53, -1022), "float32": (24, -126), "float16": (11, -14), "bfloat16": (8, -126)}


def measure(actual: np.ndarray, reference: np.ndarray, dtype: np.dtype) -> ArrayErrors:
    """The errors of an array. Both have the same shape; dtype: the caller's type, for ULPs"""
    actual, reference = np.asarray(actual, np.float64), np.asarray(reference, np.float64)
    finite = np.isfinite(actual) & np.isfinite(reference)
    same = finite | (actual == reference) | (np.isnan(actual) & np.isnan(reference))
    non_finite = int(same.size - np.count_nonzero(same))
    if not finite.any():
        return ArrayErrors(
            max_abs=None, max_rel=None, rmse=None, relative_rmse=None, cosine=None, ulp=None, non_finite=non_finite
        )
    if not finite.all():
        actual, reference = actual[finite], reference[finite]
    error = np.abs(actual - reference)
    size = np.abs(reference)
    counts = size >= max(RELATIVE_FLOOR * float(size.max()), np.finfo(np.float64).tiny)
    rmse, scale = _rms(error), _rms(reference)
    ulps = error / ulp(reference, dtype)
    return ArrayErrors(
        max_abs=float(error.max()),
        max_rel=float((error[counts] / size[counts]).max()) if counts.any() else None,
        rmse=rmse,
        relative_rmse=rmse / scale if scale else None,
        cosine=_cosine(actual, reference),
        ulp=UlpErrors(max=float(ulps.max()), p99=float(np.quantile(ulps, 0.99)), above_one=float(np.mean(ulps > 1))),
        non_finite=non_finite,
    )


def distances(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Differences of the elements: 0 for equal infinities and two NaN, inf where only one is infinite or NaN."""
    with np.errstate(invalid="ignore"):
        found: np.ndarray = np.subtract(one, other, dtype=np.float64)
        np.abs(found, out=found)
    # The maximum is NaN if any difference is.
    if math.isfinite(found.max(initial=0.0)):
        return found
    same = (one == other) | (np.isnan(one) & np.isnan(other))
    return np.where(same, 0.0, np.where(np.isfinite(found), found, np.inf))


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """The largest difference of two arrays; inf if one is infinite or NaN where the other is another number."""
    return float(distances(one, other).max(initial=0.0))


def square(one: np.ndarray, other: np.ndarray, unit: float) -> float:
    """The sum of the squares of the differences, in units.

    An element that is infinite or NaN in one of them only counts as ten times the largest finite number.
    """
    with np.errstate(all="ignore"):
        difference = ((one - other) / unit).ravel()
    with np.errstate(all="ignore"):
        found = float(np.dot(difference, difference))
    if math.isfinite(found):
        return found
    finite = np.isfinite(one) & np.isfinite(other)
    same = (one == other) | (np.isnan(one) & np.isnan(other))
    bound = max(float(np.max(np.abs(array), where=finite, initial=0.0)) for array in (one, other))
    kept = np.clip(difference[finite.ravel()], -SQUARABLE, SQUARABLE)
    return float(np.dot(kept, kept)) + np.count_nonzero(~finite & ~same) * min(10 * (bound + 1) / unit, SQUARABLE) ** 2


def ulp(numbers: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The distance of neighbouring numbers of a type at each of some finite numbers."""
    bits, least = _FORMATS[dtype.name]
    _, exponent = np.frexp(numbers)
    return np.ldexp(1.0, np.maximum(exponent - 1, least) - (bits - 1))


def largest(array: np.ndarray) -> float:
    """The largest magnitude of the finite numbers of an array; 0 if there is none."""
    return float(np.max(np.abs(array), where=np.isfinite(array), initial=0.0))


def largest_number(dtype: np.dtype) -> float:
    """The largest finite number of a type."""
    bits, least = _FORMATS[dtype.name]
    return math.ldexp(2 - 2.0 ** (1 - bits), 1 - least)


def epsilon(dtype: np.dtype) -> float:
    """The distance from one to the next number of a type."""
    return 2.0 ** (1 - _FORMATS[dtype.name][0])


def _rms(array: np.ndarray) -> float:
    # Divided first, so that no square overflows or underflows.
    largest = float(np.max(np.abs(array)))
    return largest * math.sqrt(float(np.mean(np.square(array / largest)))) if largest else 0.0


def _cosine(one: np.ndarray, other: np.ndarray) -> float | None:
    sizes = float(np.max(np.abs(one))), float(np.max(np.abs(other)))
    if not all(sizes):
        return None
    one, other = (one / sizes[0]).ravel(), (other / sizes[1]).ravel()
    return float(np.dot(one, other) / math.sqrt(float(np.dot(one, one)) * float(np.dot(other, other))))


assert set(_FORMATS) == set(FLOATS)
