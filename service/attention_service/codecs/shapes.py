"""Shapes as callers write them."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

MAX_RANK: Final = 8
# An axis of length 0 leaves room for any other, but NumPy multiplies the lengths of the others all the same.
MAX_ELEMENTS: Final = 2**59


def shape_of(given: Any) -> tuple[int, ...] | None:
    """The shape that a list or tuple of lengths says, also one that JSON made an ndarray; None if it says none."""
    if not isinstance(given, list | tuple | np.ndarray) or len(given) > MAX_RANK:
        return None
    lengths = given.tolist() if isinstance(given, np.ndarray) else given
    if not all(type(length) is int and length >= 0 for length in lengths):
        return None
    if 0 in lengths and math.prod(length for length in lengths if length) > MAX_ELEMENTS:
        return None
    return tuple(lengths)
