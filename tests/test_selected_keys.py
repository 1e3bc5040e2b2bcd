"""`selected_keys`: the indices of the only keys that a query may see."""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
import pytest

from service import attend
from service.attention.plan import make_plan
from service.attention.spec import AttentionSpec
from service.attention.terms import SelectedKeys
from service.attention.tiles import whole
from tests.helpers.backends import BACKENDS, compute_as_if_large

B, H, G, Q, K, PAST = 2, 4, 2, 5, 9, 3


def request() -> dict[str, Any]:
    random = np.random.default_rng(4)
    shapes = {"query": (B, H, Q, 4), "key": (B, G, K - PAST, 4), "value": (B, G, K - PAST, 4)}
    past = {"past_key": (B, G, PAST, 4), "past_value": (B, G, PAST, 4)}
    return {name: random.normal(size=shape) for name, shape in (shapes | past).items()}


def mask_of(indices: np.ndarray) -> np.ndarray:
    """The mask that says the same, one index at a time."""
    full = np.broadcast_to(indices, (B, H, Q, indices.shape[-1]))
    mask = np.zeros((B, H, Q, K), bool)
    for b, h, q, n in np.ndindex(full.shape):
        if full[b, h, q, n] >= 0:
            mask[b, h, q, full[b, h, q, n]] = True
    return mask


def test_by_hand(client: httpx.Client) -> None:
    """Of keys with the same score, a query weighs those that it may see alike."""
    fields = {
        "query": [[0], [0], [0]],
        "key": [[0], [0], [0], [0]],
        "value": [[1], [2], [4], [8]],
        "selected_keys": [[3, 0, 3, 3], [-1, 2, -1, -1], [-1, -1, -1, -1]],
    }
    answer = client.post("/attention", json=fields).json()
    assert answer["attention_weights"] == [[0.5, 0, 0, 0.5], [0, 0, 1, 0], [0, 0, 0, 0]]
    assert answer["output"] == [[4.5], [4], [0]]
    assert answer["metadata"]["fully_masked_rows"] == 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tile", [None, 1, 7, 2**20])
@pytest.mark.parametrize("shape", [(B, H, Q), (B, 1, Q), (1, H, Q), (1, 1, Q), (1, 1, 1), (Q,)])
@pytest.mark.parametrize("count", [1, 4, 2 * K])
def test_indices_are_a_mask(
    count: int, shape: tuple[int, ...], tile: int | None, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if tile is not None:
        compute_as_if_large(monkeypatch, tile)
    random = np.random.default_rng(count)
    indices = random.integers(-1, K, (*shape, count)).astype(random.choice(["int32", "int64"]))
    options: dict[str, Any] = {"is_causal": True, "window": {"left": 6}, "key_lengths": [K, K - 2], "backend": backend}
    for include in (["attention_weights", "logsumexp", "masked_scores"], ["received"], []):
        found = attend(**request(), selected_keys=indices, include=include, **options)
        expected = attend(**request(), mask=mask_of(indices), include=include, **options)
        for name in expected:
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-13, atol=1e-14)
        assert found.metadata.fully_masked_rows == expected.metadata.fully_masked_rows


def test_ranks_are_those_of_masks() -> None:
    one = attend([1.0], [[1.0], [2.0]], [[1.0], [3.0]], selected_keys=[1, -1])
    assert one.output.tolist() == [3]
    tokens = np.ones((2, 3, 4))
    heads = attend(input=tokens, num_heads=4, selected_keys=np.array([[[0]], [[1]], [[2]], [[-1]]]))
    assert heads["attention_weights"][0, :, 0].tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 0]]


@pytest.mark.parametrize(
    ("selected", "code", "pointer", "expected"),
    [
        ([[0], [2]], "invalid_array", "/selected_keys/1/0", "an integer from -1 to 1"),
        ([[-2], [0]], "invalid_array", "/selected_keys/0/0", "an integer from -1 to 1"),
        ([[0.5], [0]], "invalid_array", "/selected_keys", "integers"),
        ([[True], [False]], "invalid_array", "/selected_keys", "integers"),
        ([[0], [0], [0]], "shape_mismatch", "/selected_keys", "(2, 1), or 1 on any axis"),
        ([[[0]], [[0]]], "shape_mismatch", "/selected_keys", "broadcasts to (2, 1), or (b, h, q, n)"),
        ([[], []], "invalid_array", "/selected_keys", "at least one"),
        (3, "invalid_array", "/selected_keys", "an array"),
    ],
)
def test_wrong_indices_are_refused(selected: Any, code: str, pointer: str, expected: str, client: httpx.Client) -> None:
    response = client.post("/attention", json={"input": [[1, 0], [0, 1]], "selected_keys": selected})
    assert response.status_code == 422
    [error] = response.json()["errors"]
    assert error["pointer"].startswith(pointer)
    assert expected in error["expected"]
    assert response.json()["code"] == code


def test_what_is_not_selected_cannot_poison() -> None:
    value = np.array([[np.nan], [4.0], [np.inf]])
    found = attend(np.ones((2, 1)), np.ones((3, 1)), value, selected_keys=[[1, 1], [-1, -1]])
    assert found.output.tolist() == [[4.0], [0.0]]


def test_the_plan_keeps_the_indices_as_they_are() -> None:
    """No mask of the size of the scores exists before a tile is computed, and no copy of the indices."""
    indices = np.zeros((6, 2), np.int64)
    plan = make_plan(AttentionSpec(input=np.ones((6, 2)), selected_keys=indices))
    [term] = plan.terms
    assert isinstance(term, SelectedKeys)
    assert np.may_share_memory(term.indices, indices)
    before = term.indices.copy()
    term.visible(whole(plan), np.asarray)
    np.testing.assert_array_equal(term.indices, before)
