"""How far an array is from the truth, as numbers that a report shows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from attention_service.attention.arrays import FLOATS
from attention_service.schemas.compare import ArrayErrors, UlpErrors

# Relative errors count where the truth is at least this part of its largest magnitude.
RELATIVE_FLOOR: Final = 1e-3
# Elements that are measured at a time.
PART: Final = 2**15
# Elements of arrays that are compared at a time, and of which no copy is made.
LARGE: Final = 2**18
NOTHING: Final = np.empty(0)
# Numbers whose squares can be summed up in float64.
SQUARABLE: Final = 1e140
# Bits of the significand, with the leading one, and the exponent of the smallest normal number.
_FORMATS: Final = {"float64": (53, -1022), "float32": (24, -126), "float16": (11, -14), "bfloat16": (8, -126)}


def measure(actual: np.ndarray, reference: np.ndarray, dtype: np.dtype) -> ArrayErrors:
    """The errors of an array. Both have the same shape; dtype: the caller's type, for ULPs"""
    actual, reference = np.asarray(actual), np.asarray(reference)
    size, sizes = actual.size, (largest(actual), largest(reference))
    actual, reference = _flat(actual), _flat(reference)
    parts, ulps, done, non_finite = [], np.empty(size), 0, 0
    for start in range(0, size, PART):
        one, right = (array[start : start + PART].astype(np.float64) for array in (actual, reference))
        finite = np.isfinite(one) & np.isfinite(right)
        if not finite.all():
            non_finite += int(np.count_nonzero(~(finite | (one == right) | (np.isnan(one) & np.isnan(right)))))
            one, right = one[finite], right[finite]
        if one.size:
            part = _Part.of(one, right, sizes)
            np.divide(part.errors, ulp(right, dtype), out=ulps[done : done + one.size])
            parts.append(part._replace(errors=NOTHING))
            done += one.size
    if not parts:
        return ArrayErrors(
            max_abs=None, max_rel=None, rmse=None, relative_rmse=None, cosine=None, ulp=None, non_finite=non_finite
        )
    ulps = ulps[:done]
    rmse, scale = _joined_rms(parts, 0), _joined_rms(parts, 1)
    squares = [sum(column) for column in zip(*(part.squares for part in parts), strict=True)]
    relative = [part.max_rel for part in parts if part.max_rel is not None]
    above = float(np.mean(ulps > 1))
    return ArrayErrors(
        max_abs=max(part.max_abs for part in parts),
        max_rel=max(relative, default=None),
        rmse=rmse,
        relative_rmse=rmse / scale if scale else None,
        cosine=squares[2] / math.sqrt(squares[0] * squares[1]) if squares[0] and squares[1] else None,
        ulp=UlpErrors(max=float(ulps.max()), p99=float(np.quantile(ulps, 0.99, overwrite_input=True)), above_one=above),
        non_finite=non_finite,
    )


def _flat(array: np.ndarray) -> Any:
    """The elements of an array in order, of which parts may be taken: no copy of a large one."""
    return array.reshape(-1) if array.flags.c_contiguous or array.size < LARGE else array.flat


class _Part(NamedTuple):
    """What is measured of some elements, all finite, at a time: a part stays in the cache.

    rms:     of the errors and of the reference
    squares: Σ actual², Σ reference² and Σ actual · reference, each number over the largest of its array
    """

    elements: int
    errors: np.ndarray
    max_abs: float
    max_rel: float | None
    rms: tuple[float, float]
    squares: tuple[float, float, float]

    @classmethod
    def of(cls, one: np.ndarray, right: np.ndarray, sizes: tuple[float, float]) -> _Part:
        """A part of an array. sizes: the largest magnitudes of the whole arrays"""
        errors, size = np.abs(one - right), np.abs(right)
        counts = size >= max(RELATIVE_FLOOR * sizes[1], np.finfo(np.float64).tiny)
        relative = float((errors[counts] / size[counts]).max()) if counts.any() else None
        rms = _rms(errors), _rms(right)
        one, right = one / (sizes[0] or 1), right / (sizes[1] or 1)
        squares = float(np.dot(one, one)), float(np.dot(right, right)), float(np.dot(one, right))
        return cls(one.size, errors, float(errors.max()), relative, rms, squares)


def _joined_rms(parts: Sequence[_Part], which: int) -> float:
    """The root mean square of all parts. which: 0 of the errors, 1 of the reference"""
    most = max(part.rms[which] for part in parts)
    if not most:
        return 0.0
    total = sum(part.elements * (part.rms[which] / most) ** 2 for part in parts)
    return most * math.sqrt(total / sum(part.elements for part in parts))


def distances(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Differences of the elements: 0 for equal infinities and two NaN, inf where only one is infinite or NaN."""
    with np.errstate(invalid="ignore"):
        found: np.ndarray = np.asarray(np.subtract(one, other, dtype=np.float64))
        np.abs(found, out=found)
    # The maximum is NaN if any difference is.
    if math.isfinite(found.max(initial=0.0)):
        return found
    same = (one == other) | (np.isnan(one) & np.isnan(other))
    return np.where(same, 0.0, np.where(np.isfinite(found), found, np.inf))


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """The largest difference of two arrays; inf if one is infinite or NaN where the other is another number."""
    if one.size > LARGE and one.ndim > 1 and one.shape == other.shape:  # in parts, which take less memory
        count = min(len(one), -(-one.size // LARGE)) if len(one) > 1 else 1
        if count == 1:
            return distance(one[0], other[0])
        pairs = zip(np.array_split(one, count), np.array_split(other, count), strict=True)
        return max(distance(*pair) for pair in pairs)
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
    bound = max(largest(one), largest(other))
    kept = np.clip(difference[finite.ravel()], -SQUARABLE, SQUARABLE)
    return float(np.dot(kept, kept)) + np.count_nonzero(~finite & ~same) * min(10 * (bound + 1) / unit, SQUARABLE) ** 2


def ulp(numbers: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The distance of neighbouring numbers of a type at each of some finite numbers."""
    bits, least = _FORMATS[dtype.name]
    _, exponent = np.frexp(numbers)
    return np.ldexp(1.0, np.maximum(exponent - 1, least) - (bits - 1))


def largest(array: np.ndarray) -> float:
    """The largest magnitude of the finite numbers of an array; 0 if there is none."""
    found = max(float(np.max(array, initial=0.0)), -float(np.min(array, initial=0.0)))
    return found if math.isfinite(found) else float(np.max(np.abs(array), where=np.isfinite(array), initial=0.0))


def largest_number(dtype: np.dtype) -> float:
    """The largest finite number of a type."""
    bits, least = _FORMATS[dtype.name]
    return math.ldexp(2 - 2.0 ** (1 - bits), 1 - least)


def smallest_normal(dtype: np.dtype) -> float:
    """The smallest number of a type that has all of its digits."""
    return math.ldexp(1.0, _FORMATS[dtype.name][1])


def epsilon(dtype: np.dtype) -> float:
    """The distance from one to the next number of a type."""
    return 2.0 ** (1 - _FORMATS[dtype.name][0])


def _rms(array: np.ndarray) -> float:
    # Divided first, so that no square overflows or underflows.
    largest = float(np.max(np.abs(array)))
    return largest * math.sqrt(float(np.mean(np.square(array / largest)))) if largest else 0.0


assert set(_FORMATS) == set(FLOATS)
