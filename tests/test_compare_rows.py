"""`assert_attention(..., rows=N)`: rows are judged alone, and all is compared if one of them is wrong."""

from __future__ import annotations

import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from attention_service import assert_attention, attend
from attention_service.attention.outputs import OUTPUT
from attention_service.attention.planning import make_plan
from attention_service.attention.spec import AttentionSpec, SegmentIds, Window
from attention_service.backends.numpy.backend import NumpyBackend
from attention_service.comparison.rows import chosen_rows
from attention_service.errors import InvalidValue
from attention_service.library import calls
from tests.helpers.options import as_fields, plain
from tests.helpers.right_kernels import Kernel, flash
from tests.test_compare_options import NAMES, joined
from tests.test_options import general

# 50 tokens of a cache.
PAST = np.ones((1, 2, 50, 4))


def inputs(dtype: str, b: int = 2, h: int = 4, q: int = 300, k: int = 300, d: int = 32) -> dict[str, Any]:
    random = np.random.default_rng((b, h, q, k, d))
    shapes = {"query": (b, h, q, d), "key": (b, h // 2, k, d), "value": (b, h // 2, k, d)}
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    return {name: random.normal(size=shape).astype(kind) for name, shape in shapes.items()}


def by_hand(fields: dict[str, Any], left: int) -> np.ndarray:
    """Causal attention in a window, in plain float32."""
    query, key, value = (fields[name].astype(np.float32) for name in ("query", "key", "value"))
    key, value = (np.repeat(array, query.shape[1] // array.shape[1], axis=1) for array in (key, value))
    scores = query @ key.swapaxes(-1, -2) / np.float32(np.sqrt(query.shape[-1]))
    i, j = np.arange(query.shape[2])[:, None], np.arange(key.shape[2])
    scores = np.where((j <= i) & (j >= i - left), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    found: np.ndarray = (weights / weights.sum(axis=-1, keepdims=True) @ value).astype(fields["query"].dtype)
    return found


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("folds", ["nothing", "scale and log2(e)"])
def test_right_kernels_pass_by_their_rows(dtype: str, folds: str) -> None:
    """Kernels that fold the scale are right in half types, and imprecise in float32, by rows as by all."""
    fields = inputs(dtype)
    output = flash(**fields, kernel=Kernel(folds=folds, rounds_weights=True), is_causal=True)
    report = assert_attention(output, **fields, is_causal=True, rows=32)
    assert report.verdict.status == "correct"
    assert report.metadata["rows"] == 32
    assert report.errors.keys() == {"output", "logsumexp"}
    assert report.verdict.message.startswith("Right in the 32 rows of each head that were judged: ")
    assert (report.power.mutants, report.tests, report.next_input) == (0, [], None)
    assert "power" not in str(report)


@pytest.mark.slow
@pytest.mark.parametrize("row", [0, 127, 128, 299])
def test_one_wrong_row_where_mistakes_sit_is_seen(row: int) -> None:
    fields = inputs("float32")
    output = by_hand(fields, left=100)
    output[1, 2, row] *= 1.001
    with pytest.raises(AssertionError, match=rf"row {row}\b"):
        assert_attention(output, **fields, is_causal=True, window={"left": 100}, rows=32)


def test_a_mistake_is_named_as_without_rows() -> None:
    fields = inputs("float32")
    options: dict[str, Any] = {"is_causal": True, "window": {"left": 100}}
    said = []
    for rows in (16, None):
        with pytest.raises(AssertionError) as error:
            assert_attention(by_hand(fields, left=101), **fields, **options, rows=rows)
        said.append(str(error.value))
    assert said[0] == said[1]
    assert "proof: window.left_plus_one" in said[0]


def test_what_rows_do_not_show_is_compared_whole() -> None:
    fields = inputs("float32", q=20, k=20)
    result = attend(**fields, include=["entropy"])
    report = assert_attention({"entropy": result["entropy"], "output": result.output}, **fields, rows=4)
    assert "rows" not in report.metadata
    assert report.power.mutants > 30


def test_weights_and_a_logsumexp_of_base_2() -> None:
    fields = inputs("float32")
    result = attend(**fields, is_causal=True, include=["attention_weights", "logsumexp"])
    actual = {"attention_weights": result["attention_weights"], "logsumexp": result["logsumexp"] / np.log(2)}
    report = assert_attention(actual, **fields, is_causal=True, logsumexp_base="2", rows=12)
    assert report.metadata["rows"] == 12
    actual["logsumexp"][0, 0, 299] += 0.01
    with pytest.raises(AssertionError, match="logsumexp"):
        assert_attention(actual, **fields, is_causal=True, logsumexp_base="2", rows=12, time_limit=0)


def test_a_nan_is_seen() -> None:
    fields = inputs("float32")
    output = by_hand(fields, left=300)
    output[0, 3, 64, 5] = np.nan
    with pytest.raises(AssertionError, match="some elements are infinite or NaN"):
        assert_attention(output, **fields, is_causal=True, rows=16, time_limit=0)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("allow_non_finite", "layout")])
def test_every_option_is_judged_by_rows(name: str) -> None:
    """The general path is right in these rows, and wrong where the last row is that of the first query."""
    spec = joined((name,))
    assert spec is not None
    spec = spec._replace(include=())
    rows = make_plan(spec).sizes.query_length - 1
    output = general(spec)[OUTPUT]
    fields = as_fields(spec) | {"dtype": "float64"}
    report = assert_attention(output, **fields, rows=rows)
    assert report.verdict.status == "correct"
    assert report.metadata["rows"] == rows
    output[..., -1, :] = output[..., 0, :] + 1
    with pytest.raises(AssertionError, match="wrong: "):
        assert_attention(output, **fields, rows=rows, time_limit=0)


@pytest.mark.parametrize(
    ("fields", "rows"),
    [
        ({}, {0, 1, 98, 99, 63, 64}),
        ({"window": Window(left=20), "is_causal": True}, {0, 99, 20, 21}),
        ({"segment_ids": SegmentIds(query=np.repeat([0, 1], [37, 63]), key=np.repeat([0, 1], [37, 63]))}, {36, 37}),
        ({"key_lengths": np.array([41]), "is_causal": True}, {40, 41}),
        ({"chunk_size": 30}, {29, 30, 89, 90}),
        ({"chunk_size": 64, "query_offset": np.array([0, 37])}, {63, 64, 26, 27}),
        ({"key_lengths": np.array([41]), "is_causal": True, "query_offset": np.array(10)}, {30, 31}),
        ({"key_lengths": np.array([41, 80]), "is_causal": True, "query_offset": np.array([10, 30])}, {30, 31, 49, 50}),
        ({"key_lengths": np.array([71]), "is_causal": True, "past_key": PAST, "past_value": PAST}, {20, 21}),
    ],
)
def test_the_rows_around_what_hides_keys_are_chosen(fields: dict[str, Any], rows: set[int]) -> None:
    entries = max(np.size(fields.get("query_offset", 0)), np.size(fields.get("key_lengths", 0)))
    spec = plain(entries, 2, 100, 4)._replace(**fields)
    chosen = chosen_rows(make_plan(spec), 16)
    assert len(chosen) == 16
    assert (np.diff(chosen) > 0).all()
    assert rows <= {*chosen.tolist()}


def test_all_rows_are_chosen_where_there_are_fewer() -> None:
    spec = plain(1, 2, 5, 4)
    assert chosen_rows(make_plan(spec), 64).tolist() == [0, 1, 2, 3, 4]
    assert chosen_rows(make_plan(spec), 1).tolist() == [0]


@pytest.mark.parametrize("asked", [{"reference": True}, {"tolerance": {"rtol": 0.1}}])
def test_what_rows_cannot_answer_is_compared_whole(asked: dict[str, Any]) -> None:
    fields = inputs("float32", q=20, k=20)
    output = attend(**fields).output
    report = assert_attention(output, **fields, **asked, rows=4)
    assert "rows" not in report.metadata
    assert ("yours" in [test.name for test in report.tests]) == ("tolerance" in asked)
    assert report.reference is None or np.allclose(report.reference["output"], output, atol=1e-5)
    assert (report.reference is None) == ("reference" not in asked)


@pytest.mark.parametrize("rows", [np.int64(4), np.array(4), np.uint8(4)])
def test_integers_of_any_type_are_numbers_of_rows(rows: Any) -> None:
    fields = inputs("float32", q=20, k=20)
    assert assert_attention(attend(**fields).output, **fields, rows=rows).metadata["rows"] == 4


def test_very_long_keys_take_little_more_memory_than_their_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_of_process", lambda *_: NumpyBackend(threads=1))
    fields = inputs("float32", b=1, h=2, q=64, k=2**17, d=8)
    output = attend(**fields).output
    tracemalloc.start()
    try:
        assert_attention(output, **fields, rows=64)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2**28, "64 rows at once would take 64 MiB for each copy of their scores"


@pytest.mark.parametrize("rows", [0, -1, 2.5, True, np.True_, "8"])
def test_other_numbers_of_rows_are_refused(rows: Any) -> None:
    spec: AttentionSpec = plain(1, 1, 2, 2)
    fields = {name: getattr(spec, name) for name in ("query", "key", "value")}
    with pytest.raises(InvalidValue, match="/rows: expected a positive integer, or None, got"):
        assert_attention(np.zeros((1, 1, 2, 2)), **fields, rows=rows)
