"""Numbers of 20 digits or more with an exponent: simdjson takes some 20 microseconds for each, Python about one."""

from __future__ import annotations

import math
import re
from contextlib import suppress
from typing import Final

import numpy as np

from attention_service.codecs.decoded import Body
from attention_service.codecs.json.limits import SLICE, count

LONG: Final = 20
# Strings, and long numbers outside them. Every byte is looked at once, whatever the body holds.
LONG_NUMBER: Final = re.compile(
    rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\Z)|(?<![0-9.])([0-9.]{20,}+[eE][-+]?+[0-9]++)', re.DOTALL
)
# Bytes of a body, and long numbers, of which simdjson reads any in some ten milliseconds.
SMALL: Final = 2**15
FEW: Final = 2**10


def may_have_many(body: Body) -> bool:
    """True if a body has so many long numbers that simdjson could take a long time."""
    if len(body) <= SMALL or count(body, b"e") + count(body, b"E") <= FEW:
        return False
    octets = np.frombuffer(body, np.uint8)
    found = 0
    for start in range(LONG, len(octets), SLICE):
        is_e = (octets[start : start + SLICE] | 0x20) == ord("e")
        before = octets[start - 1 : start - 1 + SLICE][: len(is_e)]
        places = start + np.flatnonzero(is_e & (before - ord("0") < 10))
        digits = octets[places[:, None] - np.arange(1, LONG + 1)]
        found += int(np.count_nonzero(((digits - ord("0") < 10) | (digits == ord("."))).all(axis=1)))
    return found > FEW


def shortened(body: Body) -> bytearray:
    """A copy of a body with at most 17 digits for each long number, which give the same float64, and spaces."""
    text = bytearray(body)
    for found in LONG_NUMBER.finditer(body):
        if found[1] is None:  # a string
            continue
        with suppress(ValueError):  # with two points it is no number, which simdjson will say
            number = float(found[1])
            shortest = repr(number).encode().ljust(len(found[1]))
            if math.isfinite(number) and len(shortest) == len(found[1]):
                text[found.start(1) : found.end(1)] = shortest
    return text
