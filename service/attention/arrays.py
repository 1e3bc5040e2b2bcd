"""Numbers as they are computed with: of one type, all finite."""

from __future__ import annotations

import numpy as np

from service.errors import InvalidArray, Overflow

WIDER = {"float16": "float32", "bfloat16": "float32", "float32": "float64"}


def cast(array: np.ndarray, dtype: np.dtype, pointer: str, *, minus_infinity: bool = False) -> np.ndarray:
    """The array in `dtype`, not copied where it has it already.

    minus_infinity: whether -inf is a number here, as it is in an additive bias.
    Errors: InvalidArray for what is no finite number, Overflow for what `dtype` cannot hold.
    """
    if array.dtype.kind not in "fiu":
        raise InvalidArray.at(pointer, "numbers", array)
    with np.errstate(over="ignore"):
        converted = array.astype(dtype, copy=False)
    good = np.isfinite(converted)
    if minus_infinity and not good.all():
        good |= array == -np.inf
    if not good.all():
        index = tuple(int(i) for i in np.argwhere(~good)[0])
        place = "".join(f"/{i}" for i in index)
        value = array[index].item()
        if np.isfinite(value):
            raise Overflow.at(pointer + place, f"a number that {dtype} can hold", value, wider(dtype))
        raise InvalidArray.at(pointer + place, "a finite number", value)
    return converted


def wider(dtype: np.dtype) -> str:
    """The advice that goes with an overflow."""
    return f"ask for dtype {WIDER[dtype.name]}" if dtype.name in WIDER else "no wider type is offered"
