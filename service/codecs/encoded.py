"""Typed arrays inside JSON: {dtype, shape, data}, data being base64 of little-endian row-major bytes."""

from __future__ import annotations

import binascii
import math
from typing import Any, Final

import ml_dtypes
import numpy as np

from service.codecs.sizes import MAX_RANK, is_shape
from service.errors import InvalidArray, InvalidValue, quote, shape

DTYPES: Final[dict[str, np.dtype]] = {
    np.dtype(kind).name: np.dtype(kind).newbyteorder("<")
    for kind in (np.bool_, np.int32, np.int64, np.float16, ml_dtypes.bfloat16, np.float32, np.float64)
}
KEYS: Final = {"dtype", "shape", "data"}


def is_one(fields: dict[str, Any]) -> bool:
    """Whether an object has the keys of a typed array."""
    return fields.keys() == KEYS


def decode(fields: dict[str, Any], pointer: str) -> np.ndarray:
    """The array that an object describes, read-only. Errors: InvalidValue, InvalidArray."""
    name, sizes, data = fields["dtype"], _sizes(fields["shape"], f"{pointer}/shape"), fields["data"]
    if not isinstance(name, str) or name not in DTYPES:
        raise InvalidValue.of(f"{pointer}/dtype", f"one of {', '.join(DTYPES)}", name)
    if not isinstance(data, str):
        raise InvalidValue.of(f"{pointer}/data", "a base64 string", data)
    try:
        content = binascii.a2b_base64(data, strict_mode=True)
    except ValueError as error:  # binascii.Error is one, and so is text beyond ASCII
        raise InvalidArray.at(f"{pointer}/data", "base64", quote(str(error), 60)) from None
    dtype = DTYPES[name]
    needed = math.prod(sizes) * dtype.itemsize
    if len(content) != needed:
        raise InvalidArray.at(f"{pointer}/data", f"{needed} bytes of {name} {shape(sizes)}", f"{len(content)} bytes")
    if name == "bool" and content.strip(b"\0\1"):
        raise InvalidArray.at(f"{pointer}/data", "bytes of 0 and 1 for bool", "others")
    return np.frombuffer(content, dtype).reshape(sizes)


def encode(array: np.ndarray) -> dict[str, Any]:
    """The object for an array."""
    content = binascii.b2a_base64(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes(), newline=False)
    return {"dtype": array.dtype.name, "shape": list(array.shape), "data": content.decode("ascii")}


def _sizes(given: Any, pointer: str) -> tuple[int, ...]:
    sizes = given.tolist() if isinstance(given, np.ndarray) else given
    if not isinstance(sizes, list) or not is_shape(sizes):
        raise InvalidValue.of(pointer, f"at most {MAX_RANK} lengths of axes", given)
    return tuple(sizes)
