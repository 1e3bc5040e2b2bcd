"""Numbers as they are computed with: of one type, finite, within their type's range."""

from __future__ import annotations

import math
from typing import Final

import ml_dtypes
import numpy as np

from service.errors import InvalidArray, Overflow, ShapeMismatch

BFLOAT16: Final = np.dtype(ml_dtypes.bfloat16)
# Widest first.
FLOATS: Final[dict[str, np.dtype]] = {
    "float64": np.dtype(np.float64),
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": BFLOAT16,
}
_FLOATS: Final = frozenset(FLOATS.values())
WIDER: Final = {"float16": "float32", "bfloat16": "float32", "float32": "float64"}


def is_float(dtype: np.dtype) -> bool:
    """Whether a type is one of FLOATS; NumPy knows bfloat16 by no kind of its own."""
    return dtype in _FLOATS


def widest(dtypes: list[np.dtype]) -> np.dtype:
    """The type that holds all of these: float32 for float16 with bfloat16; float64 for none."""
    names = {dtype.name for dtype in dtypes if is_float(dtype)}
    if names == {"float16", "bfloat16"}:
        return FLOATS["float32"]
    return next((FLOATS[name] for name in FLOATS if name in names), FLOATS["float64"])


def compute_dtype(dtype: np.dtype) -> np.dtype:
    """Halves are computed in float32, everything else in its own type."""
    return dtype if dtype.itemsize >= 4 else FLOATS["float32"]


def cast(
    array: np.ndarray, dtype: np.dtype, pointer: str, *, minus_infinity: bool = False, non_finite: bool = False
) -> np.ndarray:
    """The array in `dtype`, not copied where it has it already.

    minus_infinity: whether -inf is a number here, as it is in an additive bias; non_finite: whether inf and NaN are.
    Errors: InvalidArray for what is no (finite) number, Overflow for what `dtype` cannot hold.
    """
    with np.errstate(all="ignore"):
        return measured(array, dtype, pointer, minus_infinity=minus_infinity, non_finite=non_finite)[0]


def measured(
    array: np.ndarray, dtype: np.dtype, pointer: str, *, minus_infinity: bool = False, non_finite: bool = False
) -> tuple[np.ndarray, float]:
    """The same, and a bound of the Euclidean norm of all its numbers as one vector; inf where none is known.

    NumPy may warn of overflow on the way, unless the caller keeps it from that.
    """
    if array.dtype.kind not in "iu" and not is_float(array.dtype):
        raise InvalidArray.of(pointer, "numbers", array)
    converted = array.astype(dtype, copy=False)
    bound = norm(converted)
    if bound < math.inf:
        return converted, bound
    good = np.isfinite(converted)
    if not good.all() and (minus_infinity or non_finite):
        good |= array == -np.inf if minus_infinity else ~np.isfinite(array)
    if not good.all():
        index = tuple(int(i) for i in np.argwhere(~good)[0])
        place = "".join(f"/{i}" for i in index)
        value = float(array[index])
        if np.isfinite(value):
            raise Overflow.of(pointer + place, f"a number that {dtype.name} can hold", value, wider(dtype))
        raise InvalidArray.of(pointer + place, "a finite number", value)
    return converted, math.inf


def norm(array: np.ndarray) -> float:
    """The Euclidean norm, or for halves a bound of it. Where a number is inf or NaN, so is this, and inf too where only
    a square is too large.

    One product tells that all numbers are finite in a third of the time that looking at each takes.
    """
    if array.dtype.itemsize < 4:
        return math.sqrt(array.size) * _largest(array) if array.size else 0.0
    return math.sqrt(np.vdot(array, array))


def _largest(halves: np.ndarray) -> float:
    """The largest magnitude; inf or NaN if a number is. By its bits, which are in the order of the numbers: NumPy knows
    no fast way to look at halves themselves."""
    bits = max(int(halves.view(np.int16).max()), int(halves.view(np.uint16).max()) & 0x7FFF)
    return float(np.array(bits, np.uint16).view(halves.dtype))


def all_finite(array: np.ndarray) -> bool:
    """Whether every number is finite."""
    return norm(array) < math.inf or bool(np.isfinite(array).all())


def wider(dtype: np.dtype) -> str:
    """The advice that goes with an overflow."""
    return f"ask for dtype {WIDER[dtype.name]}" if dtype.name in WIDER else "no wider type is offered"


def integers(array: np.ndarray, pointer: str, shapes: dict[tuple[int, ...], str]) -> np.ndarray:
    """The array as int64, if it holds integers and has one of these shapes (each with its text).

    Errors: InvalidArray, ShapeMismatch.
    """
    if array.dtype.kind not in "iu":
        raise InvalidArray.of(pointer, "integers", array)
    if array.shape not in shapes:
        raise ShapeMismatch.of(pointer, " or ".join(dict.fromkeys(shapes.values())), array)
    return array.astype(np.int64, copy=False)


def within(array: np.ndarray, low: int, high: int, pointer: str) -> None:
    """Errors: InvalidArray with the place of the first element that is not from `low` to `high`."""
    bad = (array < low) | (array > high)
    if bad.any():
        index = tuple(int(i) for i in np.argwhere(bad)[0])
        place = "".join(f"/{i}" for i in index)
        raise InvalidArray.of(pointer + place, f"an integer from {low} to {high}", int(array[index]))
