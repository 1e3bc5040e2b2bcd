"""Selected keys: time of queries that see a few keys each, beside the same by a mask, which computes all scores.

python -m benchmarks.selected

Processor time of all threads, because other processes disturb it less than they disturb a clock.
"""

from __future__ import annotations

import statistics
import time
import tracemalloc
from functools import partial
from typing import Any, Final

import numpy as np

from attention_service.attention.planning import make_plan
from attention_service.attention.spec import AttentionSpec
from attention_service.backends.registry import Backends

ROUNDS: Final = 3
QUERIES: Final = 512
# Query heads, key/value heads, features, keys, and how many of them each query selects.
SIZES: Final = (
    (8, 8, 64, 16_384, 32),
    (8, 8, 64, 16_384, 256),
    (8, 8, 64, 65_536, 32),
    (16, 1, 192, 16_384, 2048),
    (16, 1, 192, 65_536, 2048),
)


def main() -> None:
    """Print a line for each size: medians of rounds that measure both in turn."""
    backend = Backends(threads=2).choose("numpy", "cpu")
    print(f"{QUERIES} queries, float32, no weights")
    for heads, kv_heads, features, keys, count in SIZES:
        random = np.random.default_rng(0)
        shapes = {"query": (heads, QUERIES), "key": (kv_heads, keys), "value": (kv_heads, keys)}
        arrays = {name: random.standard_normal((*shape, features), dtype=np.float32) for name, shape in shapes.items()}
        indices = np.stack([random.choice(keys, count, replace=False) for _ in range(QUERIES)])
        mask = np.zeros((QUERIES, keys), bool)
        np.put_along_axis(mask, indices, True, axis=-1)
        common: dict[str, Any] = {**arrays, "layout": "hld", "include": ()}
        runs = {
            name: partial(run, backend, AttentionSpec(**common, **fields))
            for name, fields in (("mask", {"mask": mask}), ("selected_keys", {"selected_keys": indices[None]}))
        }
        expected, found = (run() for run in runs.values())
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5)
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(ROUNDS):
            for name, compute in runs.items():
                start = time.process_time()
                compute()
                seconds[name].append(time.process_time() - start)
        dense, selected = (statistics.median(seconds[name]) for name in runs)
        tracemalloc.start()
        runs["selected_keys"]()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        size = f"{heads:2} heads on {kv_heads} × {features} × {keys:,}, {count:5,} selected"
        times = f"mask {dense * 1e3:5.0f} ms, selected_keys {selected * 1e3:4.0f} ms"
        print(f"{size}: {times}, ratio {dense / selected:4.1f}, {peak / 2**20:.0f} MB")


def run(backend: Any, spec: AttentionSpec) -> np.ndarray:
    """The output of a request."""
    output: np.ndarray = backend.run(make_plan(spec), spec, spec.sources).arrays["output"]
    return output


if __name__ == "__main__":
    main()
