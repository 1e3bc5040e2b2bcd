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
from service.codecs.chunks import WORTH_SENDING, Chunk, Encoded, in_one, memory, streamed
from service.codecs.decoded import Body, Decoded
from service.codecs.named_tensors import (
    MAX_TEXT,
    REQUEST,
    RESPONSE,
    AnswerText,
    answer_tensors,
    booleans,
    check_count,
    request_fields,
)
from service.codecs.shapes import MAX_RANK, shape_of
from service.errors import DuplicateKey, InvalidTensors, TooDeep, describe, quote

MEDIA_TYPE: Final = "application/vnd.safetensors"
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
# A header names at most MAX_TENSORS tensors in about 100 bytes each; the JSON text stands in it too.
MAX_HEADER: Final = 8 * 2**20


def decode(body: Body, limit: int) -> Decoded:
    """The fields of a request. `limit` is for other codecs: nothing is compressed here.

    Errors: InvalidTensors, DuplicateKey, TooDeep, InvalidRequest, FieldConflict, and those of the JSON text.
    """
    header, data = _split(body)
    text = _text(header.pop(METADATA, {}))
    check_count(len(header))
    entries = sorted(_entry(name, entry, len(data)) for name, entry in header.items())
    _check_offsets(entries, len(data))
    tensors = {}
    for begin, end, name, code, shape in entries:
        content, dtype = data[begin:end], DTYPES[code]
        flat = booleans(content, name) if dtype == np.bool_ else np.frombuffer(content, dtype)
        tensors[name] = flat.reshape(shape)
    return request_fields(tensors, text)


def decode_bound(length: int, limit: int) -> int:
    """Upper bound of the memory for decoding any body of this length, in bytes."""
    return length + _header_bytes(min(length, MAX_HEADER))


def decode_bytes(body: Body, limit: int) -> int:
    """Upper bound of the memory for decoding this body, by the length of its header. Tensors are not copied."""
    return len(body) + _header_bytes(min(int.from_bytes(body[:8], "little"), len(body), MAX_HEADER))


def _header_bytes(length: int) -> int:
    """Memory for parsing a header, no more than a JSON body of its length takes, and the JSON text within."""
    return json.decode_bound(length) + json.decode_bound(min(length, MAX_TEXT))


def _split(body: Body) -> tuple[dict[str, Any], memoryview]:
    """The header and the data. Errors: InvalidTensors, DuplicateKey, TooDeep."""
    if len(body) < 8:
        raise InvalidTensors.at("", "8 bytes of header length", f"{len(body)} bytes")
    length = int.from_bytes(body[:8], "little")
    longest = min(len(body) - 8, MAX_HEADER)
    if length > longest:
        raise InvalidTensors.at("", f"a header of at most {longest} bytes", f"one of {length}")
    text = memoryview(body)[8 : 8 + length]
    if json.has_too_many_lists(text):
        raise InvalidTensors.at("", f"a header of at most {json.MAX_LISTS} arrays and objects", "more")
    try:
        header = HEADER.decode(str(text, "utf-8"))
    except ValueError as error:
        raise InvalidTensors.at("", "a header in JSON", quote(str(error), 80)) from None
    except RecursionError:
        raise TooDeep.at("", f"at most {json.MAX_DEPTH} levels in the header", "more") from None
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


def _check_offsets(entries: list[tuple[int, int, str, str, tuple[int, ...]]], available: int) -> None:
    """Refuse tensors that do not lie side by side, as the format has it: nothing is hidden or shared.

    Errors: InvalidTensors.
    """
    at = 0
    for begin, end, *_ in entries:
        if begin != at:
            raise InvalidTensors.at("", f"a tensor that begins at byte {at}", f"one at {begin}")
        at = end
    if at != available:
        raise InvalidTensors.at("", f"{at} bytes of data, as the header says", f"{available} bytes")


def encode(answer: Mapping[str, Any], request: Decoded) -> Encoded:
    """An answer: the header, then the memory of each array as it is."""
    tensors = dict(answer_tensors(answer))
    entries: dict[str, Any] = {}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        entries[name] = {"dtype": NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": (offset, end)}
        offset = end
    text = AnswerText(answer, tensors)
    after = b'"},' + orjson.dumps(entries)[1:]
    length = len(OPENING) + sum(map(len, _escaped(text))) + len(after)
    padding = -length % 8  # so that the data of most tensors is aligned
    length += padding
    header = chain([length.to_bytes(8, "little") + OPENING], _escaped(text), [after + b" " * padding])
    chunks = chain(header, *map(memory, tensors.values()))
    if 8 + length + offset <= WORTH_SENDING:
        return in_one(MEDIA_TYPE, chunks)
    return streamed(MEDIA_TYPE, chunks, 8 + length + offset)


def _escaped(text: Iterable[Chunk]) -> Iterator[Chunk]:
    """A text as a string of JSON, without its quotes."""
    for chunk in text:
        yield memoryview(orjson.dumps(str(chunk, "utf-8")))[1:-1]
