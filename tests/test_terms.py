"""Which keys score terms leave out or leave unmasked, by position: all that they can, and no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from attention_service.attention.score_term import Frame, ScoreTerm
from attention_service.attention.shapes import Sizes
from attention_service.attention.spec import AttentionSpec, Window
from attention_service.attention.terms.additions import Alibi, Bias
from attention_service.attention.terms.masks import KeyLengths
from attention_service.attention.terms.positions import Causal, Chunks, SlidingWindow
from attention_service.attention.tile import Tile
from attention_service.errors import InvalidArray

QUERIES, KEYS = 7, 9
SIZES = Sizes(2, 2, 2, QUERIES, KEYS, 3, 3)
FRAME = Frame("bhqk", SIZES, 0, np.dtype(np.float64))
TILES = [(rows, keys) for rows in (slice(0, 7), slice(2, 5), slice(6, 7)) for keys in (slice(0, 9), slice(3, 7))]
OFFSETS = [[0], [2], [-3, 1], [1, 4], [-20], [30], [-(2**62)], [2**62]]
FIELDS: dict[str, tuple[type[ScoreTerm], dict[str, Any]]] = {
    "is_causal": (Causal, {"is_causal": True}),
    "window": (SlidingWindow, {"window": Window(2, 1)}),
    "window to the left": (SlidingWindow, {"window": Window(left=3)}),
    "window to the right": (SlidingWindow, {"window": Window(right=2)}),
    "chunks": (Chunks, {"chunk_size": 4}),
    "a long chunk": (Chunks, {"chunk_size": 2**62}),
}


def test_a_mask_of_a_term_has_a_byte_for_each_query_and_key_of_each_entry() -> None:
    assert term_of("is_causal", [0]).visible_bytes((2, 3, 5, 7)) == (2 * 5 * 7, 0)


def term_of(name: str, offset: list[int]) -> ScoreTerm:
    kind, fields = FIELDS[name]
    term = kind.of(AttentionSpec(query_offset=np.array(offset if len(offset) > 1 else offset[0]), **fields), FRAME)
    assert isinstance(term, ScoreTerm)
    return term


def key_lengths(length: int) -> KeyLengths:
    term = KeyLengths.of(AttentionSpec(key_lengths=np.array(length)), FRAME)
    assert term is not None
    return term


def seen_by_definition(name: str, offset: list[int]) -> np.ndarray:
    """Which keys each query sees, (b, q, k), in integers of any size."""
    rules: dict[str, Callable[[int, int], bool]] = {
        "is_causal": lambda i, j: j <= i,
        "window": lambda i, j: i - 2 <= j <= i + 1,
        "window to the left": lambda i, j: j >= i - 3,
        "window to the right": lambda i, j: j <= i + 2,
        "chunks": lambda i, j: i // 4 == j // 4,
        "a long chunk": lambda i, j: i // 2**62 == j // 2**62,
    }
    rule = rules[name]
    return np.array([[[rule(i + first, j) for j in range(KEYS)] for i in range(QUERIES)] for first in offset])


@pytest.mark.parametrize("offset", OFFSETS, ids=str)
@pytest.mark.parametrize("name", FIELDS)
def test_no_more_and_no_fewer_keys_than_queries_see(name: str, offset: list[int]) -> None:
    term, seen = term_of(name, offset), seen_by_definition(name, offset)
    for rows, keys in TILES:
        here = seen[:, rows, keys]
        some, every = (np.flatnonzero(array) + keys.start for array in (here.any((0, 1)), here.all((0, 1))))
        found = term.columns(slice(0, len(offset)), rows, keys)
        assert max(0, found.stop - found.start) == (some[-1] + 1 - some[0] if some.size else 0)
        assert not some.size or found.start == some[0]
        found = term.visible_columns(rows, keys)
        expected = [] if isinstance(term, Chunks) else list(every)  # those of chunks are never told
        assert list(range(found.start, found.stop)) == expected


@pytest.mark.parametrize("offset", OFFSETS, ids=str)
@pytest.mark.parametrize("name", FIELDS)
def test_a_mask_is_true_where_queries_see_keys(name: str, offset: list[int]) -> None:
    """Also where all entries have the same offset, which is computed in another way than offsets that differ."""
    term, seen = term_of(name, offset), seen_by_definition(name, offset)
    for rows, keys in TILES:
        found = term.visible(Tile(slice(0, len(offset)), slice(0, 2), slice(0, 2), rows, keys), np.asarray)
        expected = seen[:, None, rows, keys]
        assert expected.all() if found is None else np.array_equal(np.broadcast_to(found, expected.shape), expected)
        assert found is None or min(found.strides) >= 0  # torch takes no others


def test_the_largest_number_that_a_bias_adds() -> None:
    for numbers, expected in (([-3, 2], 3), ([-3, 4], 4), ([-np.inf, 2], 2), ([-np.inf, -5], 5), ([-np.inf] * 2, 0)):
        assert Bias(np.array(numbers, float).reshape(1, 1, 1, 2)).largest_added(SIZES) == expected
    two = np.array([[-np.inf, 2], [-3, 1]]).reshape(2, 1, 1, 2)
    np.testing.assert_array_equal(Bias(two).largest_added(SIZES), [2, 3])


def test_the_largest_number_that_linear_biases_add() -> None:
    """The distance of a query and a key is less than 5 + 7 + 9, and the steepest slope 2; in each batch entry."""
    found = Alibi(np.array([0.5, -2.0]), np.array([3.0, -5.0])).largest_added(SIZES)
    np.testing.assert_array_equal(found, [2 * (3 + QUERIES + KEYS), 2 * (5 + QUERIES + KEYS)])


def test_lengths_are_from_none_to_all() -> None:
    """Tokens before a length are real, those from it on padding."""
    for length in (0, 1, KEYS):
        term = key_lengths(length)
        assert term.booleans.ravel().tolist() == [j < length for j in range(KEYS)]
    for length in (-1, KEYS + 1):
        with pytest.raises(InvalidArray, match=f"from 0 to {KEYS}"):
            key_lengths(length)
