"""The NumPy kernel beside torch's: plain products and softmax, and the fused kernel. Runs where torch is installed."""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from service.attention.plan import make_plan
from service.attention.spec import AttentionSpec, Output
from service.backends import numpy as kernel

SHAPES = ((8, 1024, 64), (1, 2048, 64), (1, 8192, 64))
# Beyond this, matrices of all weights are not made: they would measure memory only.
LONGEST_WEIGHTS = 2048


def by_hand(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Products and softmax, all weights returned."""
    weights = torch.softmax(query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5, dim=-1)
    return weights @ value, weights


def plain_numpy(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
    """What most people write."""
    scores = query @ key.swapaxes(-1, -2) / np.float32(np.sqrt(query.shape[-1]))
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    output: np.ndarray = weights @ value
    return output


def medians(functions: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Milliseconds, measured in turns."""
    found: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(rounds + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if turn:  # the first warms up
                found[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) * 1e3 for name, values in found.items()}


def main() -> None:
    """Print a table for each shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    threads = os.cpu_count() or 1
    kernel.use_threads(threads)
    torch.set_num_threads(threads)
    print(f"{platform.machine()}, {threads} threads, NumPy {np.__version__}, torch {torch.__version__}")
    for shape in SHAPES:
        print("\n{} heads x {} x {} float32, median ms of {} rounds".format(*shape, rounds))
        for name, value in medians(functions(*shape), rounds).items():
            print(f"  {name:28} {value:8.1f}")


def functions(heads: int, length: int, dim: int) -> dict[str, Callable[[], object]]:
    """What to measure for a shape."""
    random = np.random.default_rng(0)
    query, key, value = (random.normal(size=(1, heads, length, dim)).astype(np.float32) for _ in range(3))
    tensors = [torch.from_numpy(array) for array in (query, key, value)]

    def ours(is_causal: bool, *include: Output) -> Callable[[], object]:
        plan = make_plan(AttentionSpec(query, key, value, is_causal=is_causal, include=include))
        return lambda: kernel.execute(plan, "cpu")

    fused = torch.nn.functional.scaled_dot_product_attention
    found: dict[str, Callable[[], object]] = {
        "ours": ours(False),
        "ours, causal": ours(True),
        "torch SDPA": lambda: fused(*tensors),
        "torch SDPA, causal": lambda: fused(*tensors, is_causal=True),
    }
    if length <= LONGEST_WEIGHTS:
        found |= {
            "ours, all weights": ours(False, "attention_weights"),
            "torch by hand, all weights": lambda: by_hand(*tensors),
            "NumPy by hand, all weights": lambda: plain_numpy(query, key, value),
        }
    return found


if __name__ == "__main__":
    main()
