"""`selected_keys`: the indices of the only keys that a query may see."""

from __future__ import annotations

import tracemalloc
from typing import Any

import httpx
import numpy as np
import pytest

from attention_service import attend, library
from attention_service.attention import plan as plans
from attention_service.attention.outputs import FORWARD
from attention_service.attention.planning import make_plan
from attention_service.attention.spec import AttentionSpec, Output
from attention_service.attention.terms.selected import SelectedKeys
from attention_service.attention.tile import Tile
from attention_service.attention.tiles import whole
from attention_service.errors import InvalidArray
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


def random_options(random: np.random.Generator) -> dict[str, Any]:
    """About half of all options that hide keys, change scores, or are computed from weights."""
    every: dict[str, Any] = {
        "bias": np.where(random.random((B, 1, Q, K)) < 0.2, -np.inf, random.normal(size=(B, 1, Q, K))),
        "alibi_slopes": random.normal(size=H),
        "mask": random.random((1, H, 1, K)) < 0.8,
        "key_mask": random.random((B, K)) < 0.8,
        "query_lengths": random.integers(0, Q + 1, B),
        "key_lengths": random.integers(0, K + 1, B),
        "segment_ids": {"query": random.integers(0, 2, (B, Q)), "key": random.integers(0, 2, (B, K))},
        "window": {"left": int(random.integers(0, K)), "right": int(random.integers(0, K))},
        "chunk_size": int(random.integers(2, K)),
        "is_causal": True,
        "query_offset": random.integers(-2, K, B),
        "softcap": 0.5,
        "scale": random.normal(size=H),
        "sinks": random.normal(size=(H,) if random.random() < 0.5 else (B, H, Q)),
        "rotary": {"base": 100.0},
        "key_norm": {"kind": "layer"},
        "gate": random.normal(size=(B, H, Q, 1)),
        "select_heads": [3, 0],
        "select_queries": [4, 2],
        "average_heads": True,
        "normalization": str(random.choice(["sum", "sigmoid"])),
    }
    chosen = {name: value for name, value in every.items() if random.random() < 0.4}
    if "normalization" in chosen:
        chosen.pop("sinks", None)
    sums = [] if "normalization" in chosen else [name for name in ("logsumexp", "entropy") if random.random() < 0.4]
    return chosen | {"include": ["head_outputs", *sums]}


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> list[Tile]:
    """The tiles whose keys are gathered, which all are that may be, however many keys they have."""
    found: list[Tile] = []
    original = SelectedKeys.gathered

    def counting(term: SelectedKeys, tile: Tile) -> Tile:
        found.append(original(term, tile))
        return found[-1]

    monkeypatch.setattr(SelectedKeys, "gathered", counting)
    monkeypatch.setattr(plans, "PRODUCT_COST", 0)
    monkeypatch.setattr(plans, "GATHER_COST", 0)
    return found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", range(60))
def test_gathered_keys_are_those_of_a_mask(
    seed: int, backend: str, gathered: list[Tile], monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(seed)
    if random.random() < 0.8:
        compute_as_if_large(monkeypatch, int(random.choice([1, 50, 400])))
    shape = tuple(size if random.random() < 0.7 else 1 for size in (B, H, Q))
    indices = random.integers(-1, K, (*shape, int(random.integers(1, 2 * K))))
    options = random_options(random) | {"backend": backend}
    found = attend(**request(), selected_keys=indices, **options)
    assert gathered
    gathered.clear()
    mask = mask_of(indices) & options.pop("mask", True)
    expected = attend(**request(), mask=mask, **options)
    assert not gathered
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-12, atol=1e-13)
    assert found.metadata.fully_masked_rows == expected.metadata.fully_masked_rows


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_gathered_keys_are_those_of_a_mask_in_every_type(backend: str, dtype: Any, gathered: list[Tile]) -> None:
    indices = np.random.default_rng(5).integers(-1, K, (B, H, Q, 4))
    found = attend(**request(), selected_keys=indices, include=[], dtype=dtype, backend=backend)
    assert gathered
    expected = attend(**request(), mask=mask_of(indices), include=[], dtype=dtype, backend=backend)
    assert found.output.dtype == expected.output.dtype
    tolerance = {"float32": 1e-6, "float16": 2e-3, "bfloat16": 2e-2}[dtype]
    np.testing.assert_allclose(found.output.astype(float), expected.output.astype(float), tolerance, tolerance)


@pytest.mark.parametrize("name", FORWARD)
def test_keys_are_gathered_unless_an_output_has_all_of_them(name: Output, gathered: list[Tile]) -> None:
    indices = np.random.default_rng(6).integers(-1, K, (B, H, Q, 4))
    found = attend(**request(), selected_keys=indices, include=[name])
    every = {"attention_weights", "weights_without_sinks", "scores", "scaled_scores", "capped_scores", "masked_scores",
             "hidden_by", "received"}  # fmt: skip
    assert bool(gathered) == (name not in every)
    if name not in ("scores", "scaled_scores", "capped_scores", "hidden_by"):
        expected = attend(**request(), mask=mask_of(indices), include=[name])
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("kv_heads", "per_head", "most"), [(4, False, 6), (1, False, 14), (1, True, 6)])
def test_few_keys_are_gathered_and_many_are_not(kv_heads: int, per_head: bool, most: int) -> None:
    """Copying a large part of the keys for each query takes longer than computing all, less so if heads share them."""
    for count in (1, most, most + 1, 100, 300):
        indices = np.zeros((4 if per_head else 1, Q, count), np.int64)
        key = np.ones((kv_heads, 100, 2))
        spec = AttentionSpec(np.ones((4, Q, 2)), key, key, layout="hld", selected_keys=indices, include=())
        plan = make_plan(spec)
        assert (plan.gathered is not None) == (count <= most)
        assert plan.computed_scores == 4 * Q * (count if count <= most else 100)


LARGE_Q, LARGE_K, SELECTED = 4096, 65_536, 32


def large_request(per_head: bool) -> dict[str, Any]:
    random, heads = np.random.default_rng(7), 2
    return {
        "query": random.normal(size=(heads, LARGE_Q, 16)).astype(np.float32),
        **{name: random.normal(size=(heads, LARGE_K, 16)).astype(np.float32) for name in ("key", "value")},
        "layout": "hld",
        "selected_keys": random.integers(-1, LARGE_K, (heads if per_head else 1, LARGE_Q, SELECTED)),
        "include": ("logsumexp",),
    }


@pytest.mark.parametrize("per_head", [False, True])
def test_memory_grows_with_the_selected_keys_and_not_with_all(per_head: bool) -> None:
    """All scores in float32 would take 2 GiB. The request is estimated to take little, and takes no more."""
    fields = large_request(per_head)
    plan = make_plan(AttentionSpec(**fields | {"query_offset": np.array(0), "is_causal": True}))
    tracemalloc.start()
    try:
        found = attend(**fields, query_offset=0, is_causal=True)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert 4 * plan.score_count == 2**31
    estimate = library.backends().choose("numpy", "cpu").peak_bytes(plan, "cpu", copied=0)
    assert peak < estimate < 2**26
    # Some rows by hand.
    for head, i in ((0, 0), (1, 17), (0, LARGE_Q - 1)):
        indices = np.unique(fields["selected_keys"][head if per_head else 0, i])
        indices = indices[(indices >= 0) & (indices <= i)]
        if not len(indices):
            assert not found.output[head, i].any()
            continue
        scores = fields["key"][head, indices].astype(float) @ fields["query"][head, i] / 4
        assert found["logsumexp"][head, i] == pytest.approx(np.log(np.exp(scores).sum()), rel=1e-5, abs=1e-5)
        weights = np.exp(scores) / np.exp(scores).sum()
        np.testing.assert_allclose(
            found.output[head, i], weights @ fields["value"][head, indices], rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_visible_numbers_of_gathered_keys_count(backend: str, gathered: list[Tile]) -> None:
    """Keys and values that are infinite or NaN do not matter if no query sees them; otherwise they are an error."""
    key, value = np.array([[1.0], [np.inf], [2.0], [np.nan]]), np.array([[1.0], [np.nan], [3.0], [np.inf]])
    fields: dict[str, Any] = {"query": [[1.0], [0.0]], "key": key, "value": value, "include": [], "backend": backend}
    found = attend(**fields, selected_keys=[[2, 2, -1], [0, 2, 3]], key_mask=[True, True, True, False])
    assert found.output.tolist() == [[3.0], [2.0]]
    assert gathered
    with pytest.raises(InvalidArray):  # by a value
        attend(**fields | {"key": np.ones((4, 1))}, selected_keys=[[2, 2, -1], [0, 2, 1]])
    with pytest.raises(InvalidArray):  # by a key
        attend(**fields | {"value": np.ones((4, 1))}, selected_keys=[[2, 2, -1], [0, 2, 3]])


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
        ({"dtype": "bool", "shape": [], "data": "AQ=="}, "invalid_array", "/selected_keys", "at least one"),
        ({"dtype": "int32", "shape": [], "data": "AQAAAA=="}, "invalid_array", "/selected_keys", "at least one"),
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
    term.gathered(whole(plan))
    np.testing.assert_array_equal(term.indices, before)
