"""Estimates of the memory that decoding a JSON body takes, the body and its arrays included."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from service.codecs.decoded import Body
from service.codecs.json.limits import MAX_LISTS, MAX_SEARCHED, SLICE

# Bytes of memory. simdjson copies the body, and notes where each value and each punctuation mark stands; on its tape a
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
# A number of Python takes as many bytes of the body, with its comma: -5 to 256 exist already.
SHORTEST: Final = 4
# A string takes its bytes three times: in simdjson, in Python, and decoded from base64. Python has one, two or four
# bytes for every character of a string, as its widest one needs.
TEXT: Final = 2
# What is no JSON is read as one string of Python, and a part of it once more.
REFUSED: Final = 3
# What allocators add.
ROUNDING: Final = 32

# The dearest bodies per byte: numbers `1,` and once more their text; `"\u0100",`, `[[]],` with what the limits allow.
BOUND: Final = 19
BOUND_OF_STRINGS: Final = 6, 27 * MAX_SEARCHED
BOUND_OF_LISTS: Final = 31, 112 * MAX_LISTS


def decode_bound(length: int, limit: int | None = None) -> int:
    """Upper bound of the memory for decoding any body of this length, in bytes."""
    others = sum(min(factor * length, most) for factor, most in (BOUND_OF_STRINGS, BOUND_OF_LISTS))
    return BOUND * length + others


def decode_bytes(body: Body, limit: int | None = None) -> int:
    """Upper bound of the memory for decoding this body. Counting its values takes about half a millisecond per MiB.

    Only decoding tells which lists become arrays and which become Python objects, so Python objects are counted as far
    as the limits allow them.
    """
    found = _survey(body)
    lists = found.brackets + found.braces
    values = found.commas + lists + 1
    marks = values + found.commas + lists + 2 * found.strings
    memory = COPIES * len(body) + MARK * marks + (VALUE + ELEMENT) * values
    memory += (KEY + STRING) * found.strings + (TEXT + found.width) * found.text
    if found.commas < MAX_SEARCHED:
        memory += NUMBER * min(values, len(body) // SHORTEST)
        memory += LIST * min(lists, MAX_LISTS)
    memory = max(memory, (REFUSED + found.width) * len(body))
    return min(memory + memory // ROUNDING, decode_bound(len(body)))


class _Survey(NamedTuple):
    """Upper bounds of what a body holds. text: bytes within quotes; width: bytes per character of a Python string"""

    commas: int
    brackets: int
    braces: int
    strings: int
    text: int
    width: int


def _survey(body: Body) -> _Survey:
    octets = np.frombuffer(body, np.uint8)
    found = np.empty(min(len(octets), SLICE), np.bool_)
    counts = dict.fromkeys(b',[{\\"', 0)
    text = 0
    for start in range(0, len(octets), SLICE):
        part = octets[start : start + SLICE]
        quotes = counts[ord('"')]
        for character in counts:
            np.equal(part, character, out=found[: len(part)])
            counts[character] += int(np.count_nonzero(found[: len(part)]))
        if counts[ord('"')] > quotes:  # which were looked for last
            places = np.flatnonzero(found[: len(part)])
            opening, closing = places[quotes % 2 :: 2], places[1 - quotes % 2 :: 2]
            text += int(closing.sum()) - int(opening.sum()) + start * (len(closing) - len(opening))
    commas, brackets, braces, escapes, quotes = counts.values()
    if escapes or quotes % 2:  # which quotes end a string is not known
        return _Survey(commas, brackets, braces, quotes, len(body), 4)
    return _Survey(commas, brackets, braces, quotes // 2, text, _width(octets))


def _width(octets: np.ndarray) -> int:
    """Bytes that Python has for each character of a text in UTF-8."""
    widest = int(octets.max(initial=0))
    return 1 if widest < 0xC4 else 2 if widest < 0xF0 else 4
