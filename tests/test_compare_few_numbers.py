"""Right kernels of half types whose errors few numbers make, and what such requests can show."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from attention_service.attention.arrays import BFLOAT16
from attention_service.library import compare

FLOAT16 = np.dtype(np.float16)


def folded_backward(fields: dict[str, Any], dtype: np.dtype) -> dict[str, np.ndarray]:
    """Output and gradients in float64 of a query that was rounded after it was multiplied by the scale."""
    q, k, v, g = (fields[name].astype(np.float64) for name in ("query", "key", "value", "grad_output"))
    scale = q.shape[-1] ** -0.5
    weights = np.exp((q * scale).astype(dtype).astype(np.float64) @ k.swapaxes(-1, -2))
    weights /= weights.sum(axis=-1, keepdims=True)
    output = weights @ v
    delta = (output * g).sum(axis=-1, keepdims=True)
    of_scores = weights * (g @ v.swapaxes(-1, -2) - delta)
    arrays = {
        "output": output,
        "grad_query": of_scores @ k * scale,
        "grad_key": of_scores.swapaxes(-1, -2) @ q * scale,
        "grad_value": weights.swapaxes(-1, -2) @ g,
    }
    return {name: array.astype(dtype) for name, array in arrays.items()}


@pytest.mark.parametrize("seed", [0, 4])
def test_a_right_backward_pass_is_right_where_one_score_moves_all_weights(seed: int) -> None:
    """One query, and a key that is 20 times larger than others: rounding its score moves the sum of the row, and D."""
    random = np.random.default_rng(seed)
    shapes = {"query": (1, 1, 1, 8), "key": (1, 1, 300, 8), "value": (1, 1, 300, 8), "grad_output": (1, 1, 1, 8)}
    arrays = {name: random.normal(size=shape) * (4 if name == "query" else 1) for name, shape in shapes.items()}
    arrays["key"][..., 3, :] *= 20
    fields: dict[str, Any] = {name: array.astype(BFLOAT16) for name, array in arrays.items()}
    report = compare(folded_backward(fields, BFLOAT16), **fields, query_offset=0)
    assert report.verdict.ratio is not None
    assert report.verdict.ratio <= 2


def split_decode(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, parts: int, *, folds: bool = False
) -> np.ndarray:
    """Attention in float32 whose weights are rounded in each part of the keys. folds: True to round the scaled query"""
    scaled = query.astype(np.float32) * np.float32(query.shape[-1] ** -0.5)
    scaled = scaled.astype(query.dtype).astype(np.float32) if folds else scaled
    scores = scaled @ key.astype(np.float32).swapaxes(-1, -2)
    top, total, sums = scores.max(axis=-1, keepdims=True), 0.0, 0.0
    for own, values in zip(np.split(scores, parts, -1), np.split(value.astype(np.float32), parts, -2), strict=True):
        most = own.max(axis=-1, keepdims=True)
        weights, by = np.exp(own - most), np.exp(most - top)
        total = total + weights.sum(axis=-1, keepdims=True) * by
        sums = sums + weights.astype(query.dtype).astype(np.float32) @ values * by
    found: np.ndarray = np.asarray(sums / total).astype(query.dtype)
    return found


DECODES = [
    (216, FLOAT16, 64, 1, 4),
    (275, BFLOAT16, 128, 64, 1),
    (442, FLOAT16, 128, 64, 4),
]


@pytest.mark.parametrize(("seed", "dtype", "keys", "features", "parts"), DECODES)
def test_one_query_is_right_if_one_number_makes_its_error(
    seed: int, dtype: np.dtype, keys: int, features: int, parts: int
) -> None:
    """One feature of the values, or one that is 30 times larger than others: legal errors may be small by chance."""
    random = np.random.default_rng(seed)
    query, key, value = (random.normal(size=(1, 1, n, d)) for n, d in ((1, 64), (keys, 64), (keys, features)))
    value[..., 5:6] *= 30
    query, key, value = (array.astype(dtype) for array in (query, key, value))
    report = compare(split_decode(query, key, value, parts), query, key, value, query_offset=keys - 1)
    assert report.verdict.ratio is not None
    assert report.verdict.ratio <= 2


def without_sinks(fields: dict[str, Any]) -> np.ndarray:
    """Causal attention in float32 of rounded weights, without the exponentials of sinks in its sums."""
    query, key, value = (fields[name].astype(np.float32) for name in ("query", "key", "value"))
    scores = query @ key.swapaxes(-1, -2) / np.float32(query.shape[-1] ** 0.5)
    scores = np.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    sums = weights.astype(BFLOAT16).astype(np.float32) @ value
    found: np.ndarray = (sums / weights.sum(axis=-1, keepdims=True)).astype(BFLOAT16)
    return found


def test_power_is_by_the_rule_of_the_verdict() -> None:
    """Sinks of little weight: no element is further off than rounding, but the rows are in the mean."""
    random = np.random.default_rng(2)
    fields: dict[str, Any] = {
        n: random.normal(size=(1, 4, 120, 32)).astype(BFLOAT16) for n in ("query", "key", "value")
    }
    sinks = (random.normal(size=4) * 0.3 - 5.5).astype(np.float32)
    fields |= {"sinks": sinks, "is_causal": True}
    report = compare(without_sinks(fields), **fields)
    assert report.verdict.status == "wrong"
    assert report.power.options == []
    assert "sinks.absent" not in report.power.survivors
    assert report.hypotheses[0].name == "sinks.absent"
