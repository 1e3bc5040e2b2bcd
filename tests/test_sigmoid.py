"""`normalization: sigmoid`: each visible score becomes a weight by itself."""

from __future__ import annotations

from fractions import Fraction
from math import log
from typing import Any

import httpx
import numpy as np
import pytest

from attention_service import attend
from tests.helpers.backends import BACKENDS, compute_as_if_large

EYE = [[1.0, 0.0], [0.0, 1.0]]


def test_by_hand(client: httpx.Client) -> None:
    """The scores are ln 3 on the diagonal, whose weight is 3/4, and 0 beside it, whose weight is 1/2."""
    fields = {"query": EYE, "key": EYE, "value": [[8.0], [4.0]], "scale": log(3), "normalization": "sigmoid"}
    answer = client.post("/attention", json=fields).json()
    np.testing.assert_allclose(answer["attention_weights"], [[0.75, 0.5], [0.5, 0.75]], rtol=1e-15)
    np.testing.assert_allclose(answer["output"], [[8.0], [7.0]], rtol=1e-15)
    causal = client.post("/attention", json=fields | {"is_causal": True, "query_offset": -1}).json()
    assert causal["attention_weights"] == [[0.0, 0.0], [0.5, 0.0]]
    assert causal["output"] == [[0.0], [4.0]]
    assert causal["metadata"]["fully_masked_rows"] == 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_weights_that_start_apart_in_memory(dtype: Any, backend: str) -> None:
    """NumPy 2.4.6 negates the first columns of 4 or 8 in place wrongly: as if they were next to each other."""
    for keys in range(1, 20):
        for offset in range(-3, keys):
            query, key = np.array([[3.0], [2.0], [-1.0]]), np.ones((keys, 1))
            result = attend(
                query, key, key, scale=1, is_causal=True, query_offset=offset, normalization="sigmoid", dtype=dtype,
                backend=backend,
            )  # fmt: skip
            visible = np.arange(keys) <= np.arange(3)[:, None] + offset
            expected = np.where(visible, 1 / (1 + np.exp(-query)), 0)
            np.testing.assert_allclose(result.attention_weights, expected, rtol=1e-6)
            np.testing.assert_allclose(result.output, expected.sum(axis=1, keepdims=True), rtol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tile", [None, 1, 7, 2**20])
@pytest.mark.parametrize("size", [1.0, 1e3, 1e150])
def test_the_definition(size: float, tile: int | None, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if tile is not None:
        compute_as_if_large(monkeypatch, tile)
    random = np.random.default_rng(2)
    query, key, value = (random.normal(size=(2, heads, n, 4)) for heads, n in ((4, 3), (2, 5), (2, 5)))
    query *= size
    mask = random.random((2, 4, 3, 5)) < 0.6
    mask[0, 1, 2] = False
    options: dict[str, Any] = {"mask": mask, "query_lengths": [3, 1], "softcap": 700.0, "backend": backend}
    real = np.arange(3) < np.array([3, 1])[:, None]
    seen = mask & real[:, None, :, None]
    scores = query @ np.repeat(key, 2, axis=1).swapaxes(-1, -2) / 2
    capped = 700 * np.tanh(scores / 700)
    with np.errstate(over="ignore"):
        weights = np.where(seen, 1 / (1 + np.exp(-capped)), 0)
    outputs = weights @ np.repeat(value, 2, axis=1)
    for include in (["attention_weights", "received"], ["masked_scores"], []):
        found = attend(query, key, value, normalization="sigmoid", include=include, **options)
        np.testing.assert_allclose(found.output, outputs, rtol=1e-11, atol=1e-13)
        assert found.metadata.fully_masked_rows == int((~mask.any(-1) & real[:, None]).sum())
        if "received" in include:
            np.testing.assert_allclose(found["attention_weights"], weights, rtol=1e-11, atol=1e-300)
            np.testing.assert_allclose(found["received"], weights.sum(axis=2), rtol=1e-11, atol=1e-13)
    average = attend(query, key, value, normalization="sigmoid", average_heads=True, top_k=2, **options)
    largest = np.sort(weights.mean(axis=1), axis=-1)[..., ::-1][..., :2]
    np.testing.assert_allclose(average["top_weights"]["values"], largest, rtol=1e-11, atol=1e-300)


@pytest.mark.parametrize("backend", BACKENDS)
def test_hidden_keys_cannot_poison(backend: str) -> None:
    value = np.array([[np.nan], [4.0]])
    found = attend(EYE, EYE, value, key_mask=[False, True], scale=0, normalization="sigmoid", backend=backend)
    assert found.output.tolist() == [[2.0], [2.0]]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_are_exact_in_every_type(backend: str, dtype: str) -> None:
    """Of scores 0 and so large ones that a weight is 0 or 1."""
    query, key = [[0.0], [1.0]], [[60000.0], [-60000.0]]
    found = attend(query, key, [[1.0], [2.0]], dtype=dtype, normalization="sigmoid", scale=1, backend=backend)
    assert found["attention_weights"].astype(float).tolist() == [[0.5, 0.5], [1.0, 0.0]]
    assert found.output.astype(float).tolist() == [[float(Fraction(3, 2))], [1.0]]


@pytest.mark.parametrize(
    ("change", "pointer", "expected"),
    [
        ({"sinks": [1.0]}, "/sinks", "no sinks beside normalization sigmoid"),
        ({"include": ["logsumexp"]}, "/include", "no logsumexp beside normalization sigmoid"),
        ({"include": ["entropy"]}, "/include", "no entropy beside normalization sigmoid"),
    ],
)
def test_what_is_of_the_softmax_is_refused(
    change: dict[str, Any], pointer: str, expected: str, client: httpx.Client
) -> None:
    response = client.post("/attention", json={"input": EYE, "normalization": "sigmoid"} | change)
    assert (response.status_code, response.json()["code"]) == (422, "field_conflict")
    [error] = response.json()["errors"]
    assert (error["pointer"], error["expected"]) == (pointer, expected)
