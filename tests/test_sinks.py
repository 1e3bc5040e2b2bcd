"""Sinks for each head and for each query of a head, and the weights without them."""

from __future__ import annotations

from math import log
from typing import Any

import httpx
import numpy as np
import pytest

from attention_service import attend
from tests.helpers.backends import BACKENDS, compute_as_if_large

B, H, G, Q, K = 2, 4, 2, 3, 5
INCLUDE = ["attention_weights", "weights_without_sinks", "logsumexp", "entropy"]


def request() -> dict[str, Any]:
    random = np.random.default_rng(9)
    shapes = {"query": (B, H, Q, 4), "key": (B, G, K, 4), "value": (B, G, K, 3)}
    return {name: random.normal(size=shape) for name, shape in shapes.items()}


def with_a_column(fields: dict[str, Any], seen: np.ndarray, sinks: np.ndarray) -> dict[str, np.ndarray]:
    """The softmax over the scores and a column of sinks (b, h, q), which is dropped; and over the scores alone."""
    key, value = (np.repeat(fields[name], H // G, axis=1) for name in ("key", "value"))
    scores = np.where(seen, fields["query"] @ key.swapaxes(-1, -2) / 2, -np.inf)
    column = np.concatenate([scores, np.broadcast_to(sinks, (B, H, Q))[..., None]], axis=-1)
    largest = column.max(axis=-1, keepdims=True)
    exponentials = np.exp(column - largest)
    total = exponentials.sum(axis=-1, keepdims=True)
    weights = (exponentials / total)[..., :-1]
    top = np.where(seen.any(-1, keepdims=True), scores.max(axis=-1, keepdims=True), 0)
    alone = np.exp(scores - top)
    sums = alone.sum(axis=-1, keepdims=True)
    logs = np.log(weights, out=np.zeros_like(weights), where=weights > 0)
    return {
        "attention_weights": weights,
        "weights_without_sinks": np.divide(alone, sums, out=np.zeros_like(alone), where=sums > 0),
        "logsumexp": (largest + np.log(total))[..., 0],
        "entropy": -(weights * logs).sum(axis=-1),
        "output": weights @ value,
    }


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tile", [None, 1, 7, 2**20])
@pytest.mark.parametrize("size", [1.0, 500.0, 1e6])
@pytest.mark.parametrize("per_row", [False, True])
def test_sinks_are_a_column_that_is_dropped(
    per_row: bool, size: float, tile: int | None, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also sinks beside which all weights vanish: the weights without them are exact."""
    if tile is not None:
        compute_as_if_large(monkeypatch, tile)
    random = np.random.default_rng(1)
    sinks = random.normal(size=(B, H, Q) if per_row else H) * size
    mask = random.random((B, H, Q, K)) < 0.6
    mask[0, 1, 2] = False
    options: dict[str, Any] = {"mask": mask, "query_lengths": [3, 2], "backend": backend}
    seen = mask & (np.arange(Q) < np.array([3, 2])[:, None])[:, None, :, None]
    expected = with_a_column(request(), seen, sinks if per_row else sinks[:, None])
    for include in (INCLUDE, ["weights_without_sinks"], ["attention_weights"], ["logsumexp"], []):
        found = attend(**request(), sinks=sinks, include=include, **options)
        for name in ("output", *include):
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-11, atol=1e-13, err_msg=name)
    padded = attend(**request(), sinks=sinks, include=INCLUDE, **options)
    last = np.broadcast_to(sinks if per_row else sinks[:, None], (B, H, Q))[1, :, 2]
    np.testing.assert_allclose(padded["logsumexp"][1, :, 2], last, rtol=1e-14)
    assert not padded.output[1, :, 2].any()


def test_by_hand(client: httpx.Client) -> None:
    """Two queries of the same scores 0; the sinks ln 2 and ln 6 weigh as much as two and six more keys."""
    fields: dict[str, Any] = {"query": [[0], [0]], "key": [[0], [0]], "value": [[1], [3]], "sinks": [[log(2), log(6)]]}
    answer = client.post("/attention", json=fields | {"include": INCLUDE}).json()
    np.testing.assert_allclose(answer["attention_weights"], [[1 / 4, 1 / 4], [1 / 8, 1 / 8]], rtol=1e-15)
    np.testing.assert_allclose(answer["weights_without_sinks"], [[0.5, 0.5], [0.5, 0.5]], rtol=1e-15)
    np.testing.assert_allclose(answer["output"], [[1.0], [0.5]], rtol=1e-15)
    np.testing.assert_allclose(answer["logsumexp"], [log(4), log(8)], rtol=1e-15)


@pytest.mark.parametrize("backend", BACKENDS)
def test_selections_of_the_weights_without_sinks(backend: str) -> None:
    sinks = np.random.default_rng(2).normal(size=(B, H, Q))
    options: dict[str, Any] = {"select_heads": [3, 0], "select_queries": [2, 1], "backend": backend}
    include = ["attention_weights", "weights_without_sinks"]
    whole = attend(**request(), sinks=sinks, include=include)["weights_without_sinks"][:, [3, 0]][:, :, [2, 1]]
    found = attend(**request(), sinks=sinks, include=include, **options)
    np.testing.assert_allclose(found["weights_without_sinks"], whole, rtol=1e-13)
    average = attend(**request(), sinks=sinks, include=include, average_heads=True, top_k=2, **options)
    np.testing.assert_allclose(average["weights_without_sinks"], whole.mean(axis=1), rtol=1e-13)
    assert average["top_weights"]["values"].shape == (B, 2, 2)
    plain = attend(**request(), include=include, backend=backend)
    np.testing.assert_array_equal(plain["weights_without_sinks"], plain["attention_weights"])


def test_columns_and_vectors() -> None:
    columns = attend(input=np.zeros((1, 2)), layout="dl", sinks=[[0.0, log(2)]], include=INCLUDE)
    np.testing.assert_allclose(columns["attention_weights"], [[1 / 3, 1 / 4], [1 / 3, 1 / 4]], rtol=1e-15)
    vector = attend([0.0], [[0.0], [0.0]], [[1.0], [3.0]], sinks=[[log(2)]], include=INCLUDE)
    assert vector["weights_without_sinks"].tolist() == [0.5, 0.5]
    np.testing.assert_allclose(vector.output, [1], rtol=1e-15)


def test_a_heatmap_has_the_sink_of_each_row() -> None:
    found = attend(**request(), sinks=np.random.default_rng(2).normal(size=(B, H, Q)))
    assert "sink" in found.heatmap(batch_entry=1).svg


@pytest.mark.parametrize(
    ("change", "pointer", "expected"),
    [
        ({"sinks": [1, 2]}, "/sinks", "(1,), one number a head"),
        ({"sinks": [[1, 2, 3]]}, "/sinks", "(1,), one number a head, or (1, 2)"),
        ({"sinks": [[[1, 2]]]}, "/sinks", "(1,), one number a head, or (1, 2)"),
        ({"sinks": [[1, 1e39]], "dtype": "float32"}, "/sinks/0/1", "a number that float32 can hold"),
        (
            {"normalization": "sum", "include": ["weights_without_sinks"]},
            "/include",
            "no weights_without_sinks beside normalization sum",
        ),
    ],
)
def test_wrong_sinks_are_refused(change: dict[str, Any], pointer: str, expected: str, client: httpx.Client) -> None:
    response = client.post("/attention", json={"input": [[1, 0], [0, 1]]} | change)
    assert response.status_code == 422
    [error] = response.json()["errors"]
    assert (error["pointer"], error["expected"]) == (pointer, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_logsumexp_of_an_empty_row_is_its_sink_however_small(backend: str) -> None:
    found = attend(input=[[1.0], [1.0]], key_mask=[False, False], sinks=[-1e6], include=["logsumexp"], backend=backend)
    assert found["logsumexp"].tolist() == [-1e6, -1e6]
