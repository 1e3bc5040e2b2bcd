"""What a comparison costs beside its reference and baseline, and how much memory it takes.

    python -m benchmarks.comparison [--tokens 2048] [--rows]

16 heads on 4 key/value heads, 128 features, bfloat16, a causal window of 512. Each round compares a right output, a
known mistake, and one that is in no table. The ratio is that of the whole comparison to its reference and baseline.

With --rows: what `assert_attention(..., rows=64)` costs for 4 batch entries × 8 heads × 512 tokens × 64 features.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import ml_dtypes
import numpy as np

from attention_service import assert_attention, attend
from attention_service.backends.registry import Backends
from attention_service.codecs.decoded import Decoded
from attention_service.comparison.compare import compare_question
from attention_service.comparison.question import make_question
from attention_service.comparison.truth import reference_and_baseline
from attention_service.runtime.machine import cpu_count
from benchmarks.serving import blas_variables

HEADS, KV_HEADS, DIM, WINDOW = 16, 4, 128, 512
ROUNDS: Final = 3
ROW_ROUNDS: Final = 21
FIELDS: Final[tuple[dict[str, Any], ...]] = ({}, {"is_causal": True})


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of a comparison.")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rows", action="store_true", help="measure assertions by rows instead")
    options = parser.parse_args()
    print(blas_variables(), f"{cpu_count()} processors")
    if options.rows:
        measure_rows()
        return
    tokens = options.tokens
    random = np.random.default_rng(0)
    shapes = {"query": HEADS, "key": KV_HEADS, "value": KV_HEADS}
    request: dict[str, Any] = {
        name: random.normal(size=(heads, tokens, DIM)).astype(ml_dtypes.bfloat16) for name, heads in shapes.items()
    }
    request |= {"layout": "hld", "is_causal": True, "window": {"left": WINDOW}}
    right = attend(**request, include=[]).output
    outputs = {
        "right": right,
        "window.left_plus_one": attend(**{**request, "window": {"left": WINDOW + 1}}, include=[]).output,
        "no known mistake": (right.astype(np.float32) + np.sin(np.arange(DIM))).astype(right.dtype),
    }
    backend = Backends(threads=cpu_count()).choose("numpy", "cpu")
    print(f"{HEADS} heads × {tokens} × {DIM} bfloat16, window {WINDOW}; medians of {ROUNDS} rounds")
    for name, output in outputs.items():
        question = make_question(Decoded({**request, "actual": {"output": output}}, frozenset()))
        parts: list[float] = []
        wholes: list[float] = []
        for _ in range(ROUNDS):
            parts.append(seconds(partial(reference_and_baseline, question, backend)))
            wholes.append(seconds(partial(compare_question, question, backend)))
        part, whole = statistics.median(parts), statistics.median(wholes)
        print(f"{name:22} {whole:6.1f} s, reference and baseline {part:5.1f} s, ratio {whole / part:.2f}")
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")


def measure_rows() -> None:
    """Print what assertions by 64 rows take, right ones of several types and masks."""
    random = np.random.default_rng(0)
    for dtype in (np.dtype("float32"), np.dtype(ml_dtypes.bfloat16)):
        query, key, value = (random.normal(size=(4, 8, 512, 64)).astype(dtype) for _ in range(3))
        for options in FIELDS:
            output = attend(query, key, value, include=[], **options).output
            judge = partial(assert_attention, output, query, key, value, rows=64, **options)
            taken = sorted(seconds(judge) for _ in range(ROW_ROUNDS))
            times = f"least {1e3 * taken[0]:5.1f} ms, median {1e3 * statistics.median(taken):5.1f} ms"
            print(f"{dtype.name:10} {options!s:22} {times}")


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
