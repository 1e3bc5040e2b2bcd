"""Data frames as arguments: the names of their rows are the labels of their tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from attention_service import attend, compare
from attention_service.errors import InvalidRequest

TOKENS = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])


class Frame:
    """What `attend` reads of a DataFrame, in the place of pandas, which this environment does not have."""

    def __init__(self, array: np.ndarray, index: Iterable[Any] | None = None, columns: Iterable[Any] | None = None):
        self._array = array
        self.index = range(array.shape[0]) if index is None else index
        self.columns = range(array.shape[1]) if columns is None else columns

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self._array, dtype=dtype, copy=copy)


def test_the_index_of_a_frame_is_its_labels() -> None:
    result = attend(input=Frame(TOKENS, ["kitten", "lizard", "wolf"]))
    assert (result.query_tokens, result.key_tokens) == (["kitten", "lizard", "wolf"], None)
    np.testing.assert_array_equal(result.output, attend(input=TOKENS).output)
    assert "kitten" in result.heatmap().svg
    result = attend(Frame(TOKENS[:1], ["a"]), Frame(TOKENS, ["b", "c", "d"]), Frame(TOKENS, ["e", "f", "g"]))
    assert (result.query_tokens, result.key_tokens) == (["a"], ["b", "c", "d"])
    result = attend(input=TOKENS, context=Frame(TOKENS, [0.5, (1, "b"), None]))
    assert (result.query_tokens, result.key_tokens) == (None, ["0.5", "(1, 'b')", "None"])


def test_the_columns_of_a_frame_are_its_labels_where_they_are_tokens() -> None:
    frame = Frame(TOKENS.T, ["x", "y"], ["a", "b", "c"])
    assert attend(input=frame, layout="dl").query_tokens == ["a", "b", "c"]
    assert attend(input=frame, layout="ld").query_tokens == ["x", "y"]


def test_a_default_index_is_no_label() -> None:
    assert attend(input=Frame(TOKENS)).query_tokens is None
    assert attend(input=Frame(TOKENS, [1, 2, 3])).query_tokens == ["1", "2", "3"]
    assert attend(input=Frame(TOKENS, columns=["x", "y"])).query_tokens is None


def test_labels_of_the_call_take_the_place_of_the_index() -> None:
    frame = Frame(TOKENS, ["a", "b", "c"])
    result = attend(frame, frame, frame, query_tokens=["d", "e", "f"])
    assert (result.query_tokens, result.key_tokens) == (["d", "e", "f"], ["a", "b", "c"])


def test_keys_after_a_past_have_no_labels_of_a_frame() -> None:
    frame, past = Frame(TOKENS, ["a", "b", "c"]), np.ones((1, 1, 2))
    result = attend(frame, frame, frame, past_key=past, past_value=past)
    assert (result.query_tokens, result.key_tokens) == (["a", "b", "c"], None)


def test_comparisons_take_frames() -> None:
    frame = Frame(TOKENS, ["a", "b", "c"])
    assert compare(attend(input=TOKENS), input=frame).verdict.ratio == 0


def test_a_frame_in_a_layout_of_other_axes_is_an_error_of_its_shape() -> None:
    with pytest.raises(InvalidRequest, match=r"^/input: "):
        attend(input=Frame(TOKENS, ["a", "b", "c"]), layout="bld")
