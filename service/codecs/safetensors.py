"""safetensors: a JSON header of names, types, shapes and offsets, then the bytes of all tensors.

Format: 8 bytes little-endian length of the header, the header, the data. Tensors are views of the body, no copies.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from json import JSONDecoder
from typing import Any, Final

import ml_dtypes
import numpy as np
import orjson

from service.codecs import json
from service.codecs.chunks import WORTH_SENDING, Chunk, Encoded, coalesce, in_one, memory
from service.codecs.decoded import Body, Decoded
from service.codecs.named_tensors import (
    MAX_MEMBERS,
    MAX_TEXT,
    REQUEST,
    RESPONSE,
    Rest,
    booleans,
    flattened,
    nested,
    too_many,
)
from service.codecs.sizes import MAX_RANK, is_shape
from service.errors import DuplicateKey, InvalidTensors, TooDeep, describe, quote

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
# How the header of an answer begins.
OPENING: Final = f'{{"{METADATA}":{{"{RESPONSE}":"'.encode()
# A header names at most MAX_MEMBERS tensors in about 100 bytes each; the JSON text stands in it too.
MAX_HEADER: Final = 8 * 2**20


def decode(body: Body, limit: int) -> Decoded:
    """The fields of a request. `limit` is for others: nothing is compressed here.

    Errors: InvalidTensors, DuplicateKey, TooDeep, InvalidRequest, FieldConflict, and those of the JSON text.
    """
    header, data = _split(body)
    request = _request(header.pop(METADATA, {}))
    if len(header) > MAX_MEMBERS:
        raise too_many(len(header))
    tensors, spans = {}, []
    for name, entry in header.items():
        begin, end, dtype, sizes = _entry(name, entry, len(data))
        spans.append((begin, end))
        part = data[begin:end]
        flat = booleans(part, name) if dtype == np.bool_ else np.frombuffer(part, dtype)
        tensors[name] = flat.reshape(sizes)
    _check_spans(spans, len(data))
    _check_keys(memoryview(body)[8 : len(body) - len(data)])
    return nested(tensors, None if request is None else request.encode())


def decode_bound(length: int, limit: int) -> int:
    """Upper bound of the memory for decoding any body of this length, in bytes."""
    return length + _header_bytes(min(length, MAX_HEADER))


def decode_bytes(body: Body, limit: int) -> int:
    """Upper bound of the memory for decoding this body, by the length of its header. Tensors are not copied."""
    return len(body) + _header_bytes(min(int.from_bytes(body[:8], "little"), len(body), MAX_HEADER))


def _header_bytes(length: int) -> int:
    """Memory for parsing a header, no more than a JSON body of its length takes, and the JSON text within."""
    return json.decode_bound(length) + json.decode_bound(min(length, MAX_TEXT))


def encode(answer: Mapping[str, Any], *, base64: bool = False) -> Encoded:
    """An answer: the header, then the memory of each array as it is."""
    tensors = dict(flattened(answer))
    entries: dict[str, Any] = {}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        entries[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    rest = Rest(answer)
    after = b'"},' + orjson.dumps(entries)[1:]
    length = len(OPENING) + sum(map(len, _escaped(rest))) + len(after)
    padding = -length % 8  # so that the data of most tensors is aligned
    length += padding
    header = chain([length.to_bytes(8, "little") + OPENING], _escaped(rest), [after + b" " * padding])
    if 8 + length + offset <= WORTH_SENDING:
        return in_one([*header, *(tensor.tobytes() for tensor in tensors.values())])
    return Encoded(coalesce(chain(header, *map(memory, tensors.values()))), 8 + length + offset)


def _escaped(text: Iterable[Chunk]) -> Iterator[Chunk]:
    """A text as a string of JSON, without its quotes."""
    for chunk in text:
        yield memoryview(orjson.dumps(str(chunk, "utf-8")))[1:-1]


def _split(body: Body) -> tuple[dict[str, Any], memoryview]:
    """Header and data. Errors: InvalidTensors."""
    if len(body) < 8:
        raise InvalidTensors.at("", "8 bytes of header length", f"{len(body)} bytes")
    length = int.from_bytes(body[:8], "little")
    if length > min(len(body) - 8, MAX_HEADER):
        expected = f"a header of at most {min(len(body) - 8, MAX_HEADER)} bytes"
        raise InvalidTensors.at("", expected, f"one of {length}")
    text = memoryview(body)[8 : 8 + length]
    if json.has_too_many_lists(text):
        raise InvalidTensors.at("", f"a header of at most {json.MAX_LISTS} arrays and objects", "more")
    try:
        header = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise InvalidTensors.at("", "a header in JSON", quote(str(error), 80)) from None
    if not isinstance(header, dict):
        raise InvalidTensors.at("", "a header that is an object", describe(header))
    return header, memoryview(body)[8 + length :]


def _request(metadata: Any) -> str | None:
    """The JSON text in the metadata, which the format lets hold strings only. Errors: InvalidTensors."""
    if not isinstance(metadata, dict):
        raise InvalidTensors.of("", f"{METADATA} to be an object", metadata)
    for value in metadata.values():
        if not isinstance(value, str):
            raise InvalidTensors.of("", f"{METADATA} to hold strings", value)
    return metadata.get(REQUEST)


def _check_keys(header: memoryview) -> None:
    """Refuse a header with an object that names a key twice, of which orjson takes the last value.

    Errors: DuplicateKey, and TooDeep for a value below such a key: all others have been checked.
    """
    try:
        KEYS.decode(str(header, "utf-8"))
    except RecursionError:
        raise TooDeep.at("", f"at most {json.MAX_DEPTH} levels in the header", "more") from None


def _once(pairs: list[tuple[str, Any]]) -> None:
    """Errors: DuplicateKey."""
    seen = set()
    for key, _ in pairs:
        if key in seen:
            raise DuplicateKey.at("", f"{quote(key)} once in the header", "the same key again")
        seen.add(key)


# Reads a text for its keys alone: a number of any length becomes a boolean, an object None.
KEYS: Final = JSONDecoder(object_pairs_hook=_once, parse_int=bool, parse_float=bool)


def _entry(name: str, entry: Any, available: int) -> tuple[int, int, np.dtype, tuple[int, ...]]:
    """Begin, end, type and shape of a tensor, checked against each other. Errors: InvalidTensors."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise InvalidTensors.at("", f"dtype, shape and data_offsets of {quote(name)}", describe(entry))
    code, sizes, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(code, str) or code not in DTYPES:
        raise InvalidTensors.at("", f"{quote(name)} to be one of {', '.join(DTYPES)}", describe(code))
    if not isinstance(sizes, list) or not is_shape(sizes):
        raise InvalidTensors.at("", f"at most {MAX_RANK} axes of {quote(name)}", describe(sizes))
    needed = math.prod(sizes) * DTYPES[code].itemsize
    span = f"{needed} bytes of {quote(name)} within {available}"
    if not _whole(offsets) or len(offsets) != 2:
        raise InvalidTensors.at("", span, describe(offsets))
    if offsets[1] > available or offsets[1] - offsets[0] != needed:
        raise InvalidTensors.at("", span, quote(str(offsets)))
    return offsets[0], offsets[1], DTYPES[code], tuple(sizes)


def _whole(numbers: Any) -> bool:
    return isinstance(numbers, list) and all(type(number) is int and number >= 0 for number in numbers)


def _check_spans(spans: list[tuple[int, int]], available: int) -> None:
    """Tensors lie side by side, without holes: so the format has it, and nothing is hidden or shared."""
    place = 0
    for begin, end in sorted(spans):
        if begin != place:
            raise InvalidTensors.at("", f"a tensor that begins at byte {place}", f"one at {begin}")
        place = end
    if place != available:
        raise InvalidTensors.at("", f"{place} bytes of data, as the header says", f"{available} bytes")
