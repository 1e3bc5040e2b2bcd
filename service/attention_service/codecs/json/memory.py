"""Estimates of the memory that decoding a JSON body takes, the body and its arrays included."""

from __future__ import annotations

from typing import Final

import numpy as np

from attention_service.codecs.decoded import Body
from attention_service.codecs.json.limits import MAX_LISTS, MAX_SEARCHED, SLICE, count
from attention_service.codecs.json.parser import HAS_SIMDJSON
from attention_service.codecs.json.standard_library import MAX_CONTAINER_BYTES, container_bytes

# Bytes of memory: simdjson copies the body, and notes where each value and each punctuation mark stands; on its tape a
# value takes two words, and a key one.
COPIES: Final = 2
MARK: Final = 4
VALUE: Final = 16
KEY: Final = 8
# An element of an array or a pointer to an object of Python, and such objects: a number, a short string, a list.
ELEMENT: Final = 8
NUMBER: Final = 32
STRING: Final = 80
LIST: Final = 104
# The shortest number for which Python makes an object takes so many bytes of the body, with its comma: it has -5 to 256
# already.
SHORTEST: Final = 4
# A string takes its bytes three times: in simdjson, in Python, and decoded from base64. Python has one, two or four
# bytes for every character of a string, as its widest one needs.
TEXT: Final = 2
# What is no JSON is read as one string of Python, and a part of it once more.
REFUSED: Final = 3
# What allocators add.
ROUNDING: Final = 32

# Memory for each byte of the worst body of each kind: numbers written `1,`; strings `"\u0100",`; lists `[[]],`. The
# limits on values and lists bound the last two.
BOUND: Final = 19
BOUND_OF_STRINGS: Final = 6, 27 * MAX_SEARCHED
BOUND_OF_LISTS: Final = 31, 112 * MAX_LISTS

# The same by the standard library: numbers written `-6,`; strings; lists `[[[]]],`. Each value is an element of a list,
# which has room for an eighth more. A number for which Python makes an object takes at least three bytes of the body.
GROWN_ELEMENT: Final = 9
SHORTEST_OBJECT: Final = 3
BOUND_OF_OBJECTS: Final = 20
BOUND_OF_CONTAINERS: Final = 61, MAX_CONTAINER_BYTES


def decode_bound(length: int) -> int:
    """Upper bound of the memory for decoding any body of this length, in bytes."""
    of_lists = BOUND_OF_LISTS if HAS_SIMDJSON else BOUND_OF_CONTAINERS
    others = sum(min(factor * length, most) for factor, most in (BOUND_OF_STRINGS, of_lists))
    return (BOUND if HAS_SIMDJSON else BOUND_OF_OBJECTS) * length + others


def decode_bytes(body: Body) -> int:
    """Upper bound of the memory for decoding this body. Counting its values takes about half a millisecond per MiB.

    Only decoding tells which lists become arrays and which become Python objects, so Python objects are counted as far
    as the limits allow them.
    """
    commas, lists = count(body, b","), count(body, b"[") + count(body, b"{")
    strings, text, width = _strings(body)
    values = commas + lists + 1
    if not HAS_SIMDJSON:
        memory = (1 + width) * len(body) + (GROWN_ELEMENT + ELEMENT) * values + container_bytes(body)
        memory += NUMBER * min(values, len(body) // SHORTEST_OBJECT) + STRING * strings + (1 + width) * text
        return _rounded(memory, body, width)
    marks = values + commas + lists + 2 * strings
    memory = COPIES * len(body) + MARK * marks + (VALUE + ELEMENT) * values
    memory += (KEY + STRING) * strings + (TEXT + width) * text
    if commas < MAX_SEARCHED:
        memory += NUMBER * min(values, len(body) // SHORTEST)
        memory += LIST * min(lists, MAX_LISTS)
    return _rounded(memory, body, width)


def _rounded(memory: int, body: Body, width: int) -> int:
    memory = max(memory, (REFUSED + width) * len(body))
    return min(memory + memory // ROUNDING, decode_bound(len(body)))


def _strings(body: Body) -> tuple[int, int, int]:
    """Upper bounds of the number of strings, the bytes within quotes, and the bytes of a character in Python."""
    octets = np.frombuffer(body, np.uint8)
    found = text = 0
    for start in range(0, len(octets), SLICE):
        quotes = start + np.flatnonzero(octets[start : start + SLICE] == ord('"'))
        opening, closing = quotes[found % 2 :: 2], quotes[1 - found % 2 :: 2]
        text += int(closing.sum() - opening.sum())
        found += len(quotes)
    if found % 2 or count(body, b"\\"):  # which quotes end a string is not known
        return found, len(body), 4
    widest = int(octets.max(initial=0))
    return found // 2, text, 1 if widest < 0xC4 else 2 if widest < 0xF0 else 4
