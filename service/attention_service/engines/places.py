"""Tokens at any place of an array, as a kernel reads them that follows no table."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

# From the right steps between pages, tokens and heads and the shape (pages, page, heads, …), in numbers, other steps.
Strides = Callable[[tuple[int, int, int], tuple[int, ...]], tuple[int, int, int]]


class Places(NamedTuple):
    """Where each token of each sequence is read.

    lengths: (b,); of: the page (tokens,) and the slot (tokens,) of each token of a sequence; in an array without pages
    a slot of it, and the token in that slot
    strides: None for the right ones; bits: of an address, which wraps beyond them; 0 for as many as it needs
    """

    lengths: np.ndarray
    of: Callable[[int], tuple[np.ndarray, np.ndarray]]
    strides: Strides | None = None
    bits: int = 0


def numbers_at(array: np.ndarray, places: Places, sequence: int) -> np.ndarray:
    """The tokens (tokens, heads, features) of a sequence at places of an array (pages, page, heads, …).

    Errors: IndexError for places outside of the array.
    """
    pages, tokens = places.of(sequence)
    if len(pages) and min(pages.min(), tokens.min()) < 0:
        raise IndexError
    if places.strides is None and not places.bits and tokens.max(initial=0) < array.shape[1]:
        found: np.ndarray = array[pages, tokens]
        return found.reshape(len(pages), array.shape[2], math.prod(array.shape[3:]))
    return _by_address(array, pages, tokens, places)


def _by_address(array: np.ndarray, pages: np.ndarray, tokens: np.ndarray, places: Places) -> np.ndarray:
    """The same by addresses, counted from the first number of the array: behind a page is what memory has there,
    up to the end of the array that it is a view of.

    Errors: IndexError.
    """
    steps = [step // array.itemsize for step in array.strides]
    own = steps[0], steps[1], steps[2]
    page, token, head = own if places.strides is None else places.strides(own, array.shape)
    features = np.zeros(1, np.int64)
    for size, step in zip(array.shape[3:], steps[3:], strict=True):
        features = (features[:, None] + np.arange(size) * step).reshape(-1)
    at = (pages * page + tokens * token)[:, None, None] + np.arange(array.shape[2])[:, None] * head + features
    at = at % 2**places.bits if places.bits else at
    whole = array
    while isinstance(whole.base, np.ndarray):  # keys and values may be one array
        whole = whole.base
    stop = (np.lib.array_utils.byte_bounds(whole)[1] - np.lib.array_utils.byte_bounds(array)[0]) // array.itemsize
    if min(steps) < 0 or (at.size and not 0 <= at.min() <= at.max() < stop):
        raise IndexError
    bits = array.view(f"u{array.itemsize}")  # as_strided knows no float8
    memory = np.lib.stride_tricks.as_strided(bits, (stop,), (array.itemsize,), writeable=False)
    found: np.ndarray = memory[at].view(array.dtype)
    return found
