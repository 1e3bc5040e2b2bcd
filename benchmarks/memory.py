"""Time and memory of a long sequence: 65,536 tokens × 64 features, causal, no weights, safetensors over HTTP."""

from __future__ import annotations

import json
import math
import time

import numpy as np
from safetensors.numpy import load, save

from benchmarks.forms import SAFETENSORS, Request, fetch
from benchmarks.ratios import Ratio, rows
from benchmarks.table import OURS

LENGTH, FEATURES = 65_536, 64
BOUND = 6.0
# Queries whose outputs are compared with NumPy.
SAMPLE = (0, 1, 1000, LENGTH // 2, LENGTH - 1)


def row(arrays: dict[str, np.ndarray], query: int) -> np.ndarray:
    """Return the output of one query in float64, with a causal mask."""
    seen = slice(0, query + 1)
    scores = arrays["key"][0, seen].astype(np.float64) @ arrays["query"][0, query] / math.sqrt(FEATURES)
    weights = np.exp(scores - scores.max())
    output: np.ndarray = weights @ arrays["value"][0, seen] / weights.sum()
    return output


def main() -> None:
    """Send one request to a fresh server."""
    random = np.random.default_rng(0)
    arrays = {name: random.normal(size=(1, LENGTH, FEATURES)).astype(np.float32) for name in ("query", "key", "value")}
    fields = json.dumps({"layout": "hld", "is_causal": True, "include": []})
    request = Request("/attention", {"Content-Type": SAFETENSORS}, save(arrays, {"request": fields}))
    with OURS.started() as running:
        running.forget_peak()
        idle = running.resident()
        start = time.perf_counter()
        reply = fetch(running.port, request)
        seconds = time.perf_counter() - start
        growth = running.peak() - idle
    output = load(reply.body)["output"][0]
    for query in SAMPLE:
        np.testing.assert_allclose(output[query], row(arrays, query), rtol=1e-4, atol=1e-5)
    given = sum(array.nbytes for array in arrays.values()) / 2**20
    print(f"{seconds:.1f} s, {growth:.0f} MB peak memory over idle, for {given:.0f} MB of query, key and value\n")
    print(rows([Ratio("peak / input", growth / given, BOUND)]))


if __name__ == "__main__":
    main()
