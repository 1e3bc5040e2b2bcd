"""Shapes as a caller writes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

MAX_RANK: Final = 8
# An axis of length 0 makes room for any other, but NumPy multiplies the rest all the same.
MAX_ELEMENTS: Final = 2**59


def is_shape(sizes: Sequence[Any]) -> bool:
    """Whether these are lengths of axes that an array can have, if there are as many bytes."""
    if len(sizes) > MAX_RANK or not all(type(size) is int and size >= 0 for size in sizes):
        return False
    return 0 not in sizes or math.prod(size for size in sizes if size) <= MAX_ELEMENTS
