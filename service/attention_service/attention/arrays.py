"""Checks and conversions of arrays: to one type, finite, within the range of the type."""

from __future__ import annotations

import math
from typing import Final

import ml_dtypes
import numpy as np

from attention_service.errors import InvalidArray, Overflow, ShapeMismatch, shape

BFLOAT16: Final = np.dtype(ml_dtypes.bfloat16)
# Widest first.
FLOATS: Final[dict[str, np.dtype]] = {
    "float64": np.dtype(np.float64),
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": BFLOAT16,
}
_FLOATS: Final = frozenset(FLOATS.values())
# Numbers of batch entries that are looked at together, if they must be copied for it.
TOGETHER: Final = 2**16
# The smallest normal numbers; bfloat16 has the exponents of float32.
_TINY: Final = {dtype: float(np.finfo(np.float32 if dtype == BFLOAT16 else dtype).tiny) for dtype in _FLOATS}
# Batch entries, heads, and sequences of a call, at most.
MAX_COUNT: Final = 2**20
# Characters of a text that is no label, so that errors and answers that repeat it are short.
MAX_TEXT: Final = 2**12
MAX_INTEGER: Final = np.iinfo(np.int64).max
WIDER: Final = {"float16": "float32", "bfloat16": "float32", "float32": "float64"}


def is_float(dtype: np.dtype) -> bool:
    """True if a type is one of FLOATS. NumPy has no kind for bfloat16."""
    return dtype in _FLOATS


def is_number(dtype: np.dtype) -> bool:
    """True for integers of NumPy and the types of FLOATS. NumPy's kind does not tell: it calls float8_e5m2 a float."""
    return dtype.kind in "iu" or dtype in _FLOATS


def widest(dtypes: list[np.dtype]) -> np.dtype:
    """The smallest type that holds the floats of all these types; float64 if there is no float."""
    names = {dtype.name for dtype in dtypes if is_float(dtype)}
    if names == {"float16", "bfloat16"}:
        return FLOATS["float32"]
    return next((FLOATS[name] for name in FLOATS if name in names), FLOATS["float64"])


def compute_dtype(dtype: np.dtype) -> np.dtype:
    """The type that a type is computed in: float32 for halves, else the type itself."""
    return dtype if dtype.itemsize >= 4 else FLOATS["float32"]


def cast(
    array: np.ndarray, dtype: np.dtype, pointer: str, *, minus_infinity: bool = False, non_finite: bool = False
) -> np.ndarray:
    """The array in `dtype`; the same array if it has this type already.

    minus_infinity: True if -inf is allowed, as in an additive bias; non_finite: True if inf and NaN are

    Errors: InvalidArray for anything but finite numbers, Overflow for a number that `dtype` cannot hold.
    """
    with np.errstate(all="ignore"):
        return cast_and_norms(array, dtype, pointer, minus_infinity=minus_infinity, non_finite=non_finite)[0]


def cast_and_norms(
    array: np.ndarray,
    dtype: np.dtype,
    pointer: str,
    batch_axis: int | None = None,
    *,
    minus_infinity: bool = False,
    non_finite: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """The array in `dtype`, as `cast` returns it, and a bound on the Euclidean norm of each batch entry, (b,).

    A bound is inf if none is known. batch_axis: of the entries; None if the array is one
    non_finite: True if inf and NaN are allowed. NumPy may warn of overflow on the way.
    """
    if not is_number(array.dtype):
        raise InvalidArray.of(pointer, "numbers", array)
    converted = array.astype(dtype, copy=False)
    bounds = norms(converted, batch_axis)
    if sum(bounds) < math.inf:
        return converted, np.array(bounds)
    good = np.isfinite(converted)
    if not good.all() and (minus_infinity or non_finite):
        good |= array == -np.inf if minus_infinity else ~np.isfinite(array)
    if not good.all():
        index, place = _first(~good, pointer)
        value = float(array[index])
        if np.isfinite(value):
            raise Overflow.of(place, f"a number that {dtype.name} can hold", value, wider(dtype))
        raise InvalidArray.of(place, "a finite number", value)
    return converted, np.array([bound if bound < math.inf else math.inf for bound in bounds])


def norms(array: np.ndarray, batch_axis: int | None = None) -> list[float]:
    """The `norm` of each batch entry, whose bits no other entry changes. batch_axis: None for one entry"""
    if batch_axis is None:
        return [norm(array)]
    entries = array if batch_axis == 0 else np.moveaxis(array, batch_axis, 0)
    size = math.prod(entries.shape[1:])
    if size > TOGETHER and not entries.flags.c_contiguous:
        return [norm(entry) for entry in entries]
    step = max(len(entries), 1) if entries.flags.c_contiguous else TOGETHER // max(size, 1)
    found: list[float] = []
    for start in range(0, len(entries), step):
        flat = np.ascontiguousarray(entries[start : start + step])
        flat = flat.reshape(len(flat), size)
        if array.dtype.itemsize >= 4:
            lost = lost_to_underflow(array.dtype, size)
            found += [math.sqrt(square + lost) for square in np.vecdot(flat, flat).tolist()]
        else:
            found += (math.sqrt(size) * _largest(flat, axis=1).astype(np.float64)).tolist()
    return found


def norm(array: np.ndarray) -> float:
    """A close upper bound on the Euclidean norm of an array as one vector.

    It is inf or NaN if a number is, and inf also if a square overflows. So a finite norm shows that all numbers are
    finite, in a third of the time of np.isfinite.
    """
    if array.dtype.itemsize >= 4:
        flat = array if array.flags.c_contiguous else array.ravel(order="K")  # no copy of what came as its transpose
        return math.sqrt(float(np.vdot(flat, flat)) + lost_to_underflow(array.dtype, array.size))
    return math.sqrt(array.size) * float(_largest(array))


def _largest(array: np.ndarray, axis: int | None = None) -> np.ndarray:
    """The largest magnitude in an array of halves, or along an axis, in its type; 0 for none.

    By bits, which are ordered as the numbers are: NumPy has no fast comparison of halves.
    """
    positive = array.view(np.int16).max(axis=axis, initial=0).astype(np.uint16)
    bits = np.maximum(positive, array.view(np.uint16).max(axis=axis, initial=0) & np.uint16(0x7FFF))
    return np.asarray(bits).view(array.dtype)


def lost_to_underflow(dtype: np.dtype, count: int) -> float:
    """A bound on what is missing in a sum of so many squares because squares of small numbers underflow."""
    return count * _TINY[dtype]


def all_finite(array: np.ndarray) -> bool:
    """True if every number is finite."""
    return norm(array) < math.inf or bool(np.isfinite(array).all())


def wider(dtype: np.dtype) -> str:
    """The hint of an overflow error: the next wider type than `dtype`."""
    return f"ask for dtype {WIDER[dtype.name]}" if dtype.name in WIDER else "no wider type is offered"


def integers(array: np.ndarray, pointer: str, shapes: dict[tuple[int, ...], str]) -> np.ndarray:
    """The array as int64. shapes: the allowed shapes, each with its text for the error

    Errors: InvalidArray, ShapeMismatch.
    """
    if array.dtype.kind not in "iu":
        raise InvalidArray.of(pointer, "integers", array)
    if array.shape not in shapes:
        raise ShapeMismatch.of(pointer, " or ".join(dict.fromkeys(shapes.values())), array)
    if array.dtype.kind == "u" and array.size and array.max() > MAX_INTEGER:
        raise InvalidArray.at(pointer, f"integers up to {MAX_INTEGER}", str(array.max()))
    return array.astype(np.int64, copy=False)


def bounded_sum(array: np.ndarray, number: int, low: int, high: int) -> np.ndarray:
    """array + number for int64 of any size, no less than low and no more than high."""
    # Sums of uint64 are right modulo 2^64, so that those within the bounds are right.
    total = (array.view(np.uint64) + np.uint64(number % 2**64)).view(np.int64)
    return np.where(array < low - number, low, np.where(array > high - number, high, total))


def per_head(array: np.ndarray, pointer: str, heads: int, dtype: np.dtype) -> np.ndarray:
    """Numbers of shape (h,) in a type. Errors: ShapeMismatch, InvalidArray, Overflow."""
    if array.shape != (heads,):
        raise ShapeMismatch.of(pointer, f"{shape((heads,))}, one number a head", array)
    return cast(array, dtype, pointer)


def per_token(array: np.ndarray, pointer: str, batch: int, length: int) -> np.ndarray:
    """Integers of shape (l,) or (b, l), as (b or 1, l). Errors: InvalidArray, ShapeMismatch."""
    shapes: dict[tuple[int, ...], str] = {one: shape(one) for one in ((length,), (batch, length))}
    return np.atleast_2d(integers(array, pointer, shapes))


def within(array: np.ndarray, low: int, high: int, pointer: str) -> None:
    """Check that all elements are from `low` to `high`. Errors: InvalidArray at the first element outside."""
    bad = (array < low) | (array > high)
    if bad.any():
        index, place = _first(bad, pointer)
        raise InvalidArray.of(place, f"an integer from {low} to {high}", int(array[index]))


def _first(bad: np.ndarray, pointer: str) -> tuple[tuple[int, ...], str]:
    """The index of the first True, and its JSON pointer. pointer: that of the array"""
    index = tuple(int(i) for i in np.argwhere(bad)[0])
    return index, pointer + "".join(f"/{i}" for i in index)
