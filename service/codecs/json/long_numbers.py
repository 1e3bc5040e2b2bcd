"""Numbers of 20 digits or more with an exponent: simdjson takes some 20 microseconds for each, Python about one."""

from __future__ import annotations

import math
import re
from typing import Final

import numpy as np

from service.codecs.decoded import Body
from service.codecs.json.limits import SLICE, count

# Such numbers outside strings.
LONG_NUMBER: Final = re.compile(rb'"(?:[^"\\]|\\.)*"|([0-9.]{20,}[eE][-+]?[0-9]+)')
# Bytes of a body, and numbers with an exponent, of which simdjson reads any in some ten milliseconds.
SMALL: Final = 2**15
FEW: Final = 2**10


def may_have_many(body: Body) -> bool:
    """True if a body has so many exponents that simdjson could take a long time."""
    if len(body) <= SMALL or count(body, b"e") + count(body, b"E") <= FEW:
        return False
    octets = np.frombuffer(body, np.uint8)
    exponents = 0
    for start in range(0, len(octets), SLICE):  # not every e is one: true and false have others
        part = octets[start : start + SLICE + 1]
        exponents += int(np.count_nonzero(((part[1:] | 0x20) == ord("e")) & (part[:-1] - ord("0") < 10)))
    return exponents > FEW


def shortened(body: Body) -> bytearray:
    """A copy of a body with at most 17 digits for each long number, which give the same float64, and spaces."""
    text = bytearray(body)
    for found in LONG_NUMBER.finditer(body):
        if found[1] is not None and math.isfinite(number := float(found[1])):
            shortest = repr(number).encode().ljust(len(found[1]))
            if len(shortest) == len(found[1]):
                text[found.start(1) : found.end(1)] = shortest
    return text
