"""Bounds on what one body of JSON may hold, and how a body is searched for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from service.codecs.decoded import Body

# The deepest request is a matrix of 4 axes in an object in an object in an object; simdjson itself stops at 1024.
MAX_DEPTH: Final = 32
# An object is looked up key by key, so their number is bounded; the largest request has about 50.
MAX_KEYS: Final = 200
# The largest request, of the inference protocol, has about 800 objects. Each takes some hundred bytes, but two on the
# wire.
MAX_OBJECTS: Final = 2**12
# simdjson counts no further than this, and cuts what is longer.
MAX_LENGTH: Final = 2**24 - 2
# Arrays of one body that may become Python objects: each takes 80 bytes, but two on the wire. An object takes as much
# as four.
MAX_PLAIN: Final = 2**19
OBJECT: Final = 4
# Values of one body that are looked at one by one to say which is wrong: a second of work at most.
MAX_SEARCHED: Final = 2**22
# Bytes of a body that is read with fewer questions asked, and once more where some must be asked.
SMALL: Final = 2**14
# Bytes of a body that are searched at a time.
AT_ONCE: Final = 2**17


def too_plain(body: Body) -> bool:
    """Whether a text would take far more memory than its length, were it all made Python objects."""
    return len(body) > MAX_PLAIN and count(body, b"[") + OBJECT * count(body, b"{") > MAX_PLAIN


def too_many(body: Body) -> bool:
    """Whether a text holds more values than are looked at one by one."""
    return len(body) > MAX_SEARCHED and count(body, b",") >= MAX_SEARCHED


def holds(body: Body, character: bytes) -> bool:
    """Whether a byte occurs in a body."""
    if isinstance(body, memoryview):  # which looks for numbers
        return any(found.any() for found in _places(body, character))
    return character in body


def count(body: Body, character: bytes) -> int:
    """How often a byte occurs in a body."""
    if len(body) <= SMALL and not isinstance(body, memoryview):
        return body.count(character)
    # Bytes look at one after the other: this takes a fourth of the time.
    return sum(int(np.count_nonzero(found)) for found in _places(body, character))


def list_count(shape: tuple[int, ...]) -> int:
    """The number of nested lists, and so of opening brackets, of an array of this shape."""
    total = count = 1
    for length in shape[:-1]:
        count *= length
        total += count
    return total


def _places(body: Body, character: bytes) -> Iterator[np.ndarray]:
    """Where a byte occurs, as booleans; a part at a time, which stays in the cache and takes no memory."""
    octets = np.frombuffer(body, np.uint8)
    for start in range(0, len(octets), AT_ONCE):
        yield octets[start : start + AT_ONCE] == ord(character)
