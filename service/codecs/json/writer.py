"""Answers as JSON, straight from the memory of their arrays: nested lists with null for what is not finite, or base64.

orjson writes small values whole. Larger ones are cut into pieces that it writes one after the other, so that it neither
blocks the event loop nor needs memory for the whole text: it aborts the process where it gets none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import orjson
from orjson import OPT_SERIALIZE_NUMPY as NUMPY

from service.codecs import typed_arrays
from service.codecs.chunks import Chunk, Encoded, contiguous, in_one, streamed
from service.codecs.decoded import Decoded
from service.codecs.json.limits import list_count

MEDIA_TYPE: Final = "application/json"
# Numbers and characters that orjson gets at once: less than a millisecond of work, and less than a chunk of text, as
# a number takes at most 24 bytes and its brackets and comma 7.
AT_ONCE: Final = 2**13
# What a list of an array, and an element of another list or of an object, adds to the cost; and how many such elements
# orjson gets at once.
LIST: Final = 2
ELEMENT: Final = 8
GROUP: Final = AT_ONCE // ELEMENT // 2
SCALARS: Final = frozenset((int, float, bool, type(None)))
# The bytes of the longest number with a comma, by the bytes of its type: -2.2250738585072014e-308, -1234567900000000.0
LONGEST: Final = {8: 25, 4: 20, 2: 20, 1: 6}


def encode(answer: Mapping[str, Any], request: Decoded) -> Encoded:
    """The answer as JSON: one chunk if it is small.

    Arrays are nested lists, or typed arrays (dtype, shape, data) if the `encoding` of the request is base64.
    """
    base64 = request.fields.get("encoding") == "base64"
    if cost(answer) > AT_ONCE:
        return streamed(MEDIA_TYPE, chunks(answer, base64=base64))
    return in_one(MEDIA_TYPE, [_dumps(_typed(answer) if base64 else answer)])


def cost(value: Any) -> int:
    """The number of numbers and characters in a value, roughly; counting stops above `AT_ONCE`."""
    if isinstance(value, np.ndarray):
        return value.size + LIST * list_count(value.shape)
    if isinstance(value, str):
        return len(value)
    if not isinstance(value, dict | list | tuple):
        return 1
    total = ELEMENT * len(value)
    for item in value.values() if isinstance(value, dict) else value:
        if total > AT_ONCE:
            break
        if type(item) is str:
            total += len(item)
        elif type(item) not in SCALARS:
            total += cost(item)
    return total


def chunks(value: Any, *, base64: bool = False) -> Iterator[Chunk]:
    """A value of any size as JSON, in chunks of at most `MAX_CHUNK` bytes."""
    if base64 and isinstance(value, np.ndarray):
        yield from typed_arrays.chunks(value)
    elif cost(value) <= AT_ONCE and not (base64 and isinstance(value, dict)):
        yield _dumps(value)
    elif isinstance(value, dict):
        yield from unclosed(value, base64=base64)
        yield b"}"
    elif isinstance(value, np.ndarray):
        yield from _array(value)
    elif isinstance(value, str):
        yield b'"'
        yield from (_inside(value[start : start + AT_ONCE]) for start in range(0, len(value), AT_ONCE))
        yield b'"'
    else:
        yield from _joined(_elements(value))


def unclosed(value: Mapping[str, Any], *, base64: bool = False) -> Iterator[Chunk]:
    """An object as JSON without its closing brace, so that more keys can follow."""
    before = b"{"
    for name, item in value.items():
        yield before + orjson.dumps(name) + b":"
        yield from chunks(item, base64=base64)
        before = b","
    if not value:
        yield before


def flat(array: np.ndarray) -> Iterator[Chunk]:
    """An array of any shape as one list of its elements, in row-major order."""
    return _joined([_inside(part)] for part in contiguous(array, AT_ONCE))


def longest(array: np.ndarray) -> int:
    """An upper bound of the bytes that `flat` makes of an array."""
    return LONGEST[array.itemsize] * array.size + 2


def _array(array: np.ndarray) -> Iterator[Chunk]:
    """A large array as nested lists, a few rows at a time."""
    step = AT_ONCE // cost(array[0])
    if step:
        return _joined([_inside(array[start : start + step])] for start in range(0, len(array), step))
    return _joined(map(chunks, array))


def _elements(items: list[Any] | tuple[Any, ...]) -> Iterator[Iterable[Chunk]]:
    """The elements of a list: many at a time, or one by one if they are large."""
    for start in range(0, len(items), GROUP):
        group = items[start : start + GROUP]
        if cost(group) <= AT_ONCE:
            yield [_inside(group)]
        else:
            yield from map(chunks, group)


def _joined(pieces: Iterable[Iterable[Chunk]]) -> Iterator[Chunk]:
    """A list as JSON from the text of its elements: several in each piece, or one in each."""
    before = b"["
    for piece in pieces:
        yield before
        yield from piece
        before = b","
    yield b"]" if before == b"," else b"[]"


def _inside(value: Any) -> memoryview:
    """A string or list as JSON, without the quotes or brackets around it."""
    return memoryview(_dumps(value))[1:-1]


def _dumps(value: Any) -> bytes:
    return orjson.dumps(value, _native, NUMPY)


def _native(value: Any) -> Any:
    """An array that orjson can write for one that it cannot: it knows neither strides nor bfloat16."""
    if not isinstance(value, np.ndarray):
        raise TypeError(type(value).__name__)
    return np.ascontiguousarray(value if value.dtype.kind != "V" else value.astype(np.float32))  # V: bfloat16


def _typed(value: Any) -> Any:
    """A small answer with typed arrays in the place of its arrays."""
    if isinstance(value, dict):
        return {name: _typed(item) for name, item in value.items()}
    return typed_arrays.encode(value) if isinstance(value, np.ndarray) else value
