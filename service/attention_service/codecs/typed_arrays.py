"""Typed arrays inside JSON: {dtype, shape, data}, data being base64 of little-endian row-major bytes."""

from __future__ import annotations

import binascii
import math
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import orjson

from attention_service.codecs.chunks import MAX_CHUNK, Chunk, array_chunks
from attention_service.codecs.decoded import text_of
from attention_service.codecs.element_types import JSON_TYPES
from attention_service.codecs.shapes import BESIDE_0, MAX_RANK, shape_as_given, shape_of
from attention_service.errors import InvalidArray, InvalidValue, shape

NAMES: Final = {dtype: name for name, dtype in JSON_TYPES.items()}
# Bytes of an array that become one chunk of text: three make four.
BASE64: Final = MAX_CHUNK // 4 * 3
KEYS: Final = {"dtype", "shape", "data"}


def decode(fields: dict[str, Any], pointer: str) -> np.ndarray:
    """The array that a typed array describes, read-only. Errors: InvalidValue, InvalidArray."""
    name, lengths, data = text_of(fields["dtype"]), shape_of(fields["shape"]), text_of(fields["data"])
    if lengths is None:
        expected = f"at most {MAX_RANK} lengths of axes{BESIDE_0}"
        raise InvalidValue.at(f"{pointer}/shape", expected, shape_as_given(fields["shape"]))
    if name is None or name not in JSON_TYPES:
        raise InvalidValue.of(f"{pointer}/dtype", f"one of {', '.join(JSON_TYPES)}", fields["dtype"])
    if data is None:
        raise InvalidValue.of(f"{pointer}/data", "a base64 string", fields["data"])
    try:
        content = binascii.a2b_base64(data, strict_mode=True)
    except ValueError as error:  # binascii.Error is one, and so is text beyond ASCII
        raise InvalidArray.at(f"{pointer}/data", "base64", f"text that is none: {error}") from None
    dtype = JSON_TYPES[name]
    needed = math.prod(lengths) * dtype.itemsize
    if len(content) != needed:
        raise InvalidArray.at(f"{pointer}/data", f"{needed} bytes of {name} {shape(lengths)}", f"{len(content)} bytes")
    if name == "bool" and (others := content.strip(b"\0\1")):
        raise InvalidArray.at(f"{pointer}/data", "bytes of 0 and 1 for bool", f"byte {others[0]}")
    return np.frombuffer(content, dtype).reshape(lengths)


def chunks(array: np.ndarray) -> Iterator[Chunk]:
    """The JSON of an array of any size as a typed array, in chunks."""
    array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    opening = orjson.dumps({"dtype": NAMES[array.dtype], "shape": list(array.shape)})
    yield opening[:-1] + b',"data":"'
    left = b""
    for part in array_chunks(array, BASE64):
        content = left + part if left else part
        whole = len(content) // 3 * 3
        yield binascii.b2a_base64(content[:whole], newline=False)
        left = bytes(content[whole:])
    yield binascii.b2a_base64(left, newline=False) + b'"}'
