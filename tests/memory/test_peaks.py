"""Each part of the estimate against the allocations of a request that needs little else, as tracemalloc counts them.

`test_estimates.py` measures whole requests in processes, where only some megabytes of a difference can be told.
"""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest

from attention_service.attention.cost import SMALL, copied_bytes
from attention_service.attention.spec import ROLES
from attention_service.backends.registry import Backends
from attention_service.codecs.table import CODECS
from attention_service.pipeline.prepare import make_spec_and_plan
from tests.helpers.wire import SAFETENSORS, write
from tests.memory.cases import F2, F8, NONE, digits, heads, infinite, normal

# How much more than its estimate a request may allocate: numbers of each query are not counted.
ABOVE: Final = 1.08
Fields = dict[str, Any]


def single(q: int, k: int, d: int, of: Any = np.float32, **more: Any) -> Fields:
    """A request of one head that returns nothing but the output. of: the type of its arrays"""
    return heads(1, 1, q, k, d, of) | NONE | {"query_offset": np.array(0)} | more


def square(**more: Any) -> Fields:
    """A request of one head with 700 queries and keys: its scores are one tile of 1.9 MiB."""
    return single(700, 700, 4, **more)


def past(of: Any, **more: Any) -> Fields:
    """A request of four new tokens after 20,000."""
    arrays = {name: normal(1, 1, 20_000, 64, dtype=of) for name in ("past_key", "past_value")}
    return {**heads(1, 1, 4, 4, 64, of), **NONE, **arrays, **more}


def mapped(role: str, out: int, features: int, of: Any = np.float32, **lengths: int) -> Fields:
    """A request with a map from so many features. lengths: of query and key"""
    arrays = {name: normal(lengths.get("key" if name == "value" else name, 8), 16, dtype=of) for name in ROLES}
    field = "query" if role == "gate" else role
    if field in arrays:
        arrays[field] = normal(len(arrays[field]), features, dtype=of)
    projection = {role: {"weight": normal(out, features, dtype=of)}}
    if role == "gate":
        projection["query"] = {"weight": normal(16, features, dtype=of)}
    return {**arrays, **NONE, "query_offset": np.array(0), "projection": projection}


# Requests, and how many times as large as their peak an estimate may be.
CASES: Final[dict[str, tuple[float, Callable[[], Fields]]]] = {
    "the scaled query": (1.0, lambda: single(60_000, 4, 16)),
    "the query, scaled later": (1.0, lambda: single(60_000, 4, 16, include=["scores"])),
    "a query of halves": (1.0, lambda: single(60_000, 4, 16, F2)),
    "keys of halves": (1.0, lambda: single(4, 60_000, 16, F2)),
    "keys of two types": (1.0, lambda: single(4, 60_000, 16, F8, dtype="float32")),
    "outputs of wide values": (1.0, lambda: single(6000, 8, 2) | {"value": normal(1, 1, 8, 256)}),
    "an output map": (1.95, lambda: mapped("output", 512, 16, query=3000)),
    "an output map of halves": (1.3, lambda: mapped("output", 512, 16, F2, query=3000)),
    "a map of halves": (1.1, lambda: mapped("key", 16, 256, F2, key=3000)),
    "a map of many halves": (1.1, lambda: mapped("key", 16, 9000, F2)),
    "a gate": (
        1.35,
        lambda: heads(4, 4, 6000, 8, 64) | NONE | {"gate": normal(1, 4, 6000, 64), "query_offset": np.array(0)},
    ),
    "a gate beside outputs of heads": (
        1.7,
        lambda: (
            heads(4, 4, 6000, 8, 64)
            | {"include": ["head_outputs"], "gate": normal(1, 4, 6000, 64), "query_offset": np.array(0)}
        ),
    ),
    "a map of gates": (1.0, lambda: mapped("gate", 16, 16, query=20_000)),
    "a map of gates of halves": (2.1, lambda: mapped("gate", 16, 256, F2, query=3000)),
    "a past": (1.0, lambda: past(np.float32)),
    "a past of halves": (1.0, lambda: past(F2)),
    "a past of two types": (1.0, lambda: past(F8, dtype="float32")),
    "a past of the same length": (
        1.25,
        lambda: (
            past(np.float32)
            | {name: normal(1, 1, 20_000, 64) for name in ("key", "value")}
            | {"query_offset": np.array(0)}
        ),
    ),
    "a clip": (1.0, lambda: single(4, 20_000, 64, clip_qkv=0.5)),
    "a norm": (1.9, lambda: single(4, 20_000, 64, key_norm={})),
    "two steps": (1.35, lambda: single(4, 20_000, 64, key_norm={}, rotary={})),
    "a norm of halves": (1.35, lambda: single(4, 20_000, 64, F2, key_norm={})),
    "a bias": (1.15, lambda: heads(8, 8, 700, 700, 4) | NONE | {"bias": normal(8, 700, 700)}),
    "a bias that hides": (1.1, lambda: square(bias=infinite(700, 700).astype(np.float32))),
    "a bias of another type": (1.7, lambda: square(bias=normal(700, 700, dtype=F8), dtype="float32")),
    "a mask": (1.55, lambda: square(mask=digits(700, 700) > 4)),
    "a mask of each head": (1.55, lambda: heads(8, 8, 250, 250, 4) | NONE | {"mask": digits(8, 250, 250) > 4}),
    "a band": (1.3, lambda: square(is_causal=True)),
    "chunks": (1.9, lambda: square(chunk_size=100)),
    "segments": (1.3, lambda: square(segment_ids={"query": digits(700), "key": digits(700)})),
    "linear biases": (1.65, lambda: square(alibi_slopes=normal(1))),
    "selected keys": (1.45, lambda: square(selected_keys=70 * digits(700, 300))),
    "many selected keys": (1.2, lambda: square(selected_keys=70 * digits(700, 3000))),
    "gathered keys": (1.9, lambda: single(300, 9000, 64, selected_keys=900 * digits(300, 64))),
    "gathered keys of each head": (
        1.8,
        lambda: (
            heads(8, 8, 100, 9000, 64) | NONE | {"selected_keys": 900 * digits(8, 100, 64), "query_offset": np.array(0)}
        ),
    ),
    "gathered wide keys": (1.4, lambda: single(1000, 5000, 256, selected_keys=500 * digits(1000, 8))),
    "gathered narrow keys": (3.15, lambda: single(3000, 9000, 1, selected_keys=900 * digits(3000, 128))),
    "gathered keys and linear biases": (
        2.1,
        lambda: (
            heads(32, 1, 400, 9000, 1)
            | NONE
            | {"query_offset": np.array(0), "selected_keys": 900 * digits(400, 128), "alibi_slopes": normal(32)}
        ),
    ),
    "gathered wide keys of many heads": (
        1.4,
        lambda: (
            heads(32, 1, 100, 9000, 256) | NONE | {"query_offset": np.array(0), "selected_keys": 900 * digits(100, 2)}
        ),
    ),
    "weights": (2.1, lambda: square(include=["attention_weights"])),
    "weights without sinks": (1.1, lambda: square(sinks=normal(1), include=["weights_without_sinks"])),
    "entropy": (1.05, lambda: square(include=["entropy"])),
    "causes": (1.35, lambda: square(include=["hidden_by"], mask=digits(700, 700) > 4, is_causal=True)),
    "top_k": (1.35, lambda: square(include=["attention_weights"], top_k=3)),
    "received weights": (
        1.25,
        lambda: heads(8, 8, 40, 20_000, 4) | {"include": ["received"], "query_offset": np.array(0)},
    ),
    "a selected head": (1.35, lambda: heads(2, 2, 500, 500, 4) | {"select_heads": np.array([1])}),
    "selected queries": (1.35, lambda: heads(2, 2, 500, 500, 4) | {"select_queries": np.arange(0, 500, 2)}),
    "an average of heads": (1.1, lambda: heads(2, 2, 500, 500, 4) | {"average_heads": True}),
}


def measure(fields: Fields) -> tuple[int, int]:
    """The estimate for computing a request, and the bytes that computing it allocates at most."""
    spec, plan = make_spec_and_plan(CODECS[SAFETENSORS].decode(write(fields, SAFETENSORS), 2**30))
    backend = Backends().choose("numpy", "cpu")
    peaks: list[int] = []

    def compute() -> None:
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            backend.run(plan, spec, spec.sources)
            peaks.append(tracemalloc.get_traced_memory()[1] - before)
        finally:
            tracemalloc.stop()

    thread = threading.Thread(target=compute)  # which has no scratch memory yet
    thread.start()
    thread.join()
    return backend.peak_bytes(plan, "cpu", copied_bytes(plan, spec)), peaks[0]


@pytest.mark.parametrize("name", CASES)
def test_the_estimate_is_close_to_what_is_allocated(name: str) -> None:
    most, make = CASES[name]
    estimate, peak = measure(make())
    assert peak <= ABOVE * estimate
    assert estimate <= most * peak + SMALL / 8, estimate / peak
