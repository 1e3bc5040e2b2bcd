"""JSON from arrays, straight from their memory: as nested lists, null for what is not finite, or in base64."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import orjson
from numpy import ndarray
from orjson import OPT_SERIALIZE_NUMPY as NUMPY

from service.codecs import typed_arrays as encoded
from service.codecs.chunks import Chunk, Encoded, contiguous, in_one, streamed
from service.codecs.decoded import Decoded
from service.codecs.json.limits import list_count

MEDIA_TYPE: Final = "application/json"
# Numbers and characters that orjson gets at once: less than a millisecond of work, and less than a chunk of text, as
# a number takes at most 24 bytes and its brackets and comma 7. orjson aborts the process where it gets no memory.
AT_ONCE: Final = 2**13
# What is small without counting more than numbers.
SMALL: Final = 2**10
# What a list of an array counts beside its numbers, an element of another list or of an object, and how many of these
# orjson gets at once.
LIST: Final = 2
EACH: Final = 8
GROUP: Final = AT_ONCE // EACH // 2
# The bytes of the longest number with a comma, by the bytes of its type: -2.2250738585072014e-308, -1234567900000000.0
LONGEST: Final = {8: 25, 4: 20, 2: 20, 1: 6}


def encode(answer: Mapping[str, Any], request: Decoded) -> Encoded:
    """The answer as JSON: one chunk if it is small.

    Arrays are nested lists, or typed arrays (dtype, shape, data) if the `encoding` of the request is base64.
    """
    base64 = request.fields.get("encoding") == "base64"
    if not is_small(answer):
        return streamed(MEDIA_TYPE, chunks(answer, base64=base64))
    return in_one(MEDIA_TYPE, [orjson.dumps(_typed(answer) if base64 else answer, _contiguous, NUMPY)])


def is_small(answer: Mapping[str, Any]) -> bool:
    """True if one call of orjson may encode the whole answer."""
    size = 0
    for name, value in answer.items():
        if type(value) is ndarray:
            size += value.size
        elif name != "metadata":  # always small
            size += weight(value)
    return size <= SMALL or weight(answer) <= AT_ONCE


def dumps(value: Any) -> bytes:
    """A small value as JSON."""
    return orjson.dumps(value, _contiguous, NUMPY)


def weight(value: Any) -> int:
    """The number of numbers and characters in a value, roughly; counting stops above `AT_ONCE`."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, np.ndarray):
        return value.size + LIST * list_count(value.shape)
    if not isinstance(value, Mapping | list | tuple):
        return 1
    total = EACH * len(value)
    if total > AT_ONCE:
        return total
    items = value.values() if isinstance(value, Mapping) else value
    if set(map(type, items)) == {str}:
        return total + sum(map(len, items))
    for item in items:
        total += weight(item)
        if total > AT_ONCE:
            break
    return total


def chunks(value: Any, *, base64: bool = False) -> Iterator[Chunk]:
    """A value of any size as JSON."""
    if base64 and isinstance(value, np.ndarray):
        yield from encoded.chunks(value)
    elif base64 and isinstance(value, Mapping):
        yield from members(value, base64=True)
        yield b"}"
    elif weight(value) <= AT_ONCE:
        yield dumps(value)
    elif isinstance(value, np.ndarray):
        yield from nested(value)
    elif isinstance(value, Mapping):
        yield from members(value)
        yield b"}"
    elif isinstance(value, str):
        yield from _long(value)
    else:
        yield from _many(value)


def members(value: Mapping[str, Any], *, base64: bool = False) -> Iterator[Chunk]:
    """An object as JSON, without its closing bracket."""
    before = b"{"
    for name, item in value.items():
        yield before + orjson.dumps(name) + b":"
        yield from chunks(item, base64=base64)
        before = b","
    if not value:
        yield before


def nested(array: np.ndarray) -> Iterator[Chunk]:
    """An array as nested lists, a few rows at a time."""
    if weight(array) <= AT_ONCE:
        yield dumps(array)
        return
    row = weight(array[0])
    before = b"["
    if row > AT_ONCE:
        for item in array:
            yield before
            yield from nested(item)
            before = b","
    else:
        step = AT_ONCE // row
        for start in range(0, len(array), step):
            yield before
            yield memoryview(dumps(array[start : start + step]))[1:-1]  # without its own brackets
            before = b","
    yield b"]"


def flat(array: np.ndarray) -> Iterator[Chunk]:
    """An array as one list of its elements."""
    before = b"["
    for part in contiguous(array, AT_ONCE):
        yield before
        yield memoryview(dumps(part))[1:-1]
        before = b","
    yield b"]" if array.size else b"[]"


def longest(array: np.ndarray) -> int:
    """An upper bound of the bytes that `flat` makes of an array."""
    return LONGEST[array.itemsize] * array.size + 2


def _long(text: str) -> Iterator[Chunk]:
    """A string that is too long for one call of orjson."""
    before = b'"'
    for start in range(0, len(text), AT_ONCE):
        yield before
        yield memoryview(orjson.dumps(text[start : start + AT_ONCE]))[1:-1]
        before = b""
    yield b'"'


def _many(items: list[Any] | tuple[Any, ...]) -> Iterator[Chunk]:
    """A long list, or a list that holds long strings."""
    before = b"["
    for start in range(0, len(items), GROUP):
        group = items[start : start + GROUP]
        if weight(group) <= AT_ONCE:
            yield before
            yield memoryview(dumps(group))[1:-1]
            before = b","
            continue
        for item in group:
            yield before
            yield from chunks(item)
            before = b","
    yield b"]"


def _typed(value: Any) -> Any:
    """A value of the answer, arrays in it and in its objects as typed ones."""
    if isinstance(value, Mapping):
        return {name: _typed(item) for name, item in value.items()}
    return encoded.encode(value) if isinstance(value, np.ndarray) else value


def _contiguous(value: Any) -> Any:
    """What orjson can write of what it cannot: it knows neither strides nor bfloat16."""
    if not isinstance(value, np.ndarray):
        raise TypeError(type(value).__name__)
    return np.ascontiguousarray(value if value.dtype.kind != "V" else value.astype(np.float32))  # V: bfloat16
