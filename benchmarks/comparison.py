"""What a comparison costs beside its reference and baseline, and how much memory it takes.

    python -m benchmarks.comparison [--tokens 2048]

16 heads on 4 key/value heads, 128 features, bfloat16, a causal window of 512. Each round compares a right output, a
known mistake, and one that is in no table. The ratio is that of the whole comparison to its reference and baseline.
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

from attention_service import attend
from attention_service.backends.registry import Backends
from attention_service.codecs.decoded import Decoded
from attention_service.comparison.compare import compare_question, reference_and_baseline
from attention_service.comparison.question import make_question

HEADS, KV_HEADS, DIM, WINDOW = 16, 4, 128, 512
ROUNDS: Final = 3


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of a comparison.")
    parser.add_argument("--tokens", type=int, default=2048)
    tokens = parser.parse_args().tokens
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
    backend = Backends().choose("numpy", "cpu")
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


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
