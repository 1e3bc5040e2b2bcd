"""Values as JSON, straight from the memory of their arrays: nested lists with null for what is not finite, or base64.

orjson writes small values whole. Larger ones are cut into pieces that it writes one after the other, so that it neither
blocks the event loop nor needs memory for the whole text: it aborts the process where it gets none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import orjson

from attention_service.codecs import typed_arrays
from attention_service.codecs.chunks import Chunk, contiguous
from attention_service.codecs.json.limits import list_count

# Numbers and characters that orjson gets at once: about a millisecond of work, and less than a chunk of text, as a
# number takes at most 24 bytes and its brackets and comma 7.
AT_ONCE: Final = 2**15
# What an element of a list adds to its cost, and how many elements of a list orjson gets at once.
ELEMENT: Final = 8
GROUP: Final = AT_ONCE // ELEMENT // 2
# The bytes of the longest number with a comma, by the bytes of its type: -2.2250738585072014e-308, -1234567900000000.0
LONGEST: Final = {8: 25, 4: 20, 2: 20, 1: 6}


@dataclass(frozen=True, slots=True)
class Flat:
    """An array that is written as one list of its elements, in row-major order."""

    array: np.ndarray


@dataclass(frozen=True, slots=True)
class JSONText:
    """A value whose JSON is written as one string."""

    value: Any


# Types as tuples, as these are asked for each value, and `int | float` would be made each time.
NUMBERS: Final = (int, float, type(None))
CONTAINERS: Final = (dict, list, tuple)
PIECEWISE: Final = (Flat, JSONText)


def chunks(value: Any, *, base64: bool = False) -> Iterator[Chunk]:
    """A value of any size as JSON, in chunks of at most `MAX_CHUNK` bytes. base64: True for typed arrays"""
    if isinstance(value, np.ndarray) and base64:
        yield from typed_arrays.chunks(value)
    elif base64 and isinstance(value, list) and any(isinstance(item, np.ndarray) for item in value):
        yield from _joined(chunks(item, base64=True) for item in value)
    elif _cost(value) <= AT_ONCE and not (base64 and isinstance(value, dict)):
        yield dumps(value)
    elif isinstance(value, dict):
        before = b"{"
        for name, item in value.items():
            yield before + orjson.dumps(name) + b":"
            yield from chunks(item, base64=base64)
            before = b","
        yield b"}" if value else b"{}"
    elif isinstance(value, np.ndarray):
        yield from _array(value)
    elif isinstance(value, Flat):
        yield from _joined([_inside(part)] for part in contiguous(value.array, AT_ONCE))
    elif isinstance(value, JSONText):
        yield b'"'
        yield from (_inside(str(chunk, "utf-8")) for chunk in chunks(value.value))
        yield b'"'
    elif isinstance(value, str):
        yield b'"'
        yield from (_inside(value[start : start + AT_ONCE]) for start in range(0, len(value), AT_ONCE))
        yield b'"'
    else:
        yield from _joined(_elements(value))


def is_small(answer: Mapping[str, Any]) -> bool:
    """True if orjson may get an answer at once. Its metadata is always small."""
    cost = 0
    for name, value in answer.items():
        cost += 0 if name == "metadata" else _cost(value)
    return cost <= AT_ONCE


def written_items(shape: tuple[int, ...]) -> int:
    """The numbers that an array of this shape is written as; without numbers the inner lists, at least 1."""
    return math.prod(shape) or max(list_count(shape) - 1, 1)


def longest(array: np.ndarray) -> int:
    """An upper bound of the bytes that the elements of an array take in JSON, with their commas."""
    return LONGEST[array.itemsize] * array.size


def _cost(value: Any) -> int:
    """The number of numbers, lists and characters in a value, roughly; counting stops above `AT_ONCE`."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, np.ndarray):
        return value.size or written_items(value.shape)
    if isinstance(value, PIECEWISE):
        return AT_ONCE + 1
    if not isinstance(value, CONTAINERS):
        return 1
    total = ELEMENT * len(value)
    for item in value.values() if isinstance(value, dict) else value:
        if total > AT_ONCE:
            break
        if isinstance(item, str):
            total += len(item)
        elif not isinstance(item, NUMBERS):  # which ELEMENT counts
            total += _cost(item)
    return total


def _array(array: np.ndarray) -> Iterator[Chunk]:
    """A large array as nested lists, a few rows at a time."""
    step = AT_ONCE // written_items(array.shape[1:])
    if step:
        return _joined([_inside(array[start : start + step])] for start in range(0, len(array), step))
    return _joined(map(chunks, array))


def _elements(items: list[Any] | tuple[Any, ...]) -> Iterator[Iterable[Chunk]]:
    """The JSON of the elements of a list: of many at a time, or of each by itself if they are large."""
    for start in range(0, len(items), GROUP):
        group = items[start : start + GROUP]
        if _cost(group) <= AT_ONCE:
            yield [_inside(group)]
        else:
            yield from map(chunks, group)


def _joined(pieces: Iterable[Iterable[Chunk]]) -> Iterator[Chunk]:
    """A list as JSON from the JSON of its elements: several in each piece, or one in each."""
    before = b"["
    for piece in pieces:
        yield before
        yield from piece
        before = b","
    yield b"]" if before == b"," else b"[]"


def _inside(value: Any) -> memoryview:
    """A string or list as JSON, without the quotes or brackets around it."""
    return memoryview(dumps(value))[1:-1]


def dumps(value: Any) -> bytes:
    """A value that is small enough for orjson to get it at once, as JSON."""
    return orjson.dumps(value, _native, orjson.OPT_SERIALIZE_NUMPY)


def _native(value: Any) -> Any:
    """An array that orjson can write for one that it cannot: it knows neither strides nor bfloat16 nor one number."""
    if not isinstance(value, np.ndarray):
        raise TypeError(type(value).__name__)
    if value.ndim == 0:  # the gradient of one number
        return float(value)
    return np.ascontiguousarray(value if value.dtype.kind != "V" else value.astype(np.float32))  # V: bfloat16
