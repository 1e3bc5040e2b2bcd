"""safetensors: a JSON header of names, types, shapes and offsets, then the bytes of all tensors.

Format: 8 bytes little-endian length of the header, the header, the data. Tensors are views of the body, no copies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from itertools import chain
from json import JSONDecoder
from typing import Any, Final

import ml_dtypes
import numpy as np

from attention_service.codecs.base import Codec
from attention_service.codecs.chunks import Encoded, array_chunks, encoded, measured
from attention_service.codecs.decoded import Body, Decoded
from attention_service.codecs.json.limits import MAX_DEPTH, MAX_LISTS, has_too_many_lists
from attention_service.codecs.json.memory import decode_bound
from attention_service.codecs.json.writer import Text, chunks
from attention_service.codecs.named_tensors import (
    MAX_TEXT,
    REQUEST,
    RESPONSE,
    check_count,
    elements,
    request_fields,
    split_answer,
)
from attention_service.codecs.shapes import MAX_RANK, shape_of
from attention_service.errors import DuplicateKey, InvalidTensors, TooDeep, describe, quote

# Types of tensors, by their names in this format.
DTYPES: Final[dict[str, np.dtype]] = {
    "BOOL": np.dtype(np.bool_),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
}
NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
METADATA: Final = "__metadata__"
# A header names at most MAX_TENSORS tensors in about 100 bytes each; the JSON text stands in it too.
MAX_HEADER: Final = 8 * 2**20


class SafetensorsCodec(Codec):
    """Tensors under dotted names, all other fields as JSON text in the metadata."""

    media_type = "application/vnd.safetensors"
    decode_inline = 2**22

    def decode(self, body: Body, limit: int) -> Decoded:
        """The fields of a request.

        Errors: InvalidTensors, DuplicateKey, TooDeep, InvalidRequest, FieldConflict, and those of the JSON text.
        """
        header, data = _split(body)
        text = _text(header.pop(METADATA, {}))
        check_count(len(header))
        tensors: dict[str, np.ndarray] = {}
        at = 0
        for begin, end, name, dtype, shape in sorted(_entry(*item, len(data)) for item in header.items()):
            if begin != at:  # so nothing is hidden or shared, as the format has it
                raise InvalidTensors.at("", f"a tensor that begins at byte {at}", f"one at {begin}")
            tensors[name] = elements(data[begin:end], DTYPES[dtype], name).reshape(shape)
            at = end
        if at != len(data):
            raise InvalidTensors.at("", f"{at} bytes of data, as the header says", f"{len(data)} bytes")
        return request_fields(tensors, text)

    def decode_bound(self, length: int, limit: int) -> int:
        """Upper bound of the memory for decoding any body of `length` bytes."""
        return length + _header_bytes(min(length, MAX_HEADER))

    def decode_bytes(self, body: Body, limit: int) -> int:
        """A closer upper bound, by the length of the header. Tensors are not copied."""
        return len(body) + _header_bytes(min(int.from_bytes(body[:8], "little"), len(body), MAX_HEADER))

    def encode(self, answer: Mapping[str, Any], request: Decoded) -> Encoded:
        """The answer: the header, then the memory of each array as it is."""
        tensors, fields = split_answer(answer)
        header: dict[str, Any] = {METADATA: {RESPONSE: Text(fields)}}
        offset = 0
        for name, tensor in tensors.items():
            end = offset + tensor.nbytes
            header[name] = {"dtype": NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": (offset, end)}
            offset = end
        text, length = measured(partial(chunks, header))
        padding = -length % 8  # so that the data of most tensors is aligned
        prefix = (length + padding).to_bytes(8, "little")
        content = chain([prefix], text, [b" " * padding], *map(array_chunks, tensors.values()))
        return encoded(self.media_type, content, 8 + length + padding + offset)


def _header_bytes(length: int) -> int:
    """Memory for parsing a header, no more than a JSON body of its length takes, and the JSON text within."""
    return decode_bound(length) + decode_bound(min(length, MAX_TEXT))


def _split(body: Body) -> tuple[dict[str, Any], memoryview]:
    """The header and the data. Errors: InvalidTensors, DuplicateKey, TooDeep."""
    if len(body) < 8:
        raise InvalidTensors.at("", "8 bytes of header length", f"{len(body)} bytes")
    length = int.from_bytes(body[:8], "little")
    longest = min(len(body) - 8, MAX_HEADER)
    if length > longest:
        raise InvalidTensors.at("", f"a header of at most {longest} bytes", f"one of {length}")
    text = memoryview(body)[8 : 8 + length]
    if has_too_many_lists(text):
        raise InvalidTensors.at("", f"a header of at most {MAX_LISTS} arrays and objects", "more")
    try:
        header = HEADER.decode(str(text, "utf-8"))
    except ValueError as error:
        raise InvalidTensors.at("", "a header in JSON", quote(str(error), 80)) from None
    except RecursionError:
        raise TooDeep.at("", f"at most {MAX_DEPTH} levels in the header", "more") from None
    if not isinstance(header, dict):
        raise InvalidTensors.at("", "a header that is an object", describe(header))
    return header, memoryview(body)[8 + length :]


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of the header. Errors: DuplicateKey; UnicodeEncodeError, a ValueError, for half a surrogate."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise DuplicateKey.at("", f"{quote(key)} once in the header", "the same key again")
        found[key] = value
        for text in (key, value):
            if isinstance(text, str):
                text.encode()
    return found


HEADER: Final = JSONDecoder(object_pairs_hook=_object)


def _text(metadata: Any) -> bytes | None:
    """The JSON text in the metadata, which the format lets hold strings only. Errors: InvalidTensors."""
    if not isinstance(metadata, dict):
        raise InvalidTensors.of("", f"{METADATA} to be an object", metadata)
    for value in metadata.values():
        if not isinstance(value, str):
            raise InvalidTensors.of("", f"{METADATA} to hold strings", value)
    return metadata[REQUEST].encode() if REQUEST in metadata else None


def _entry(name: str, entry: Any, available: int) -> tuple[int, int, str, str, tuple[int, ...]]:
    """Where a tensor begins and ends, its name, dtype and shape, checked against each other. Errors: InvalidTensors."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise InvalidTensors.at("", f"dtype, shape and data_offsets of {quote(name)}", describe(entry))
    code, shape, offsets = entry["dtype"], shape_of(entry["shape"]), entry["data_offsets"]
    if not isinstance(code, str) or code not in DTYPES:
        raise InvalidTensors.at("", f"{quote(name)} to be one of {', '.join(DTYPES)}", describe(code))
    if shape is None:
        raise InvalidTensors.of("", f"at most {MAX_RANK} axes of {quote(name)}", entry["shape"])
    needed = math.prod(shape) * DTYPES[code].itemsize
    match offsets:
        case [begin, end] if type(begin) is type(end) is int and 0 <= begin <= end <= available:
            if end - begin == needed:
                return begin, end, name, code, shape
    raise InvalidTensors.of("", f"{needed} bytes of {quote(name)} within {available}", offsets)
