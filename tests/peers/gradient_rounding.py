"""The rounding of gradients: those of torch's kernels on the CPU, and those of both backends, in each type.

    python -m tests.peers.gradient_rounding [CONFIGURATIONS]

Errors are relative to the sum of the absolute values of the terms of a gradient, Σ|terms|, in units of the roundoff of
the type: 2⁻²⁴, 2⁻¹¹ or 2⁻⁸. An error of half the smallest number of the type is added to each bound. What is exact
comes from torch's math kernel in float64, of the same rounded numbers.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from attention_service import attend

ROUNDOFF: Final = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
NAMES: Final = ("query", "key", "value")
KERNELS: Final = {"torch math": SDPBackend.MATH, "torch flash": SDPBackend.FLASH_ATTENTION}
Tensors = tuple[torch.Tensor, ...]


def draw(random: np.random.Generator, dtype: str) -> tuple[Tensors, dict[str, Any]]:
    """Query, key, value and a cotangent (b, h, l, d), and the options of a random configuration."""
    b, h, q, k = (int(x) for x in random.integers(1, (3, 4, 161, 161)))
    d, spread = int(random.choice([8, 32, 64, 128])), float(random.choice([0.3, 1, 4]))
    k = q if random.random() < 0.5 else k
    kind = getattr(torch, dtype)
    shapes = (b, h, q, d), (b, h, k, d), (b, h, k, d), (b, h, q, d)
    query, *others = (torch.from_numpy(random.normal(size=shape)) for shape in shapes)
    options = {"is_causal": bool(random.random() < 0.5)}
    return tuple(tensor.to(kind) for tensor in (query * spread, *others)), options


def by_torch(tensors: Tensors, options: dict[str, Any], kernel: SDPBackend) -> list[torch.Tensor]:
    """The gradients of query, key and value by a kernel of torch. Errors: RuntimeError where it has none."""
    leaves = [tensor.clone().requires_grad_() for tensor in tensors[:3]]
    with sdpa_kernel(kernel):
        output = scaled_dot_product_attention(*leaves, **options)
        return list(torch.autograd.grad(output, leaves, tensors[3]))


def ours(tensors: Tensors, options: dict[str, Any], backend: str) -> list[torch.Tensor]:
    """The gradients of query, key and value by a backend."""
    query, key, value, cotangent = tensors
    fields = {"grad_output": cotangent, "query_offset": 0, "gradients": "all", "backend": backend}
    found = attend(query, key, value, **fields, **options)
    return [torch.from_numpy(np.asarray(found[f"grad_{name}"]).astype(np.float64)) for name in NAMES]


def terms(tensors: Tensors, options: dict[str, Any]) -> list[torch.Tensor]:
    """Σ|terms| of the gradients of query, key and value."""
    query, key, value, cotangent = (tensor.double() for tensor in tensors)
    scale = query.shape[-1] ** -0.5
    scores = query @ key.mT * scale
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1) & options["is_causal"]
    weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1)
    of_weights = cotangent.abs() @ value.abs().mT
    of_scores = scale * weights * (of_weights + (weights * of_weights).sum(-1, keepdim=True))
    return [of_scores @ key.abs(), of_scores.mT @ query.abs(), weights.mT @ cotangent.abs()]


def errors(count: int, dtype: str) -> Iterator[tuple[str, list[float], list[float]]]:
    """For each configuration and implementation: errors of Σ|terms|, and of the largest number, both in roundoffs."""
    unit, smallest = ROUNDOFF[dtype], torch.finfo(getattr(torch, dtype)).smallest_normal * ROUNDOFF[dtype]
    for seed in range(count):
        tensors, options = draw(np.random.default_rng(seed), dtype)
        exact = by_torch(tuple(tensor.double() for tensor in tensors), options, SDPBackend.MATH)
        sizes = terms(tensors, options)
        found = {f"ours, {backend}": ours(tensors, options, backend) for backend in ("numpy", "torch")}
        for name, kernel in KERNELS.items():
            found[name] = by_torch(tensors, options, kernel)
        for name, gradients in found.items():
            apart = [(gradient.double() - right).abs() for gradient, right in zip(gradients, exact, strict=True)]
            of_terms = [float((a / (unit * size + smallest)).max()) for a, size in zip(apart, sizes, strict=True)]
            of_largest = [float(a.max() / (unit * e.abs().max() + smallest)) for a, e in zip(apart, exact, strict=True)]
            yield name, of_terms, of_largest


def main() -> None:
    """Print the largest errors of each implementation in each type."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    print(f"{count} configurations of each type; largest errors of dQ, dK, dV in roundoffs\n")
    print("| type | gradients by | of Σ\\|terms\\| | of the largest number |")
    print("|---|---|---|---|")
    for dtype in ROUNDOFF:
        worst: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for name, *both in errors(count, dtype):
            before = worst.get(name, (np.zeros(3), np.zeros(3)))
            worst[name] = np.maximum(before[0], both[0]), np.maximum(before[1], both[1])
        for name, both in worst.items():
            cells = (", ".join(f"{x:.2g}" for x in errors) for errors in both)
            print(f"| {dtype} | {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
