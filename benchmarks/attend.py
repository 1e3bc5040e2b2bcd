"""`attend()` of small requests in a script beside plain NumPy, which returns output and weights, too.

Times are of the processor, each the least of several rounds in which both take turns.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from attention_service import attend
from benchmarks.serving import Others, blas_variables

SIZES = ((6, 4), (16, 64), (64, 64), (128, 64), (512, 64))
ROUNDS = 9
# Seconds of each round of one of the two.
ROUND = 0.05


def plain_numpy(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return output and weights as most people would compute them."""
    scores = query @ key.swapaxes(-1, -2) / np.float32(np.sqrt(query.shape[-1]))
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights @ value, weights


def microseconds(function: Callable[[], object]) -> float:
    """Return the processor time of a call, all threads counted, in microseconds."""
    calls, start = 0, time.process_time()
    while (taken := time.process_time() - start) < ROUND:
        for _ in range(10):
            function()
        calls += 10
    return taken / calls * 1e6


def main() -> None:
    """Print a row for each size."""
    others, random = Others(), np.random.default_rng(0)
    print(f"NumPy {np.__version__}, float32, {blas_variables() or 'no variables of BLAS'}")
    print(f"{'tokens × features':>18}{'attend()':>12}{'plain NumPy':>14}{'ratio':>8}")
    for size in SIZES:
        query, key, value = (random.normal(size=size).astype(np.float32) for _ in range(3))
        ours = theirs = math.inf
        for _ in range(ROUNDS):
            ours = min(ours, microseconds(partial(attend, query, key, value)))
            theirs = min(theirs, microseconds(partial(plain_numpy, query, key, value)))
        print(f"{size[0]:>12} × {size[1]:<3}{ours:>9.1f} µs{theirs:>11.1f} µs{ours / theirs:>8.2f}")
    print(others.line())


if __name__ == "__main__":
    main()
