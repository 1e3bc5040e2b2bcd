"""The cache of prepared requests does not change the results of later requests."""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
import pytest

from attention_service.codecs.decoded import Decoded
from attention_service.pipeline.engine import Engine
from attention_service.settings import Settings
from tests.helpers import wire

QUERY, KEY = [[1.0, 0.0], [0.0, 2.0]], [[1.0, 1.0], [0.5, -1.0]]


def send(client: httpx.Client, **fields: Any) -> httpx.Response:
    return client.post("/attention", json={"query": QUERY, "key": KEY, "value": KEY} | fields)


def by_definition(query: Any, key: Any, value: Any, scale: float) -> np.ndarray:
    """softmax(scale · q kᵀ) v."""
    weights = np.exp(scale * np.array(query) @ np.array(key).T)
    output: np.ndarray = weights / weights.sum(-1, keepdims=True) @ np.array(value)
    return output


@pytest.mark.parametrize("scale", [0.5, 2.0, -1.0])
def test_a_request_with_other_numbers_is_computed_anew(client: httpx.Client, scale: float) -> None:
    random = np.random.default_rng(1)
    for _ in range(3):
        query, key, value = (random.normal(size=(4, 3)).tolist() for _ in range(3))
        answer = send(client, query=query, key=key, value=value, scale=scale).json()
        np.testing.assert_allclose(answer["output"], by_definition(query, key, value, scale), rtol=1e-12)
        assert answer["metadata"]["scale"] == scale


@pytest.mark.parametrize(
    ("good", "bad", "code"),
    [
        ({"num_heads": 1}, {"num_heads": True}, "invalid_value"),
        ({"is_causal": True}, {"is_causal": 1}, "invalid_value"),
        ({"top_k": 1}, {"top_k": 1.5}, "invalid_value"),
        ({"include": []}, {"include": ""}, "invalid_value"),
        ({}, {"query": [[1.0, 0.0], [0.0, 1e308]], "dtype": "float16"}, "overflow"),
        ({}, {"query": [[1e200, 0.0], [0.0, 1e200]], "key": [[1e200, 0.0], [0.0, 1e200]]}, "overflow"),
        ({}, {"value": [[1.0, 1.0, 1.0]]}, "shape_mismatch"),
        ({}, {"query": [[1.0, 0.0], [0.0, True]]}, "invalid_array"),
    ],
)
def test_a_bad_request_similar_to_a_cached_one_is_refused(client: httpx.Client, good: Any, bad: Any, code: str) -> None:
    """The fields are equal in Python, or of the same shapes, but not valid."""
    for _ in range(2):
        assert send(client, **good).status_code == 200
        answer = send(client, **bad)
        assert (answer.status_code, answer.json()["code"]) == (422, code)


def test_infinity_after_a_cached_request_is_refused(client: httpx.Client) -> None:
    headers = {"Content-Type": "application/vnd.safetensors"}
    good = {"input": np.ones((2, 2), np.float32)}
    bad = {"input": np.array([[1, 2], [3, np.inf]], np.float32)}
    for _ in range(2):
        assert client.post("/attention", content=wire.write(good, "safetensors"), headers=headers).status_code == 200
        answer = client.post("/attention", content=wire.write(bad, "safetensors"), headers=headers)
        assert (answer.status_code, answer.json()["errors"][0]["pointer"]) == (422, "/input/1/1")


def test_the_sign_of_zero_is_kept(client: httpx.Client) -> None:
    for zero in (0.0, -0.0, 0.0):
        answer = send(client, scale=zero, include=["scaled_scores"]).json()
        assert np.signbit(answer["metadata"]["scale"]) == np.signbit(zero)
        assert np.signbit(answer["scaled_scores"][0][0]) == np.signbit(zero)


def test_masks_are_part_of_each_request(client: httpx.Client) -> None:
    for mask in ([True, False], [False, True], [False, False]):
        answer = send(client, mask=mask).json()
        np.testing.assert_array_equal(np.array(answer["attention_weights"]) > 0, np.broadcast_to(mask, (2, 2)))


def test_token_labels_are_not_cached(client: httpx.Client) -> None:
    for tokens in (["a", "b"], ["c", "d"]):
        assert send(client, query_tokens=tokens).json()["query_tokens"] == tokens


@pytest.mark.slow
def test_more_requests_than_the_cache_holds(client: httpx.Client) -> None:
    for n in range(300):
        answer = send(client, scale=1.0 + n, query=QUERY[:1])
        assert answer.json()["metadata"]["scale"] == 1.0 + n


def kept_plans(tokens: int, **options: Any) -> bool:
    """True if a second request shares the plan of the first."""
    attention = Engine(Settings.model_construct()).attention
    decoded = Decoded({"input": np.zeros((tokens, 8))} | options, frozenset())
    first, second = attention.prepare(decoded), attention.prepared(decoded, None)
    return second is not None and first.shared is second.shared


def test_plans_with_large_tables_are_not_kept() -> None:
    """A plan holds tables of cosines and sines, or masks, as long as the request; the cache must not keep many."""
    assert kept_plans(16, rotary={"base": 100.0})
    assert not kept_plans(4096, rotary={"base": 100.0})
    assert kept_plans(4096, is_causal=True)
    assert not kept_plans(100_000, key_lengths=5)


def test_plans_of_requests_with_other_arrays_or_long_names_are_not_kept() -> None:
    assert not kept_plans(4, bias=np.zeros(4))
    assert not kept_plans(4, segment_ids={"query": np.zeros(4, int), "key": np.zeros(4, int)})
    assert not kept_plans(100, query_tokens=["a"] * 100)
    assert kept_plans(4, query_tokens=["a"] * 4)
