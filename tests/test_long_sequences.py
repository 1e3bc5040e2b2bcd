"""Tiles: a long sequence is computed within its deadline, and without memory for each of its tiles."""

from __future__ import annotations

import tracemalloc
from collections import deque
from itertools import count
from typing import Any

import numpy as np
import pytest

from attention_service.attention.planning import make_plan
from attention_service.attention.spec import AttentionSpec
from attention_service.backends.numpy.backend import NumpyBackend
from attention_service.backends.threads import TilePool


class OutOfTimeError(Exception):
    """The deadline of a request."""


OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"is_causal": True},
    "logsumexp": {"include": ("logsumexp",)},
    "entropy": {"include": ("entropy",)},
    "sigmoid": {"normalization": "sigmoid"},
    "top_k": {"top_k": 1, "include": ("attention_weights",)},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_long_sequence_ends_at_its_deadline(name: str, threads: int) -> None:
    """Not after a whole tile, of 256 queries and two million keys."""
    keys, backend = 2**21, NumpyBackend(threads=threads)
    long = np.zeros((keys, 1), np.float16)
    spec = AttentionSpec(input=long, include=())._replace(**OPTIONS[name])
    calls = count(1)

    def check() -> None:
        if next(calls) >= 4:
            raise OutOfTimeError

    with pytest.raises(OutOfTimeError):
        backend.run(make_plan(spec), spec, spec.sources, check)
    assert next(calls) <= 5 + threads  # a thread ends at its next check


def test_a_tile_is_checked_for_each_block_of_its_keys() -> None:
    long, checks = np.zeros((2**17, 1), np.float32), []
    spec = AttentionSpec(query=long[:256], key=long, value=long, include=())
    backend = NumpyBackend(threads=1)
    backend.run(make_plan(spec), spec, spec.sources, lambda: checks.append(1))
    scores = 256 * 2**17
    assert len(checks) >= scores // backend.tiling.scores // 2


@pytest.mark.parametrize("threads", [1, 2])
def test_millions_of_tiles_take_no_memory(threads: int) -> None:
    """Neither all tiles nor all of their results exist at once."""
    pool = TilePool(threads)
    tracemalloc.start()
    try:
        deque(pool.run(lambda tile: (tile, bytes(100)), (object() for _ in range(10**5))), maxlen=0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * 2**20
