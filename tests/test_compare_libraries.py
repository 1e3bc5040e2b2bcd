"""What little-used libraries do, by NumPy: each mistake is named, and what they return for right is not accused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest

from attention_service.library import attend, compare
from attention_service.schemas.compare import CompareReport
from tests.helpers.formulas import is_of, plant, table

QUERIES: Final = 6
KEYS: Final = 9
NEW: Final = (
    *("causal.last_row", "empty.hidden_keys", "heads.values_only", "mask.in_max", "padding.in_sum"),
    *("scale.zero_is_default", "mask.inverted (bias)"),
)
# What is planted in each run of the tests; the others are slow.
QUICK: Final = (
    *("other heads added", "other features added", "half of the features of another row"),
    "rows and features swapped in memory",
)


def operands(queries: int = QUERIES, keys: int = KEYS) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    query = random.normal(size=(2, 3, queries, 8)).astype(np.float32)
    key, value = random.normal(size=(2, 2, 3, keys, 8)).astype(np.float32)
    return query, key, value


def scores_of(query: np.ndarray, key: np.ndarray) -> np.ndarray:
    return np.asarray(query.astype(np.float64) @ key.astype(np.float64).swapaxes(-1, -2) / np.sqrt(8))


def attention(scores: np.ndarray, seen: np.ndarray, value: np.ndarray) -> np.ndarray:
    powers = np.exp(scores) * seen
    total = powers.sum(axis=-1, keepdims=True)
    return np.asarray(np.divide(powers, total, out=np.zeros_like(powers), where=total > 0) @ value)


def judged(output: np.ndarray, arrays: tuple[np.ndarray, ...], **options: Any) -> CompareReport:
    query, key, value = arrays
    return compare(output.astype(query.dtype), query, key, value, layout="bhld", **options)


def proved(report: CompareReport) -> tuple[str, str]:
    assert report.hypotheses, report.verdict.message
    return report.hypotheses[0].name, report.hypotheses[0].certainty


def test_the_last_query_sees_every_key() -> None:
    """As com.microsoft's MultiHeadAttention does with unidirectional."""
    query, key, value = operands()
    seen = np.arange(KEYS) <= np.arange(QUERIES)[:, None]
    seen[-1] = True
    report = judged(attention(scores_of(query, key), seen, value), (query, key, value), is_causal=True, query_offset=0)
    assert proved(report) == ("causal.last_row", "proof")


@pytest.mark.parametrize(
    ("shown", "detail"),
    [
        (lambda causal, padding: causal, "those that only key_mask hides"),  # onnxruntime: its own padding
        (lambda causal, padding: causal ^ padding, "those that one mask alone hides"),  # two masks of -10000 are added
        (lambda causal, padding: padding, "those that only is_causal hides"),
        (lambda causal, padding: np.ones_like(causal | padding), "all"),
    ],
)
def test_rows_that_two_masks_empty_together(shown: Callable[[np.ndarray, np.ndarray], np.ndarray], detail: str) -> None:
    query, key, value = operands(QUERIES, QUERIES)
    causal, padding = np.tril(np.ones((QUERIES, QUERIES), bool)), np.arange(QUERIES) >= np.array([[2], [3]])
    both = causal & padding[:, None, None]
    other = np.broadcast_to(shown(causal, padding[:, None, None]), both.shape)
    seen = np.where(both.any(axis=-1, keepdims=True), both, other)
    output = attention(scores_of(query, key), seen, value)
    report = judged(output, (query, key, value), is_causal=True, key_mask=padding)
    assert proved(report) == ("empty.hidden_keys", "proof")
    assert detail in report.hypotheses[0].message


@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": True, "query_offset": 4, "key_mask": [True] * 5},
        {"window": {"left": 9}, "query_offset": 4, "key_mask": [False] * 5},
        {"is_causal": True, "query_offset": -3, "chunk_size": 100},
    ],
)
def test_masks_that_hide_nothing_are_judged_beside_others(options: dict[str, Any]) -> None:
    """A query at the end, which the causal mask and the window show all keys."""
    query, key = np.ones((1, 2), np.float32), np.arange(10, dtype=np.float32).reshape(5, 2)
    output = attend(query, key, key, **options).output
    assert compare(output + 1, query, key, key, **options).verdict.status == "wrong"


@pytest.mark.parametrize("low", [-np.inf, -1e4, -1e9, float(np.finfo(np.float32).min)])
def test_a_bias_that_hides_is_read_as_booleans(low: float) -> None:
    """As flax, haiku and Keras read floats in a mask: 0 is false."""
    query, key, value = operands()
    shown = np.random.default_rng(1).random((QUERIES, KEYS)) < 0.6
    shown[:, 0], shown[:, -1] = True, False
    bias = np.where(shown, 0, low).astype(np.float32)
    report = judged(attention(scores_of(query, key), ~shown, value), (query, key, value), bias=bias)
    assert proved(report) == ("mask.inverted", "proof")


def test_a_scale_of_0_is_taken_for_none() -> None:
    query, key, value = operands()
    output = attention(scores_of(query, key), np.ones((QUERIES, KEYS), bool), value)
    report = judged(output, (query, key, value), scale=0.0)
    assert proved(report) == ("scale.zero_is_default", "proof")


def test_hidden_scores_count_as_0_in_the_largest() -> None:
    """As TVM computes the maximum before it masks: exp(-200) is 0 in float32."""
    query, key, value = operands(QUERIES, QUERIES)
    query[..., 0], key[..., 0] = -24, 24
    scores, seen = scores_of(query, key), np.tril(np.ones((QUERIES, QUERIES), bool))
    hides = np.arange(QUERIES)[:, None] < QUERIES - 1  # all but the last row
    top = np.where(hides, 0, scores.max(axis=-1, keepdims=True))
    powers = np.exp((scores - top).astype(np.float32)) * seen
    with np.errstate(invalid="ignore"):
        output = powers / powers.sum(axis=-1, keepdims=True) @ value
    report = judged(output, (query, key, value), is_causal=True)
    assert proved(report) == ("mask.in_max", "proof")
    assert "mask.in_max" not in report.power.survivors
    near = operands(QUERIES, QUERIES)
    assert "mask.in_max" in judged(output, near, is_causal=True).power.survivors  # no score is below -100


@pytest.mark.parametrize("counts", ["padding", "padding beside a causal mask", "all that is hidden"])
def test_masked_keys_stay_in_the_denominator(counts: str) -> None:
    """As the attention of torch_geometric's transformers: their values are 0, their weights are not."""
    query, key, value = operands(QUERIES, QUERIES)
    padding = np.arange(QUERIES) < np.array([[4], [5]])
    powers = np.exp(scores_of(query, key))
    causal = np.tril(np.ones((QUERIES, QUERIES), bool)) if counts != "padding" else np.ones((QUERIES, QUERIES), bool)
    total = (powers * (causal if "causal" in counts else 1)).sum(axis=-1, keepdims=True)
    output = (powers * (causal & padding[:, None, None])) @ value / total
    options = {"key_mask": padding} | ({"is_causal": True} if counts != "padding" else {})
    report = judged(output, (query, key, value), **options)
    assert proved(report) == ("padding.in_sum", "proof")


def in_float16(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Attention key by key, as ggml computes it: sums of values in float16, of weights in float32."""
    q, k, v = (one.astype(np.float32) for one in (query, key, value))
    scores = q @ k.swapaxes(-1, -2) / np.float32(np.sqrt(query.shape[-1]))
    top, total = np.full(scores.shape[:3], -np.inf, np.float32), np.zeros(scores.shape[:3], np.float32)
    sums = np.zeros((*scores.shape[:3], v.shape[-1]), np.float16)
    for j in range(scores.shape[-1]):
        new = np.maximum(top, scores[..., j])
        change, power = np.exp(top - new), np.exp(scores[..., j] - new)
        sums = (sums.astype(np.float32) * change[..., None]).astype(np.float16)
        sums = (sums.astype(np.float32) + power[..., None] * v[:, :, None, j]).astype(np.float16)
        total, top = total * change + power, new
    return np.asarray(sums.astype(np.float32) / total[..., None])


def test_sums_in_float16_explain_a_large_error() -> None:
    random = np.random.default_rng(0)
    query, key, value = (random.normal(size=(1, 1, n, 16)).astype(np.float16) for n in (16, 512, 512))
    report = judged(in_float16(query, key, value), (query, key, value))
    assert report.verdict.status in ("wrong", "imprecise")
    assert proved(report) == ("precision.accumulate", "resembles")


def test_equal_weights_of_4096_keys_end_at_half_of_their_sum() -> None:
    """A sum in float16 that holds 2048 loses numbers below 1."""
    value = np.random.default_rng(0).uniform(0.5, 1.0, (1, 1, 4096, 4)).astype(np.float16)
    zeros = np.zeros((1, 1, 2, 4), np.float16), np.zeros((1, 1, 4096, 4), np.float16)
    report = judged(in_float16(*zeros, value), (*zeros, value))
    assert 0.2 < report.errors["output"].max_abs < 0.6  # type: ignore[operator]  # it is finite
    assert "precision.accumulate" in [one.name for one in report.hypotheses]


def test_a_mistake_is_listed_once() -> None:
    """A sum that has 3.3 keys too many resembles parts of several sizes."""
    random = np.random.default_rng(3)
    query = random.normal(size=(2, 3, QUERIES, 8)).astype(np.float32)
    key, value = random.normal(size=(2, 2, 3, KEYS, 8)).astype(np.float32)
    seen = np.stack([np.arange(KEYS) >= 4, np.arange(KEYS) < 6])
    powers = np.exp(scores_of(query, key)) * seen[:, None, None]
    output = powers @ value / (powers.sum(axis=-1, keepdims=True) + 3.3)
    names = [one.name for one in judged(output, (query, key, value), key_mask=seen).hypotheses]
    assert names
    assert len(names) == len(set(names))


def test_no_factor_makes_an_entry_of_zeros() -> None:
    query, key, value = operands()
    output = attention(scores_of(query, key), np.ones((QUERIES, KEYS), bool), value)
    output[1] = 0
    report = judged(output, (query, key, value))
    assert "output.scaled" not in [one.name for one in report.hypotheses]
    assert report.facts[0].name == "constant"


def test_one_column_is_not_the_first_of_several_parts() -> None:
    """As ONNX reads a mask of one column: only the first key is seen, which no split of the keys explains."""
    query, key, value = operands(QUERIES, 4)
    output = np.broadcast_to(value[:, :, :1], query.shape)
    report = judged(output, (query, key, value))
    assert "keys.share_read" not in [one.name for one in report.hypotheses]


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n == "mask.in_max" else ()) for n in NEW])
def test_what_formulas_plant_is_named(name: str) -> None:
    """By formulas that share no line with the product, for the first requests that can tell."""
    named = 0
    for seed in range(20):
        planted = plant(name, seed)
        if planted is None or named == 2:
            continue
        report = compare(planted.sent, **planted.fields)
        if planted.name in report.power.survivors or report.verdict.status not in ("wrong", "imprecise"):
            continue
        best = report.hypotheses[0]
        assert planted.name in (best.name, *best.also), (seed, report.verdict.message)
        named += 1
    assert named == 2


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in table.FACTS])
def test_right_numbers_in_other_places_are_told(name: str) -> None:
    seed, planted = next((seed, one) for seed in range(1, 9) if (one := plant(name, seed)) is not None)
    report = compare(planted.sent, **planted.fields)
    told = {one.name for one in report.facts} | {one.name for one in report.hypotheses if one.certainty == "proof"}
    assert told & {*planted.facts} or any(is_of(one, name, seed, 1e-6) for one in told), report.verdict.message
