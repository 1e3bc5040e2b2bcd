"""Relative keys: numbers far from the keys, memory, and small numbers, against NumPy written by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from attention_service import attend
from attention_service.attention.cost import copied_bytes
from attention_service.attention.planning import make_plan
from attention_service.attention.spec import AttentionSpec, RelativeKeys
from attention_service.backends.numpy.backend import NumpyBackend
from tests.memory.test_options import OBJECTS, peak_of


@pytest.mark.parametrize(
    ("offset", "first"),
    [(0, -4), (3, 2), (1000, -20), (1000, -995), (-1000, 990), (-1000, 20), (2**62, -(2**62)), (-(2**62), 2**62 + 7)],
)
def test_keys_are_those_of_the_distances_wherever_the_queries_are(offset: int, first: int) -> None:
    random = np.random.default_rng(0)
    query, key, relative = (random.normal(size=(length, 3)) for length in (5, 10, 10))
    result = attend(
        query, key, key, query_offset=offset, relative_keys={"key": relative, "first": first}, include=["scores"]
    )
    for i in range(5):
        for j in range(10):
            place = max(0, min(9, j - i - offset - first))  # in Python's integers
            assert result.scores[i, j] == pytest.approx(query[i] @ (key[j] + relative[place]), abs=1e-12)


def request(b: int, h: int, q: int, k: int, distances: int, **options: Any) -> AttentionSpec:
    def zeros(*shape: int) -> np.ndarray:
        return np.zeros(shape, np.float32)

    keys = RelativeKeys(key=zeros(h, distances, 8), first=-(distances // 2))
    arrays = {"query": zeros(b, h, q, 8), "key": zeros(b, h, k, 8), "value": zeros(b, h, k, 8)}
    return AttentionSpec(**arrays, layout="bhld", relative_keys=keys, include=(), **options)  # type: ignore[arg-type]  # layout


REQUESTS = {
    "many distances": lambda: request(1, 8, 1, 1000, 20_000, query_offset=np.array(0)),
    "an offset of each entry": lambda: request(256, 1, 1, 16, 40_000, query_offset=np.arange(256) * 150 - 20_000),
    "ragged": lambda: request(64, 4, 1, 2048, 4095, query_offset=np.arange(64) * 32),
    "selected keys": lambda: request(1, 1, 1024, 8192, 8192, query_offset=np.array(0),
                                     selected_keys=np.arange(1024)[:, None] * 8),
}  # fmt: skip


@pytest.mark.parametrize("name", REQUESTS)
def test_distances_that_are_far_apart_are_within_the_estimate(name: str) -> None:
    spec = REQUESTS[name]()
    plan, backend = make_plan(spec), NumpyBackend(threads=1)
    estimate = backend.peak_bytes(plan, "cpu", copied_bytes(plan, spec))
    assert peak_of(lambda: backend.run(plan, spec, spec.sources)) <= estimate + OBJECTS


def test_squares_that_underflow_do_not_hide_what_is_added() -> None:
    """(0 + 1e18) · 1e-23 · 1e10 and · 2e-23: the scores are 1e5 and 2e5."""
    result = attend(
        query=np.zeros((1, 1), np.float32),
        key=np.zeros((2, 1), np.float32),
        value=np.array([[1], [2]], np.float32),
        query_offset=0,
        scale=1e10,
        relative_keys={
            "key": np.array([[1e-23], [2e-23]], np.float32),
            "first": 0,
            "query_bias": np.full((1, 1), 1e18, np.float32),
        },
    )
    assert result.output.tolist() == [[2]]


def test_products_with_relative_keys_count_twice() -> None:
    """2 · 3 scores of 4 + 5 products, of 4 + 4 + 5 with relative keys; each a multiplication and an addition."""
    numbers = np.zeros((1, 1, 3, 5))
    plain = AttentionSpec(query=numbers[..., :2, :4], key=numbers[..., :4], value=numbers, query_offset=np.array(0))
    relative = plain._replace(relative_keys=RelativeKeys(key=np.zeros((4, 4)), first=-2))
    assert [make_plan(spec).flops for spec in (plain, relative)] == [6 * (2 * 9 + 8), 6 * (2 * 13 + 8)]
