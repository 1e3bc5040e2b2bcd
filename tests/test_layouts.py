"""The same tokens give the same numbers in every layout, in the axes of that layout."""

from __future__ import annotations

from typing import Any, get_args

import httpx
import numpy as np
import pytest

from attention_service.attention.spec import Layout
from tests.cases import as_array

B, H, Q, K, D, E = 2, 3, 4, 5, 6, 7
random = np.random.default_rng(12)
QUERY, KEY, VALUE = (random.normal(size=shape) for shape in ((B, H, Q, D), (B, H, K, D), (B, H, K, E)))


def in_layout(array: np.ndarray, layout: str) -> np.ndarray:
    """(b, h, l, d) in the axes of a layout: without b the first batch entry, without h the heads packed in d."""
    if "b" not in layout:
        array = array[:1]
    if "h" in layout:
        full: np.ndarray = np.einsum(f"bhld->{layout if 'b' in layout else 'b' + layout}", array)
        return full if "b" in layout else full[0]
    packed = np.einsum("bhld->blhd", array).reshape(array.shape[0], array.shape[2], -1)
    moved: np.ndarray = np.einsum(f"bld->{layout if 'b' in layout else 'b' + layout}", packed)
    return moved if "b" in layout else moved[0]


def post(client: httpx.Client, **request: Any) -> dict[str, Any]:
    response = client.post("/attention", json=request)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def by_definition() -> tuple[np.ndarray, np.ndarray]:
    """Output (b, h, q, e) and weights (b, h, q, k) by the definition, query by query."""
    output, weights = np.zeros((B, H, Q, E)), np.zeros((B, H, Q, K))
    for b, h, q in np.ndindex(B, H, Q):
        exponentials = [np.exp(np.dot(QUERY[b, h, q], KEY[b, h, k]) / np.sqrt(D)) for k in range(K)]
        for k in range(K):
            weights[b, h, q, k] = exponentials[k] / sum(exponentials)
            output[b, h, q] += weights[b, h, q, k] * VALUE[b, h, k]
    return output, weights


@pytest.mark.parametrize("layout", get_args(Layout))
def test_every_layout_gives_the_same_numbers(client: httpx.Client, layout: str) -> None:
    output, weights = by_definition()
    answer = post(
        client,
        query=in_layout(QUERY, layout).tolist(),
        key=in_layout(KEY, layout).tolist(),
        value=in_layout(VALUE, layout).tolist(),
        layout=layout,
        num_heads=H,
        include=["attention_weights", "query", "key", "value", "head_outputs", "logsumexp", "scores"],
    )
    np.testing.assert_allclose(as_array(answer["output"]), in_layout(output, layout), rtol=1e-12)
    shown = weights if "b" in layout else weights[0]
    if layout in ("dl", "bdl"):
        shown = shown.swapaxes(-1, -2)
    np.testing.assert_allclose(as_array(answer["attention_weights"]), shown, rtol=1e-12)
    for field, array in (("query", QUERY), ("key", KEY), ("value", VALUE), ("head_outputs", output)):
        np.testing.assert_allclose(as_array(answer[field]), array if "b" in layout else array[0], rtol=1e-12)
    assert as_array(answer["logsumexp"]).shape == ((B, H, Q) if "b" in layout else (H, Q))
    assert as_array(answer["scores"]).shape == shown.shape
    metadata = answer["metadata"]
    assert (metadata["batch_size"], metadata["num_heads"]) == (B if "b" in layout else 1, H)
    lengths = tuple(metadata[name] for name in ("query_length", "key_length", "head_dim", "value_dim"))
    assert lengths == (Q, K, D, E)


@pytest.mark.parametrize(("rank", "layout"), [(2, "ld"), (3, "bld"), (4, "bhld")])
def test_the_default_layout_follows_the_rank(client: httpx.Client, rank: int, layout: str) -> None:
    arrays = {
        "query": in_layout(QUERY, layout).tolist(),
        "key": in_layout(KEY, layout).tolist(),
        "value": in_layout(VALUE, layout).tolist(),
    }
    assert np.ndim(arrays["query"]) == rank
    assert post(client, **arrays)["output"] == post(client, **arrays, layout=layout)["output"]


@pytest.mark.parametrize(("layout", "weights"), [("ld", [[0.5, 0.5]]), ("dl", [[0.5], [0.5]])])
def test_one_head_of_one_batch_entry_has_neither_axis(client: httpx.Client, layout: str, weights: list[Any]) -> None:
    tokens = np.zeros((2, 3))
    query, key = (x.tolist() if layout == "ld" else x.T.tolist() for x in (tokens[:1], tokens))
    assert post(client, query=query, key=key, value=key, layout=layout)["attention_weights"] == weights


@pytest.mark.parametrize("layout", ["ld", "dl"])
def test_a_vector_is_one_token_whose_axis_is_dropped(client: httpx.Client, layout: str) -> None:
    key = KEY[0, 0] if layout == "ld" else KEY[0, 0].T
    value = VALUE[0, 0] if layout == "ld" else VALUE[0, 0].T
    include = ["attention_weights", "scores", "logsumexp", "query"]
    answer = post(client, query=QUERY[0, 0, 1].tolist(), key=key.tolist(), value=value.tolist(), layout=layout,
                  include=include)  # fmt: skip
    output, weights = by_definition()
    np.testing.assert_allclose(answer["output"], output[0, 0, 1], rtol=1e-12)
    np.testing.assert_allclose(answer["attention_weights"], weights[0, 0, 1], rtol=1e-12)
    assert np.shape(answer["scores"]) == (K,)
    assert np.shape(answer["logsumexp"]) == (1,)
    assert np.shape(answer["query"]) == (1, D)


def test_a_vector_with_heads_keeps_the_axis_of_heads(client: httpx.Client) -> None:
    answer = post(client, input=[1.0, 2.0], context=[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], num_heads=2)
    assert np.shape(answer["attention_weights"]) == (2, 3)
    assert np.shape(answer["output"]) == (2,)


def test_query_heads_share_key_heads_by_repetition(client: httpx.Client) -> None:
    """With num_kv_heads = 2 of 4, query heads 0 and 1 use key head 0, and query heads 2 and 3 key head 1."""
    query, key, value = (random.normal(size=(1, heads, 3, 2)) for heads in (4, 2, 2))
    grouped = post(client, query=query.tolist(), key=key.tolist(), value=value.tolist())
    repeated = post(
        client,
        query=query.tolist(),
        key=key[:, [0, 0, 1, 1]].tolist(),
        value=value[:, [0, 0, 1, 1]].tolist(),
    )
    np.testing.assert_allclose(grouped["output"], repeated["output"], rtol=1e-14)
    assert grouped["metadata"]["num_kv_heads"] == 2
    packed = post(
        client,
        query=in_layout(query, "bld").tolist(),
        key=in_layout(key, "bld").tolist(),
        value=in_layout(value, "bld").tolist(),
        num_heads=4,
        num_kv_heads=2,
    )
    np.testing.assert_allclose(packed["output"], in_layout(np.array(grouped["output"]), "bld"), rtol=1e-14)
