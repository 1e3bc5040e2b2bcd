"""Time and memory of a long sequence: 65,536 tokens × 64 features, causal, no weights, safetensors over HTTP.

In float32 without gradients, and in bfloat16 with those of query, key and value; then these in float32 in process, as
no number of it is cast, and a request of so much float32 is larger than the default limit of a body.
"""

from __future__ import annotations

import json
import math
import time
import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save

from attention_service import attend
from attention_service.codecs.safetensors import SafetensorsCodec
from benchmarks.forms import SAFETENSORS, Request, fetch
from benchmarks.ratios import Ratio, rows
from benchmarks.table import OURS

LENGTH, FEATURES = 65_536, 64
# Of the peak, in inputs; with gradients, of the peak over inputs and results in MiB.
BOUND, BOUND_WITH_GRADIENTS = 6.0, 64.0
TIMEOUT = 600.0
# Queries whose outputs are compared with NumPy.
SAMPLE = (0, 1, 1000, LENGTH // 2, LENGTH - 1)


Arrays = dict[str, np.ndarray]


def row(arrays: Arrays, query: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the output of one query in float64, with a causal mask, and the gradient of the query."""
    seen = slice(0, query + 1)
    key, value = (arrays[name][0, seen].astype(np.float64) for name in ("key", "value"))
    scores = key @ arrays["query"][0, query].astype(np.float64) / math.sqrt(FEATURES)
    weights = np.exp(scores - scores.max())
    weights /= weights.sum()
    of_weights = value @ arrays["grad_output"][0, query].astype(np.float64)
    of_scores = weights * (of_weights - weights @ of_weights) / math.sqrt(FEATURES)
    return weights @ value, of_scores @ key


def measure(arrays: Arrays, fields: dict[str, Any]) -> tuple[Arrays, float]:
    """Send a request to a fresh server, print its time, and return the arrays of the answer and the peak in MiB."""
    text = {"layout": "hld", "is_causal": True, "include": []} | fields
    request = Request("/attention", {"Content-Type": SAFETENSORS}, save(arrays, {"request": json.dumps(text)}))
    with OURS.started() as running:
        running.forget_peak()
        idle, before = running.resident(), running.processor_seconds()
        start = time.perf_counter()
        reply = fetch(running.port, request, TIMEOUT)
        seconds, used = time.perf_counter() - start, running.processor_seconds() - before
        growth = running.peak() - idle
    found = SafetensorsCodec().decode(reply.body, len(reply.body)).fields
    given, received = (sum(array.nbytes for array in named.values()) / 2**20 for named in (arrays, found))
    print(f"{seconds:.1f} s ({used:.1f} s of processors), {growth:.0f} MiB peak memory over idle, "
          f"for {given:.0f} MiB there and {received:.0f} MiB back\n")  # fmt: skip
    return found, growth


def beyond_results(arrays: Arrays) -> float:
    """Compute the gradients in process, and return the peak memory in MiB, without the results."""
    fields: dict[str, Any] = {**arrays, "layout": "hld", "is_causal": True, "gradients": "all", "include": []}
    tracemalloc.start()
    result = attend(**fields)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    returned: tuple[np.ndarray, ...] = (result.output, result.grad_query, result.grad_key, result.grad_value)
    return (peak - sum(array.nbytes for array in returned)) / 2**20


def main() -> None:
    """Send a request without gradients, and one with."""
    random = np.random.default_rng(0)
    names = ("query", "key", "value", "grad_output")
    arrays = {name: random.normal(size=(1, LENGTH, FEATURES)).astype(np.float32) for name in names}
    found, growth = measure({name: arrays[name] for name in names[:3]}, {})
    for query in SAMPLE:
        np.testing.assert_allclose(found["output"][0, query], row(arrays, query)[0], rtol=1e-4, atol=1e-5)
    ratios = [Ratio("peak / input", growth / (3 * arrays["query"].nbytes / 2**20), BOUND)]
    halves = {name: array.astype(ml_dtypes.bfloat16) for name, array in arrays.items()}
    found, growth = measure(halves, {"gradients": "all"})
    for query in SAMPLE:
        for name, right in zip(("output", "grad_query"), row(halves, query), strict=True):
            numbers = found[name][0, query].astype(np.float64)
            np.testing.assert_allclose(numbers, right, rtol=2**-8, atol=1e-5 * np.abs(right).max() + 1e-6)
    ratios.append(Ratio("with gradients, MiB over inputs and results", beyond_results(arrays), BOUND_WITH_GRADIENTS))
    print(rows(ratios))


if __name__ == "__main__":
    main()
