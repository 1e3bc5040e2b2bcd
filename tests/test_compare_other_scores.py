"""Facts that scores are wrong and values right: a bias or a mask of other places, other weights; and tiles of an output
that are stored in another order. Planted by formulas of NumPy, in shapes and types of kernels."""

from __future__ import annotations

from typing import Any, Final

import ml_dtypes
import numpy as np
import pytest

from attention_service.codecs.decoded import Decoded
from attention_service.comparison.outputs import facts_of
from attention_service.comparison.question import make_question
from attention_service.comparison.truth import reference_and_baseline
from attention_service.library import compare
from attention_service.library.calls import backends
from attention_service.schemas.compare import Fact

TYPES: Final = (np.float32, ml_dtypes.bfloat16)
HEADS: Final = 3
ROWS: Final = 40
KEYS: Final = 48
FEATURES: Final = 32


class Drawn:
    """A request with normal numbers, and the output for other scores or masks."""

    def __init__(self, dtype: type, *, keys: int = KEYS) -> None:
        random = np.random.default_rng(3)
        self.dtype = dtype
        self.query: np.ndarray = random.standard_normal((HEADS, ROWS, FEATURES)).astype(dtype)
        self.key, self.value = list[np.ndarray](random.standard_normal((2, HEADS, keys, FEATURES)).astype(dtype))
        self.bias: np.ndarray = random.standard_normal((HEADS, ROWS, keys)).astype(dtype)
        self.mask = random.random((HEADS, ROWS, keys)) < 0.7
        self.mask[..., 0] = True
        self.scores = self.query.astype(float) @ self.key.astype(float).swapaxes(1, 2) / FEATURES**0.5

    def output(self, scores: np.ndarray, seen: np.ndarray | bool = True) -> np.ndarray:
        powers = np.where(seen, np.exp(scores), 0)
        return np.asarray(powers @ self.value.astype(float) / powers.sum(axis=-1, keepdims=True))

    def facts(self, output: np.ndarray, **options: Any) -> list[Fact]:
        fields = {"query": self.query, "key": self.key, "value": self.value, "layout": "hld", **options}
        return facts(fields, output.astype(self.dtype))


def facts(fields: dict[str, Any], output: np.ndarray) -> list[Fact]:
    """All facts about an output, without the search for known mistakes."""
    question = make_question(Decoded({**fields, "actual": {"output": output}}, frozenset()))
    return list(facts_of(reference_and_baseline(question, backends().choose("numpy", "cpu"))))


def places(begins: np.ndarray) -> np.ndarray:
    """(q, k), the numbers of a table that rows read that begin there."""
    return np.asarray(begins[:, None] + np.arange(KEYS))


# Where row i begins to read the numbers of its head, and what is said of it; - 1 row keeps its own.
MOVED: Final = {
    "wraps": (np.arange(ROWS) * KEYS % 1024, "begins at number (i · 48) mod 1024 of its head in row i"),
    "rows of another table": (np.arange(ROWS) % 7 * KEYS, "begins at number (i · 48) mod 336 of its head in row i"),
    "a row further": (np.minimum(np.arange(ROWS) + 2, ROWS - 1) * KEYS, "is that of row i+2 in row i"),
    "some numbers further": (
        np.where(np.arange(ROWS) < 30, np.arange(ROWS) * KEYS + 5, np.arange(ROWS) * KEYS),
        "begins 5 numbers behind its own",
    ),
    "some numbers before": (np.maximum(np.arange(ROWS) * KEYS - 8, 0), "begins 8 numbers before its own"),
}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", MOVED)
def test_a_bias_of_other_places_is_told(name: str, dtype: type) -> None:
    begins, says = MOVED[name]
    drawn = Drawn(dtype)
    read = drawn.bias.astype(float).reshape(HEADS, -1)[:, places(begins)]
    if name == "a row further":  # the last rows of the array have none behind them
        read[:, -2:] = drawn.bias[:, -2:].astype(float)
    [found] = drawn.facts(drawn.output(drawn.scores + read), bias=drawn.bias)
    assert found.name == "other_table"
    assert says in found.message


@pytest.mark.parametrize("dtype", TYPES)
def test_a_mask_of_other_places_is_told(dtype: type) -> None:
    drawn = Drawn(dtype)
    read = drawn.mask.reshape(HEADS, -1)[:, places(np.arange(ROWS) * KEYS % 1024)]
    read[..., 0] |= ~read.any(axis=-1)
    [found] = drawn.facts(drawn.output(drawn.scores, read), mask=drawn.mask)
    assert "right for a mask that begins at number (i · 48) mod 1024" in found.message


def test_large_tables_are_looked_at_where_offsets_wrap() -> None:
    """Not all places are tried: rows of 2,048 numbers may begin at any of 131,072."""
    random = np.random.default_rng(5)
    query = random.standard_normal((64, 16), np.float32)
    key, value = random.standard_normal((2, 2048, 16), np.float32)
    bias = random.standard_normal((64, 2048), np.float32)
    powers = np.exp(query.astype(float) @ key.T.astype(float) / 4 + bias[np.arange(64) % 32].astype(float))
    output = powers @ value.astype(float) / powers.sum(axis=-1, keepdims=True)
    [found] = facts({"query": query, "key": key, "value": value, "bias": bias}, output.astype(np.float32))
    assert "mod 65536 of its head" in found.message


def hidden_to_the_left(keys: int) -> np.ndarray:
    """(q, k): row i sees the keys up to itself."""
    return np.asarray(np.arange(keys) <= np.arange(ROWS)[:, None])


@pytest.mark.parametrize("dtype", TYPES)
def test_other_weights_of_the_own_values_are_told(dtype: type) -> None:
    """Head 1 has the query of other memory; rows that see more keys than half of the features say nothing."""
    drawn = Drawn(dtype, keys=ROWS)
    scores, seen = drawn.scores.copy(), hidden_to_the_left(ROWS)
    scores[1] = np.random.default_rng(1).standard_normal(scores[1].shape)
    [found] = drawn.facts(drawn.output(scores, seen), is_causal=True)
    assert (found.name, found.numbers) == ("other_weights", {"keys": [FEATURES / 2]})


@pytest.mark.parametrize(
    "change",
    [
        lambda output: output * 1.01,  # weights that do not add up to 1
        lambda output: output + 0.1 * np.sin(np.arange(FEATURES)),
        lambda output: np.random.default_rng(2).standard_normal(output.shape),
    ],
)
def test_other_values_are_no_other_weights(change: Any) -> None:
    drawn = Drawn(np.float32, keys=ROWS)
    output = drawn.output(drawn.scores, hidden_to_the_left(ROWS))
    assert "other_weights" not in {one.name for one in drawn.facts(change(output), is_causal=True)}


def test_nan_is_no_sum_of_values() -> None:
    """The only wrong row that sees few keys is NaN."""
    drawn = Drawn(np.float32, keys=ROWS)
    output = drawn.output(drawn.scores, hidden_to_the_left(ROWS))
    output[1, 5] = np.nan
    output[2, -3:] *= 1.5
    assert "other_weights" not in {one.name for one in drawn.facts(output, is_causal=True)}


def test_other_keys_are_no_other_weights() -> None:
    """Keys that a row is not to see add their values, which are no sum of those that it sees."""
    drawn = Drawn(np.float32, keys=ROWS)
    seen = hidden_to_the_left(ROWS) | (np.random.default_rng(4).random((ROWS, ROWS)) < 0.2)
    assert drawn.facts(drawn.output(drawn.scores, seen), is_causal=True) == []


def test_values_that_are_sums_of_few_say_nothing_of_weights() -> None:
    """Values in a space of four axes: any output is a sum of any four of them, whatever was wrong."""
    drawn = Drawn(np.float32, keys=ROWS)
    axes = np.eye(FEATURES)[:4] @ np.random.default_rng(6).standard_normal((FEATURES, FEATURES))
    drawn.value = (np.random.default_rng(7).integers(-9, 9, (HEADS, ROWS, 4)) @ axes.round()).astype(np.float32)
    seen = hidden_to_the_left(ROWS) | (np.random.default_rng(4).random((ROWS, ROWS)) < 0.2)
    assert drawn.facts(drawn.output(drawn.scores, seen), is_causal=True) == []


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_wrong_weights_of_few_keys_are_told(count: int, dtype: type) -> None:
    """The largest powers of a row are half as large, but not in the sum that they are divided by."""
    drawn = Drawn(dtype)
    powers = np.exp(drawn.scores)
    own = powers.copy()
    largest = np.argsort(-powers, axis=-1)[..., :count]
    np.put_along_axis(own, largest, np.take_along_axis(powers, largest, -1) / 2, -1)
    output = own @ drawn.value.astype(float) / powers.sum(axis=-1, keepdims=True)
    [found] = drawn.facts(output)
    assert (found.name, found.numbers) == ("largest_weights", {"keys": [count]})


def test_wrong_weights_of_other_keys_are_not_those_of_the_largest() -> None:
    """Every fifth key counts half."""
    drawn = Drawn(np.float32)
    powers = np.exp(drawn.scores)
    output = powers * np.where(np.arange(KEYS) % 5, 1, 0.5) @ drawn.value.astype(float)
    found = drawn.facts(output / powers.sum(axis=-1, keepdims=True))
    assert "largest_weights" not in {one.name for one in found}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("height", "width"), [(8, 8), (8, 16), (8, 32)])
def test_tiles_in_another_order_are_told(height: int, width: int, dtype: type) -> None:
    """Each tile has its numbers in another order; row i and number j are in the places that the sentence says."""
    drawn = Drawn(dtype)
    right = drawn.output(drawn.scores)
    order = np.random.default_rng(0).permutation(height * width)
    tiles = right.reshape(HEADS, ROWS // height, height, -1, width).swapaxes(2, 3)
    tiles = tiles.reshape(*tiles.shape[:3], -1)[..., order].reshape(tiles.shape)
    [found] = drawn.facts(tiles.swapaxes(2, 3).reshape(right.shape))
    assert found.name == "permuted_tiles"
    to, of = ([*divmod(place, width)] for place in (0, int(order[0])))
    assert f"in each tile of {height} rows and {width} numbers: {to} is {of}, " in found.message


def test_a_causal_mask_of_groups_of_rows_is_named_wherever_it_begins() -> None:
    """Rows in groups of four have the mask of the last of them; the first row is at position 6, no multiple of four."""
    drawn, rows = Drawn(np.float32), np.arange(ROWS)
    seen = np.arange(KEYS) <= (rows // 4 * 4 + 3 + 6)[:, None]
    fields: dict[str, Any] = {"query": drawn.query, "key": drawn.key, "value": drawn.value, "layout": "hld"}
    output = drawn.output(drawn.scores, seen).astype(np.float32)
    report = compare(output, **fields, is_causal=True, query_offset=6)
    assert (report.hypotheses[0].name, report.hypotheses[0].certainty) == ("causal.by_tile", "proof")
