"""Keys that a finite number hides: -10,000, -1e9 or the least of a type in a bias, steep ALiBi, sinks without weight.

What has no weight counts for nothing in the rounding of a right kernel, however it was written: an output of zeros is
wrong beside a bias of -1e9 as beside minus infinity.
"""

from __future__ import annotations

from typing import Any, Final

import ml_dtypes
import numpy as np
import pytest

from attention_service import assert_call, compare, compare_call
from tests.helpers.engine_calls import Array

pytestmark = pytest.mark.usefixtures("without_suggestions")
BFLOAT16: Final = np.dtype(ml_dtypes.bfloat16)
TYPES: Final = {str(np.dtype(kind)): np.dtype(kind) for kind in (np.float64, np.float32, np.float16, BFLOAT16)}
TOKENS, FEATURES = 64, 16
BAD: Final = ("zeros", "means of the values", "one element moved by 64 units")


def info(dtype: np.dtype) -> Any:
    return ml_dtypes.finfo(dtype) if dtype == BFLOAT16 else np.finfo(dtype)  # type: ignore[no-untyped-call]  # ml_dtypes says no types


def least(dtype: np.dtype) -> float:
    return float(info(dtype).min)


def hidden(how: str, dtype: np.dtype) -> tuple[dict[str, Any], Array]:
    """Options that hide keys by finite numbers, and what they add to the scores (h, q, k)."""
    number = {"-10,000": -1e4, "-1e9": max(-1e9, least(dtype)), "least": least(dtype)}
    if how.startswith("causal "):
        bias = np.triu(np.full((TOKENS, TOKENS), number[how.removeprefix("causal ")]), 1)
        return {"bias": bias.astype(dtype)}, np.broadcast_to(bias, (2, TOKENS, TOKENS))
    if how.startswith("padding "):
        bias = np.where(np.arange(TOKENS) < 40, 0.0, number[how.removeprefix("padding ")])
        return {"bias": bias.astype(dtype)}, np.broadcast_to(bias, (2, TOKENS, TOKENS))
    distance = np.arange(TOKENS)[:, None] - np.arange(TOKENS)
    return {"alibi_slopes": np.full(2, 12.0)}, np.broadcast_to(-12.0 * np.abs(distance), (2, TOKENS, TOKENS))


WAYS: Final = [f"{what} {number}" for what in ("causal", "padding") for number in ("-10,000", "-1e9", "least")]


def drawn(dtype: np.dtype, seed: int = 0) -> tuple[Array, Array, Array]:
    query, key, value = np.random.default_rng(seed).normal(size=(3, 2, TOKENS, FEATURES)).astype(dtype)
    return query, key, value


def attention(query: Array, key: Array, value: Array, added: Array, sinks: Array | None = None) -> Array:
    """Softmax of scores in float64."""
    query, key, value = (array.astype(np.float64) for array in (query, key, value))
    scores = query @ key.swapaxes(-1, -2) / np.sqrt(FEATURES) + added
    most = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - most)
    total = weights.sum(axis=-1, keepdims=True)
    total += 0 if sinks is None else np.exp(sinks[:, None, None] - most)
    output: Array = weights / total @ value
    return output


def bad(name: str, right: Array, value: Array, dtype: np.dtype) -> Array:
    if name == "zeros":
        return np.zeros_like(right, dtype)
    if name == "means of the values":
        return np.broadcast_to(value.astype(np.float64).mean(axis=1, keepdims=True), right.shape).astype(dtype)
    moved = right.astype(dtype)
    at = np.unravel_index(np.abs(right).argmax(), right.shape)
    moved[at] += 64 * np.abs(moved[at]) * dtype.type(epsilon(dtype))
    return moved


def epsilon(dtype: np.dtype) -> float:
    return float(info(dtype).eps)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("how", [*WAYS, "alibi"])
def test_wrong_outputs_are_never_correct_beside_hidden_keys(how: str, kind: str) -> None:
    dtype = TYPES[kind]
    query, key, value = drawn(dtype)
    options, added = hidden(how, dtype)
    options |= {"layout": "hld"}
    right = attention(query, key, value, added)
    assert compare(right.astype(dtype), query, key, value, **options).verdict.status in ("correct", "inconclusive")
    for name in BAD:
        report = compare(bad(name, right, value, dtype), query, key, value, **options)
        assert report.verdict.status in (("wrong",) if name != BAD[2] else ("wrong", "imprecise")), name


@pytest.mark.parametrize("number", [-1e4, -1e9])
def test_a_sink_without_weight_counts_for_nothing(number: float) -> None:
    query, key, value = drawn(TYPES["float32"])
    sinks: Any = np.full(2, number)
    right = attention(query, key, value, np.zeros(()), sinks)
    for name in BAD[:2]:
        found = bad(name, right, value, TYPES["float32"])
        assert compare(found, query, key, value, sinks=sinks, layout="hld").verdict.status == "wrong"


@pytest.mark.parametrize("how", WAYS)
def test_wrong_calls_are_never_correct_beside_hidden_keys(how: str) -> None:
    dtype = TYPES["float32"]
    query, key, value = drawn(dtype)
    options, added = hidden(how, dtype)
    right = attention(query, key, value, added)
    tokens: dict[str, Any] = {"query": query, "key": key, "value": value, "attn_mask": options["bias"]}
    for name in BAD:
        found = compare_call("torch.scaled_dot_product_attention", actual=bad(name, right, value, dtype), **tokens)
        assert found.verdict.status in ("wrong", "imprecise"), name
    with pytest.raises(AssertionError):
        assert_call(lambda **given: np.zeros_like(right, dtype), call="torch.scaled_dot_product_attention", **tokens)


def gradients(query: Array, key: Array, value: Array, added: Array, cotangent: Array) -> dict[str, Array]:
    """The gradients of the same attention, by hand, in float64."""
    query, key, value, cotangent = (array.astype(np.float64) for array in (query, key, value, cotangent))
    scores = query @ key.swapaxes(-1, -2) / np.sqrt(FEATURES) + added
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    of_weights = cotangent @ value.swapaxes(-1, -2)
    of_scores = weights * (of_weights - (weights * of_weights).sum(axis=-1, keepdims=True)) / np.sqrt(FEATURES)
    turned = of_scores.swapaxes(-1, -2)
    return {
        "grad_query": of_scores @ key,
        "grad_key": turned @ query,
        "grad_value": weights.swapaxes(-1, -2) @ cotangent,
    }


@pytest.mark.parametrize("how", [*WAYS, "sink -10,000", "sink -1e9"])
def test_wrong_gradients_are_never_correct_beside_hidden_keys(how: str) -> None:
    dtype = TYPES["float32"]
    query, key, value = drawn(dtype)
    cotangent = np.random.default_rng(1).normal(size=query.shape).astype(dtype)
    options: dict[str, Any] = {"sinks": np.full(2, {"sink -10,000": -1e4, "sink -1e9": -1e9}.get(how, 0.0))}
    added = np.zeros(())  # a sink without weight is none
    if not how.startswith("sink"):
        options, added = hidden(how, dtype)
    options |= {"layout": "hld", "grad_output": cotangent}
    right = gradients(query, key, value, added, cotangent)
    for name, array in right.items():
        sent = array.astype(dtype)
        assert compare({name: sent}, query, key, value, **options).verdict.status == "correct", name
        for other in (np.zeros_like(sent), sent * dtype.type(1.001)):
            assert compare({name: other}, query, key, value, **options).verdict.status == "wrong", name
