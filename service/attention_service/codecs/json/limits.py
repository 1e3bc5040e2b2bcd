"""Bounds on what one JSON body may hold, and counts that tell whether a body keeps them."""

from __future__ import annotations

from typing import Final

import numpy as np

from attention_service.codecs.decoded import Body

# The deepest request is a matrix of 4 axes in an object in an object in an object; simdjson itself stops at 1024.
MAX_DEPTH: Final = 32
# simdjson finds a key by looking at each, so their number is bounded; the largest request has about 50.
MAX_KEYS: Final = 200
# The largest request, of the inference protocol, has about 800 objects. Each takes some hundred bytes of memory, but
# only two of the body.
MAX_OBJECTS: Final = 2**12
# simdjson counts the elements of an array no further than this, and cuts longer arrays.
MAX_LENGTH: Final = 2**24 - 2
# Arrays of one body that may become Python lists: each takes 80 bytes of memory, but only two of the body. An object
# takes as much as four.
MAX_LISTS: Final = 2**19
LISTS_PER_OBJECT: Final = 4
# Values of one body that are looked at one by one to say which is wrong: a second of work at most.
MAX_SEARCHED: Final = 2**22
# Bytes of a body that Python counts more quickly than NumPy.
SMALL: Final = 2**12
# How often a byte is looked for by `find`, which takes a tenth of the time of NumPy where the byte hardly occurs.
RARE: Final = 2**6
# Bytes of a body that are compared at a time, so that the result stays in the cache and takes no memory.
SLICE: Final = 2**17


def has_too_many_lists(body: Body) -> bool:
    """True if a body would take far more memory than its length once all its arrays were Python lists."""
    if len(body) <= MAX_LISTS:
        return False
    return count(body, b"[") + LISTS_PER_OBJECT * count(body, b"{") > MAX_LISTS


def has_too_many_values(body: Body) -> bool:
    """True if a body holds more values than may be looked at one by one."""
    return len(body) > MAX_SEARCHED and count(body, b",") >= MAX_SEARCHED


def count(body: Body, character: bytes) -> int:
    """How often a byte occurs in a body."""
    start = found = 0
    if not isinstance(body, memoryview):
        if len(body) <= SMALL:
            return body.count(character)
        while found < RARE:
            if (start := body.find(character, start) + 1) == 0:
                return found
            found += 1
    # NumPy takes a fourth of the time of bytes.count, and reads memoryviews.
    octets = np.frombuffer(body, np.uint8)
    slices = (octets[at : at + SLICE] for at in range(start, len(octets), SLICE))
    return found + sum(int(np.count_nonzero(part == ord(character))) for part in slices)


def list_count(shape: tuple[int, ...]) -> int:
    """The number of lists, and so of opening brackets, that write an array of this shape."""
    total = count = 1
    for length in shape[:-1]:
        count *= length
        total += count
    return total
