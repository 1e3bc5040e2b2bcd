"""The same bits for a batch entry alone and in any batch, whatever the request asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

from attention_service import attend
from attention_service.backends.numpy.backend import NumpyBackend
from attention_service.errors import InvalidRequest
from attention_service.library import backends, calls
from tests.conftest import app, serving
from tests.helpers.backends import compute_as_if_large
from tests.helpers.batches import aligned, alone, draw, whole
from tests.helpers.wire import SAFETENSORS, read, write

# Three times as many requests as hypothesis tries for a property: 2,000 of those by `make test-deep`. A fifth of them
# differed before the decisions about a batch entry were left to its own numbers.
EXAMPLES = min(3 * settings().max_examples, 2000)


# Answers a request.
Ask = Callable[..., Mapping[str, Any]]


def flat(result: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """All arrays of a result by name."""
    found: dict[str, np.ndarray] = {}
    for name in result:
        parts = result[name]
        found |= {f"{name}.{key}": x for key, x in parts.items()} if isinstance(parts, dict) else {name: parts}
    return found


def differing(fields: dict[str, Any], entries: int, backend: str, ask: Ask) -> list[str]:
    """What differs between entries in their batch and alone."""
    batch = flat(ask(**whole(fields), backend=backend))
    found: list[str] = []
    for entry in range(entries):
        one = alone(fields, entry)
        if backend == "torch":
            one = aligned(one, np.dtype(fields["dtype"]))
        for name, array in flat(ask(**one, backend=backend)).items():
            axis = fields["layout"].index("b") if name == "output" else 0
            if not np.array_equal(np.take(batch[name], [entry], axis), array):
                found.append(f"{name} of entry {entry}")
    return found


def check(seed: int, count: int, backend: str = "numpy", ask: Ask = attend) -> None:
    """Compare random batches with their entries alone."""
    compared = 0
    for number in range(count):
        fields, entries = draw(np.random.default_rng([seed, number]), is_aligned=backend == "torch")
        if backend == "torch":
            fields = aligned(fields, np.dtype(fields["dtype"]))
        try:
            found = differing(fields, entries, backend, ask)
        except InvalidRequest:  # a number that the type cannot hold
            continue
        assert not found, (seed, number, found, {name: str(value)[:60] for name, value in fields.items()})
        compared += 1
    assert compared > 0.9 * count


def test_random_requests() -> None:
    check(1, EXAMPLES)


def test_random_requests_over_http() -> None:
    with serving(app()) as client:

        def ask(**fields: Any) -> dict[str, Any]:
            headers = {"Content-Type": SAFETENSORS, "Accept": SAFETENSORS}
            response = client.post("/attention", content=write(fields, SAFETENSORS), headers=headers)
            if response.status_code == 422:
                raise InvalidRequest
            assert response.status_code == 200, response.text
            found = read(response.content, SAFETENSORS)
            return {name: array for name, array in found.items() if isinstance(array, np.ndarray)}

        check(5, EXAMPLES if EXAMPLES == 2000 else EXAMPLES // 5, ask=ask)


@pytest.mark.parametrize("tile", [16, 1000])
def test_in_tiles_and_blocks(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    compute_as_if_large(monkeypatch, tile)
    check(2, EXAMPLES // 5)


def test_with_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles are cut as if four threads shared each entry, and each product."""
    numpy = backends().choose("numpy", "cpu")
    assert isinstance(numpy, NumpyBackend)
    monkeypatch.setattr(calls, "BLAS_ALONE", inf)
    monkeypatch.setattr(calls, "_kept", {})
    monkeypatch.setattr(numpy, "tiling", replace(numpy.tiling, workers=4))
    for module in ("attention.tiles", "backends.numpy.backend"):
        monkeypatch.setattr(f"attention_service.{module}.SHARED_FLOPS", 10_000)
    monkeypatch.setattr("attention_service.attention.tiles.SHARED_ROWS", 8)
    check(3, EXAMPLES // 5)


@pytest.mark.torch
def test_random_requests_with_torch() -> None:
    """Of which every matrix begins at a multiple of 64 bytes: see docs/exactness.md."""
    check(4, EXAMPLES if EXAMPLES == 2000 else EXAMPLES // 3, "torch")


@pytest.mark.torch
def test_maps_with_torch() -> None:
    random = np.random.default_rng(0)
    tokens = aligned(random.normal(size=(5, 32, 64)), np.dtype(np.float64))
    maps = {name: {"weight": aligned(random.normal(size=(64, 64)), tokens.dtype)} for name in ("query", "key", "value")}
    asked: dict[str, Any] = {"projection": maps, "num_heads": 2, "include": list(maps), "backend": "torch"}
    batch = attend(input=tokens, **asked)
    for entry in range(5):
        one = attend(input=tokens[entry : entry + 1], **asked)
        assert all(np.array_equal(one[name], batch[name][entry : entry + 1]) for name in maps)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_an_entry_that_is_small_in_a_batch_that_is_not(dtype: str) -> None:
    """Alone it takes the small path, and so it did in a batch that is small."""
    arrays = [np.random.default_rng(i).normal(size=(3, 4, 64, 32)).astype(dtype) for i in range(3)]
    batch = attend(*arrays)
    for entry in range(3):
        one = attend(*(array[entry : entry + 1] for array in arrays))
        assert (one.metadata.kernel, batch.metadata.kernel) == ("small", "dense")
        assert np.array_equal(one.output, batch.output[entry : entry + 1])


@pytest.mark.parametrize("factor", [1.0, 2.0, 6.0, 8.0, 30.0])
def test_numbers_of_another_entry(factor: float) -> None:
    """Whether the largest score is subtracted, and whether a plan is small, depends on no other entry."""
    arrays = [np.random.default_rng(i).normal(size=(2, 2, 16, 8)).astype(np.float32) for i in range(3)]
    alone_before = attend(*(array[:1] for array in arrays), include=["attention_weights"])
    for array in arrays:
        array[1] *= factor
    batch = attend(*arrays, include=["attention_weights"])
    assert np.array_equal(batch.output[:1], alone_before.output)
    assert np.array_equal(batch.attention_weights[:1], alone_before.attention_weights)


def test_non_finite_numbers_of_another_entry() -> None:
    arrays = [np.random.default_rng(i).normal(size=(3, 2, 16, 8)) for i in range(3)]
    arrays[1][1, :, 5:], arrays[2][1, :, 5:] = np.nan, np.inf
    lengths = np.array([16, 5, 16])
    batch = attend(*arrays, key_lengths=lengths)
    for entry in range(3):
        one = slice(entry, entry + 1)
        assert np.array_equal(
            attend(*(array[one] for array in arrays), key_lengths=lengths[one]).output, batch.output[one]
        )


def test_entries_of_all_sizes_whose_keys_may_be_the_queries() -> None:
    """Alone, the keys of every other entry are the very array of its queries, whose product BLAS rounds otherwise."""
    options: dict[str, Any] = {"is_causal": True, "include": ["attention_weights", "scores"]}
    query, key, value = (np.random.default_rng(i).normal(size=(6, 1, 40, 16)).astype(np.float32) for i in range(3))
    query *= np.float32(10) ** np.arange(6, dtype=np.float32)[:, None, None, None]
    key[1::2] = query[1::2]
    batch = attend(query, key, value, **options)
    for entry in range(6):
        one = query[entry : entry + 1]
        found = attend(one, one if entry % 2 else key[entry : entry + 1], value[entry : entry + 1], **options)
        for name in ("output", "attention_weights", "scores"):
            assert np.array_equal(batch[name][entry : entry + 1], found[name]), (entry, name)


@pytest.mark.torch
def test_a_norm_of_outputs_with_torch() -> None:
    """Of which a kernel computes one entry, as the scores of the other are too large for it."""
    random = np.random.default_rng(0)
    dtype = np.dtype(np.float32)
    query, key, value = (aligned(random.normal(size=(2, 48, 288)), dtype) for _ in range(3))
    key[1] *= 1e30
    asked: dict[str, Any] = {"num_heads": 6, "output_norm": {"over": "all"}, "include": [], "backend": "torch"}
    batch = attend(query, key, value, **asked)
    assert batch.metadata.kernel == "dense+scaled_dot_product_attention"
    for entry in range(2):
        one = attend(*(array[entry : entry + 1] for array in (query, key, value)), **asked)
        np.testing.assert_array_equal(one.output, batch.output[entry : entry + 1])
