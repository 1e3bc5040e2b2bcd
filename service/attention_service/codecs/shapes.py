"""Shapes as callers write them."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from attention_service.errors import describe, quote

MAX_RANK: Final = 8
# Elements that an array would have without its axes of length 0: results may have the same axes, and a list of JSON is
# written for each.
MAX_BESIDE_0: Final = 2**24
# What `shape_of` takes besides, for errors.
BESIDE_0: Final = f", with a product of at most {MAX_BESIDE_0} beside a 0, none negative"


def shape_of(given: Any) -> tuple[int, ...] | None:
    """The shape that a list or tuple of lengths says, also one that JSON made an ndarray; None if it says none."""
    if not isinstance(given, list | tuple | np.ndarray) or len(given) > MAX_RANK:
        return None
    lengths = given.tolist() if isinstance(given, np.ndarray) else given
    if not all(type(length) is int and length >= 0 for length in lengths):
        return None
    if 0 in lengths and math.prod(length for length in lengths if length) > MAX_BESIDE_0:
        return None
    return tuple(lengths)


def shape_as_given(given: Any) -> str:
    """What `shape_of` refuses, for errors: the first lengths of a list."""
    first = given[: MAX_RANK + 1] if isinstance(given, list | tuple | np.ndarray) else given
    listed = first.tolist() if isinstance(first, np.ndarray) else first
    return quote(str(listed)) if isinstance(listed, list | tuple) else describe(listed)
