"""Prints the memory that a request adds to all processes of a cluster on this machine: `python -m tests.ray.peak CASE`.

It is the sum of the proportional shares (Pss), in which a shared page counts once. The cluster is this process's own.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import numpy as np
import psutil

from attention_service.attention.cost import copied_bytes
from attention_service.attention.planning import make_plan
from attention_service.attention.spec import AttentionSpec
from attention_service.backends.ray.backend import RayBackend

WORKERS = 2


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)


def long(length: int) -> AttentionSpec:
    """A long sequence without weights."""
    query, key, value = (numbers(1, length, 64) for _ in range(3))
    return AttentionSpec(query, key, value, layout="hld", is_causal=True, include=())


def long_gradients(length: int) -> AttentionSpec:
    """Gradients of a long sequence, whose tiles are blocks of keys."""
    return long(length)._replace(grad_output=numbers(1, length, 64), gradients="all")


def weights(length: int) -> AttentionSpec:
    """The weights of some heads, whose tokens stand before heads in memory."""
    query, key, value = (numbers(length // 4, 8 * 16) for _ in range(3))
    return AttentionSpec(query, key, value, num_heads=8, include=("attention_weights",))


def gradients_of_heads(length: int) -> AttentionSpec:
    """Gradients of two entries with heads that share keys, and a mask."""
    rows = length // 8
    query, key, value = numbers(2, rows, 8 * 32), numbers(2, rows, 2 * 32), numbers(2, rows, 2 * 32)
    spec = AttentionSpec(query, key, value, num_heads=8, num_kv_heads=2, mask=numbers(rows, rows) > -1, include=())
    return spec._replace(grad_output=numbers(2, rows, 8 * 32), gradients="all")


# With the length that is measured.
CASES = {long: 2**16, long_gradients: 2**15, weights: 2**14, gradients_of_heads: 2**14}


def total() -> int:
    """The memory of this process and all below it, in bytes."""
    found = 0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
        except OSError:  # it has ended
            continue
        found += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return found


def main(name: str) -> None:
    case, length = next(row for row in CASES.items() if row[0].__name__ == name)
    backend = RayBackend(WORKERS)
    small = case(length // 8)
    for _ in range(3):
        backend.run(make_plan(small), small, small.sources)
    spec = case(length)
    plan = make_plan(spec)
    before, peak, done = total(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, total())

    watching = threading.Thread(target=watch)
    watching.start()
    backend.run(plan, spec, spec.sources)
    done.set()
    watching.join()
    estimate = backend.peak_bytes(plan, "auto", copied_bytes(plan, spec))
    print(json.dumps({"estimate": estimate, "peak": peak - before}))


if __name__ == "__main__":
    main(sys.argv[1])
