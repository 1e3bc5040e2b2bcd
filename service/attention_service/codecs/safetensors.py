"""safetensors: a JSON header of names, types, shapes and offsets, then the bytes of all tensors.

Format: 8 bytes little-endian length of the header, the header, the data. Tensors are views of the body, no copies.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from json import JSONDecoder
from typing import Any, Final, NamedTuple

import numpy as np

from attention_service.codecs.base import Codec
from attention_service.codecs.chunks import Chunk, Encoded, array_chunks, encoded, measured
from attention_service.codecs.decoded import Body, Decoded, NotQuick
from attention_service.codecs.element_types import SAFETENSORS_TYPES
from attention_service.codecs.json.limits import MAX_DEPTH, MAX_LISTS, has_too_many_lists
from attention_service.codecs.json.memory import decode_bound
from attention_service.codecs.json.writer import JSONText, chunks
from attention_service.codecs.named_tensors import (
    MAX_TEXT,
    REQUEST,
    RESPONSE,
    check_count,
    check_not_lfs,
    dotted_tensors,
    elements,
    plain_fields,
    request_fields,
    split_answer,
    unread_names,
)
from attention_service.codecs.shapes import BESIDE_0, MAX_RANK, shape_as_given, shape_of
from attention_service.errors import DuplicateKey, InvalidTensors, TooDeep, describe, quote

NAMES: Final = {dtype: name for name, dtype in SAFETENSORS_TYPES.items()}
METADATA: Final = "__metadata__"
BOOLEAN: Final = NAMES[np.dtype(np.bool_)]
# A header names at most MAX_TENSORS tensors in about 100 bytes each; the JSON text stands in it too.
MAX_HEADER: Final = 8 * 2**20
# Bytes of a header, and of booleans, each of which is looked at, that are decoded within a few milliseconds.
QUICK_HEADER: Final = 2**17
QUICK_BOOLEANS: Final = 2**22


class Entry(NamedTuple):
    """A tensor in a file. begin, end: bytes after the header; dtype: its code in the format"""

    begin: int
    end: int
    name: str
    dtype: str
    shape: tuple[int, ...]


class SafetensorsCodec(Codec):
    """Tensors under dotted names, all other fields as JSON text in the metadata."""

    media_type = "application/vnd.safetensors"
    decode_inline = math.inf

    def decode(self, body: Body, limit: int) -> Decoded:
        """The fields of a request.

        Errors: InvalidTensors, DuplicateKey, TooDeep, InvalidRequest, FieldConflict, and those of the JSON text.
        """
        return self._decode(body)

    def _decode_or_stop(self, body: Body, limit: int) -> Decoded:
        """Like `decode`. Errors: also NotQuick, for a long header or many booleans: other tensors are only views."""
        return self._decode(body, quickly=True)

    def _decode(self, body: Body, *, quickly: bool = False) -> Decoded:
        start = 8 + header_length(body[:8], len(body), MAX_HEADER)
        header, data = memoryview(body)[8:start], memoryview(body)[start:]
        if quickly and start > QUICK_HEADER:
            raise NotQuick
        if has_too_many_lists(header):
            raise InvalidTensors.at("", f"a header of at most {MAX_LISTS} arrays and objects", "more")
        header_entries = parse_header(header)
        metadata = header_entries.pop(METADATA, {})
        text = _text(metadata)
        check_count(len(header_entries))
        entries = checked_entries(header_entries, len(data))
        if quickly and sum(entry.end - entry.begin for entry in entries if entry.dtype == BOOLEAN) > QUICK_BOOLEANS:
            raise NotQuick
        unread = unread_names([(f"/{METADATA}", metadata)], f"the JSON text {REQUEST} of {METADATA}")
        return request_fields(read_tensors(entries, data), text, quickly=quickly)._replace(unread=unread)

    def decode_bound(self, length: int, limit: int) -> int:
        """Upper bound of the memory for decoding any body of `length` bytes."""
        return length + _header_bytes(min(length, MAX_HEADER))

    def decode_bytes(self, body: Body, limit: int) -> int:
        """A closer upper bound, by the length of the header. Tensors are not copied."""
        return len(body) + _header_bytes(min(int.from_bytes(body[:8], "little"), len(body), MAX_HEADER))

    def encode(self, answer: Mapping[str, Any], request: Decoded) -> Encoded:
        """The answer: the header, then the memory of each array as it is."""
        tensors, fields = split_answer(answer)
        return encoded(self.media_type, *file_chunks(tensors, {RESPONSE: JSONText(fields)}))


def file_chunks(tensors: Mapping[str, np.ndarray], metadata: Mapping[str, Any]) -> tuple[Iterator[Chunk], int]:
    """The chunks of a file of these tensors, and its length in bytes. metadata: strings or `JSONText`

    An empty mapping makes none. Wide elements come first, so that all are aligned.
    """
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].itemsize))
    header: dict[str, Any] = {METADATA: metadata} if metadata else {}
    end = 0
    for name, tensor in ordered.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": (begin, end)}
    text, length = measured(partial(chunks, header))
    padding = -length % 8
    prefix = (length + padding).to_bytes(8, "little")
    content = chain([prefix], text, [b" " * padding], *map(array_chunks, ordered.values()))
    return content, 8 + length + padding + end


def request_bytes(fields: Mapping[str, Any]) -> bytes:
    """A request as a file: its arrays as tensors, all other fields as JSON text in the metadata."""
    return b"".join(file_chunks(dict(dotted_tensors(fields)), {REQUEST: JSONText(plain_fields(fields))})[0])


def _header_bytes(length: int) -> int:
    """Memory for parsing a header, no more than a JSON body of its length takes, and the JSON text within."""
    return decode_bound(length) + decode_bound(min(length, MAX_TEXT))


def header_length(start: Body, size: int, longest: int) -> int:
    """The length of the header, from the first 8 bytes of a file of `size` bytes. Errors: InvalidTensors."""
    if len(start) < 8:
        raise InvalidTensors.at("", "8 bytes of header length", "fewer than 8 bytes")
    length = int.from_bytes(start, "little")
    most = min(longest, size - 8)
    check_not_lfs(start)
    if length > most:
        raise InvalidTensors.at(
            "", f"a header of at most {most} bytes", f"a truncated file, or a header of {length} bytes"
        )
    return length


def parse_header(text: Body) -> dict[str, Any]:
    """The object in a header, not checked any further. Errors: InvalidTensors, DuplicateKey, TooDeep."""
    try:
        header = HEADER.decode(str(text, "utf-8"))
    except UnicodeEncodeError:
        raise InvalidTensors.at("", "a header in JSON", "half of a surrogate pair, which is no text") from None
    except ValueError as error:
        raise InvalidTensors.at(
            "", "a header in JSON", f"text that is not valid JSON: {quote(str(error), 80)}"
        ) from None
    except RecursionError:
        raise TooDeep.at("", f"at most {MAX_DEPTH} levels in the header", "a header nested too deeply") from None
    if not isinstance(header, dict):
        raise InvalidTensors.at("", "a header that is an object", f"no object, {describe(header)}")
    return header


def checked_entries(header: Mapping[str, Any], available: int) -> list[Entry]:
    """The tensors of a header without its metadata, in the order of their bytes, whatever their types.

    available: bytes after the header, which the tensors fill without gaps

    Errors: InvalidTensors.
    """
    entries = sorted(_entry(name, entry, available) for name, entry in header.items())
    at = 0
    for begin, end, name, *_ in entries:
        if begin != at:  # so nothing is hidden or shared, as the format has it
            raise InvalidTensors.at("", f"a tensor that begins at byte {at}", f"{quote(name)} at byte {begin}")
        at = end
    if at != available:
        raise InvalidTensors.at("", f"{at} bytes of data, as the header says", f"{available} bytes, longer than that")
    return entries


def read_tensors(entries: Iterable[Entry], data: memoryview) -> dict[str, np.ndarray]:
    """The tensors as views of the bytes after the header. Errors: InvalidTensors."""
    return {
        name: elements(data[begin:end], dtype_of(name, code), name).reshape(shape)
        for begin, end, name, code, shape in entries
    }


def dtype_of(name: str, code: Any) -> np.dtype:
    """The type of a tensor by its code. Errors: InvalidTensors for a type that NumPy has not."""
    if not isinstance(code, str) or code not in SAFETENSORS_TYPES:
        raise InvalidTensors.at("", f"{quote(name)} to be one of {', '.join(SAFETENSORS_TYPES)}", describe(code))
    return SAFETENSORS_TYPES[code]


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of the header. Errors: DuplicateKey; UnicodeEncodeError for half of a surrogate pair."""
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


def _entry(name: str, entry: Any, available: int) -> Entry:
    """A tensor, whose type, shape and offsets are checked against each other. Errors: InvalidTensors."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise InvalidTensors.at("", f"dtype, shape and data_offsets of {quote(name)}", describe(entry))
    code, shape, offsets = entry["dtype"], shape_of(entry["shape"]), entry["data_offsets"]
    if shape is None:
        expected = f"at most {MAX_RANK} axes of {quote(name)}{BESIDE_0}"
        raise InvalidTensors.at("", expected, shape_as_given(entry["shape"]))
    match offsets:
        case [begin, end] if type(begin) is type(end) is int and 0 <= begin <= end <= available:
            is_other = isinstance(code, str) and code not in SAFETENSORS_TYPES  # of any size
            if is_other or end - begin == math.prod(shape) * dtype_of(name, code).itemsize:
                return Entry(begin, end, name, code, shape)
    needed = math.prod(shape) * dtype_of(name, code).itemsize
    got = "offsets that do not agree with its shape and type, or truncated data"
    raise InvalidTensors.at("", f"{needed} bytes of {quote(name)} within {available}", got)
