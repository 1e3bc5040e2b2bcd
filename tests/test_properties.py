"""Properties of every attention, checked by hypothesis on both backends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_service import attend
from attention_service.backends.threads import TilePool
from attention_service.library import backends
from tests.helpers.backends import BACKENDS, compute_as_if_large

pytestmark = [pytest.mark.parametrize("backend", BACKENDS)]


def assert_close(ours: np.ndarray, theirs: np.ndarray) -> None:
    """Assert that both are equal up to the rounding of sums in another order."""
    np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-13)


@st.composite
def tensors(draw: st.DrawFn) -> dict[str, Any]:
    """query (h, q, d), key (g, k, d), value (g, k, e), and options that are valid with all others."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    g, groups, q, k, d, e = (draw(st.integers(1, most)) for most in (2, 3, 6, 6, 8, 5))
    request: dict[str, Any] = {
        "query": random.normal(size=(g * groups, q, d)) * 2,
        "key": random.normal(size=(g, k, d)),
        "value": random.normal(size=(g, k, e)),
        "layout": "hld",
    }
    if draw(st.booleans()):
        request["mask"] = random.random((g * groups, q, k)) < 0.7
    if draw(st.booleans()):
        request["softcap"] = 3.0
    if draw(st.booleans()):
        request["bias"] = random.normal(size=(q, k))
    if draw(st.booleans()):
        request["sinks"] = random.normal(size=g * groups)
    return request


@given(request=tensors(), seed=st.integers(0, 1000))
def test_permuting_tokens_permutes_outputs(backend: str, request: dict[str, Any], seed: int) -> None:
    q, k = request["query"].shape[1], request["key"].shape[1]
    random = np.random.default_rng(seed)
    rows, columns = random.permutation(q), random.permutation(k)
    moved = request | {"query": request["query"][:, rows]}
    moved |= {name: request[name][:, columns] for name in ("key", "value")}
    moved |= {name: request[name][..., rows, :][..., columns] for name in ("mask", "bias") if name in request}
    first, second = attend(**request, backend=backend), attend(**moved, backend=backend)
    assert_close(second.output, first.output[:, rows])


@given(request=tensors(), constant=st.floats(-50, 50))
def test_adding_a_constant_to_all_scores_of_a_row_changes_nothing(
    backend: str, request: dict[str, Any], constant: float
) -> None:
    request = {name: value for name, value in request.items() if name != "sinks"}
    q, k = request["query"].shape[1], request["key"].shape[1]
    bias = request.get("bias", np.zeros((q, k)))
    added = request | {"bias": bias + constant * np.arange(1, q + 1)[:, None]}
    first, second = (
        attend(**r, include=["attention_weights"], backend=backend) for r in (request | {"bias": bias}, added)
    )
    np.testing.assert_allclose(second["attention_weights"], first["attention_weights"], rtol=1e-10, atol=1e-13)


@given(request=tensors())
def test_a_mask_that_hides_nothing_changes_nothing(backend: str, request: dict[str, Any]) -> None:
    request = {name: value for name, value in request.items() if name != "mask"}
    (h, q), k = request["query"].shape[:2], request["key"].shape[1]
    everything = {
        "mask": np.full((h, q, k), True),
        "key_mask": np.full(k, True),
        "window": {"left": q + k, "right": q + k},
        "query_offset": 0,
        "key_lengths": k,
        "query_lengths": q,
        "segment_ids": {"query": [3] * q, "key": [3] * k},
    }
    include = ["attention_weights", "logsumexp"]
    plain = attend(**request, include=include, backend=backend)
    masked = attend(**request, **everything, include=include, backend=backend)
    for name in ("output", *include):
        np.testing.assert_allclose(masked[name], plain[name], rtol=1e-15, atol=0)


@given(request=tensors(), cut=st.integers(1, 5))
def test_attention_over_two_parts_of_the_keys_merges_by_logsumexp(
    backend: str, request: dict[str, Any], cut: int
) -> None:
    """Kernels that split the keys do so. Without sinks, which would count twice."""
    request = {name: value for name, value in request.items() if name != "sinks"}
    k = request["key"].shape[1]
    cut = min(cut, k - 1)
    if cut < 1:
        return
    parts = []
    for columns in (slice(0, cut), slice(cut, k)):
        part = request | {name: request[name][:, columns] for name in ("key", "value")}
        part |= {name: request[name][..., columns] for name in ("mask", "bias") if name in request}
        parts.append(attend(**part, include=["logsumexp"], backend=backend))
    whole = attend(**request, include=["logsumexp"], backend=backend)
    logs = np.stack([part["logsumexp"] for part in parts])
    with np.errstate(all="ignore"):
        merged = np.logaddexp(*logs)
        shares = np.where(np.isfinite(logs), np.exp(logs - merged), 0)
    assert_close(merged, whole["logsumexp"])
    output = sum(share[..., None] * part.output for share, part in zip(shares, parts, strict=True))
    assert_close(output, whole.output)


@given(
    seed=st.integers(0, 2**32 - 1),
    tokens=st.integers(2, 8),
    cut=st.integers(1, 7),
    rotary=st.booleans(),
    window=st.none() | st.integers(0, 4),
)
def test_prefill_and_decode_with_a_cache_equal_one_pass(
    backend: str, seed: int, tokens: int, cut: int, rotary: bool, window: int | None
) -> None:
    cut = min(cut, tokens - 1)
    random = np.random.default_rng(seed)
    inputs = random.normal(size=(2, tokens, 8))
    options: dict[str, Any] = {
        "projection": {
            name: {"kernel": random.normal(size=(8, width)) / 3}
            for name, width in (("query", 8), ("key", 4), ("value", 4))
        },
        "num_heads": 4,
        "num_kv_heads": 2,
        "is_causal": True,
        "key_norm": {"weight": random.normal(size=2)},
        "alibi_slopes": random.random(4),
        "backend": backend,
    }
    if rotary:
        options["rotary"] = {"base": 100.0}
    if window is not None:
        options["window"] = {"left": window}
    whole = attend(input=inputs, **options, include=["present_key", "present_value"])
    cache = attend(input=inputs[:, :cut], **options, include=["present_key", "present_value"])
    outputs = [cache.output]
    for t in range(cut, tokens):
        past = {"past_key": cache["present_key"], "past_value": cache["present_value"]}
        cache = attend(input=inputs[:, t : t + 1], **options, **past, include=["present_key", "present_value"])
        outputs.append(cache.output)
    assert_close(np.concatenate(outputs, axis=1), whole.output)
    for name in ("present_key", "present_value"):
        assert_close(cache[name], whole[name])


@given(request=tensors(), top_k=st.integers(1, 7))
def test_top_k_are_the_largest_of_the_full_weights(backend: str, request: dict[str, Any], top_k: int) -> None:
    full = attend(**request, backend=backend)["attention_weights"]
    top = attend(**request, top_k=top_k, backend=backend)["top_weights"]
    order = np.argsort(-full, axis=-1, kind="stable")[..., :top_k]
    np.testing.assert_array_equal(top["indices"], order)
    np.testing.assert_array_equal(top["values"], np.take_along_axis(full, order, axis=-1))


@given(
    keys=st.sampled_from((128, 129, 300)),
    distinct=st.sampled_from((1, 2, 20, 10_000)),
    top_k=st.integers(1, 40),
    seed=st.integers(0, 99),
)
def test_equal_weights_of_many_keys_are_in_the_order_of_the_keys(
    backend: str, keys: int, distinct: int, top_k: int, seed: int
) -> None:
    bias = np.random.default_rng(seed).integers(0, distinct, (3, keys)).astype(float)
    request: dict[str, Any] = {"query": np.zeros((3, 2)), "key": np.zeros((keys, 2)), "value": np.ones((keys, 1))}
    top = attend(**request, bias=bias / distinct, is_causal=True, query_offset=keys - 3, top_k=top_k, backend=backend)
    for row, found in enumerate(top["top_weights"]["indices"]):
        visible = range(keys - 2 + row)
        assert found.tolist() == sorted(visible, key=lambda j: (-bias[row, j], j))[:top_k]


@given(request=tensors(), heads=st.sets(st.integers(0, 5), min_size=1), rows=st.sets(st.integers(0, 5), min_size=1))
def test_selections_and_averages_are_of_the_full_weights(
    backend: str, request: dict[str, Any], heads: set[int], rows: set[int]
) -> None:
    h, q = request["query"].shape[:2]
    chosen_heads, chosen_rows = sorted(x for x in heads if x < h) or [0], sorted(x for x in rows if x < q) or [0]
    include = ["attention_weights", "masked_scores", "logsumexp", "entropy", "received"]
    full = attend(**request, include=include, backend=backend)
    selection: dict[str, Any] = {"select_heads": np.array(chosen_heads), "select_queries": np.array(chosen_rows)}
    part = attend(**request, include=include, backend=backend, **selection)
    for name in ("attention_weights", "masked_scores", "logsumexp", "entropy"):
        np.testing.assert_array_equal(part[name], full[name][chosen_heads][:, chosen_rows])
    np.testing.assert_array_equal(part["received"], full["received"][chosen_heads])
    np.testing.assert_array_equal(part.output, full.output)
    average = attend(**request, include=include, average_heads=True, backend=backend, **selection)
    assert_close(average["attention_weights"], full["attention_weights"][chosen_heads].mean(axis=0)[chosen_rows])
    assert_close(average["received"], full["received"][chosen_heads].mean(axis=0))
    assert_close(full["received"], full["attention_weights"].sum(axis=-2))


@given(
    request=tensors(),
    size=st.sampled_from([1, 5, 20, 60]),
    choose=st.booleans(),
    banded=st.booleans(),
    places=st.sets(st.integers(0, 5), min_size=2, max_size=2),
)
def test_tiles_do_not_change_the_result(
    backend: str, request: dict[str, Any], size: int, choose: bool, banded: bool, places: set[int]
) -> None:
    """The result is the same for any size of tiles, and with or without the tiles that masks hide.

    places: of the two variants that are tried
    """
    (h, q), k = request["query"].shape[:2], request["key"].shape[1]
    include = ["attention_weights", "logsumexp", "entropy", "received"] + ["scores", "masked_scores"] * choose
    batch = {name: np.stack([request[name], -request[name]]) for name in ("query", "key", "value")}
    options: dict[str, Any] = request | batch | {"layout": "bhld", "include": include, "backend": backend}
    if "mask" in request:
        options["mask"] = request["mask"][None]
    if banded:
        options |= {"is_causal": True, "window": {"left": 2}, "query_offset": [0, 2], "alibi_slopes": np.ones(h)}
    variants: list[dict[str, Any]] = [
        {},
        {"select_heads": np.arange(h)[::-1][:2], "select_queries": np.arange(q)[::2], "key_lengths": k - 1},
        {"average_heads": True, "segment_ids": {"query": [1] * q, "key": np.arange(k) % 2}},
        {"top_k": 2, "query_lengths": [q - 1, q], "key_mask": np.arange(k) != 1},
        {"include": ["logsumexp"], "query_lengths": [q - 1, q], "key_lengths": [k, k - 1], "sinks": np.ones(h)},
        {"include": [], "softcap": 2.0},
    ]
    for variant in (variants[place] for place in sorted(places)):
        whole = attend(**options | variant)
        with pytest.MonkeyPatch.context() as patch:
            compute_as_if_large(patch, size)
            cut = attend(**options | variant)
        assert whole.arrays.keys() == cut.arrays.keys()
        for name, array in whole.arrays.items():
            for part, ours in array.items() if isinstance(array, dict) else [("", array)]:
                assert_close(cut[name][part] if part else cut[name], ours)
        assert cut.metadata == whole.metadata


@settings(max_examples=20)
@given(request=tensors())
def test_threads_do_not_change_the_result(backend: str, request: dict[str, Any]) -> None:
    include = ["attention_weights", "logsumexp", "received"]
    alone = attend(**request, include=include, backend=backend)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends().choose("numpy", "cpu"), "pool", TilePool(3))
        compute_as_if_large(patch, 3)
        together = attend(**request, include=include, backend=backend)
    for name in ("output", *include):
        assert_close(together[name], alone[name])
