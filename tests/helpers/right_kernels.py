"""Right kernels as production writes them: tiles of keys, powers of 2, and what they round on the way.

Each liberty has its source: see `legal` in docs/compare-report.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

LOG2E: Final = math.log2(math.e)
# exp2 on [0, 1) by a polynomial of degree 3, as FlashAttention-4 computes it where the exponential unit is busy
# (flash_attn/cute/utils.py); its relative error is 8.8e-5.
CUBIC: Final = (1.0, 0.695146143436431884765625, 0.227564394474029541015625, 0.077119089663028717041015625)
# The relative error of tanh.approx.f32 (PTX ISA, "tanh").
TANH_ERROR: Final = 2.0**-11


# What a kernel multiplies the query by before it rounds it.
FOLDS: Final = ("nothing", "scale", "scale and log2(e)")


@dataclass(frozen=True)
class Kernel:
    """What a right kernel does.

    tile: keys that are computed at a time
    folds: one of FOLDS
    rounds_weights: weights are rounded before the product with values; rounds_sum: and before they are summed up
    cubic: exp2 is a polynomial; fast_tanh: the tanh of a softcap has an error
    """

    tile: int = 64
    folds: str = "nothing"
    rounds_weights: bool = False
    rounds_sum: bool = False
    cubic: bool = False
    fast_tanh: bool = False


def flash(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, kernel: Kernel, **options: Any
) -> dict[str, np.ndarray]:
    """Output (b, h, q, e) in the type of the query and logsumexp (b, h, q) in float32, of bhld arrays.

    options: of a request: is_causal, scale, softcap
    """
    dtype, scale = query.dtype, np.float32(options.get("scale", 1 / math.sqrt(query.shape[-1])))
    groups = query.shape[1] // key.shape[1]
    key, value = (np.repeat(array.astype(np.float32), groups, axis=1) for array in (key, value))
    q = query.astype(np.float32)
    factor = {"nothing": 1.0, "scale": float(scale), "scale and log2(e)": float(scale) * LOG2E}[kernel.folds]
    q = (q * np.float32(factor)).astype(dtype).astype(np.float32) if kernel.folds != "nothing" else q
    after = np.float32({"nothing": float(scale) * LOG2E, "scale": LOG2E, "scale and log2(e)": 1.0}[kernel.folds])
    shape = query.shape[:3]
    most, total = np.full(shape, -np.inf, np.float32), np.zeros(shape, np.float32)
    output = np.zeros((*shape, value.shape[-1]), np.float32)
    for start in range(0, key.shape[2], kernel.tile):
        scores = (q @ key[:, :, start : start + kernel.tile].swapaxes(-1, -2)) * after  # in base 2
        if (cap := options.get("softcap")) is not None:
            scores = _tanh(scores / np.float32(cap * LOG2E), kernel) * np.float32(cap * LOG2E)
        if options.get("is_causal"):
            i, j = np.arange(shape[2])[:, None], np.arange(start, start + scores.shape[-1])
            scores = np.where(j <= i + key.shape[2] - shape[2], scores, np.float32(-np.inf))
        new = np.maximum(most, scores.max(axis=-1))
        shift = np.where(np.isneginf(new), np.float32(0), new)
        weights = _exp2(scores - shift[..., None], kernel)
        rounded = weights.astype(dtype).astype(np.float32) if kernel.rounds_weights else weights
        change = np.exp2(most - shift)
        total = total * change + (rounded if kernel.rounds_sum else weights).sum(axis=-1)
        output = output * change[..., None] + rounded @ value[:, :, start : start + kernel.tile]
        most = new
    with np.errstate(divide="ignore", invalid="ignore"):
        output = np.where(total[..., None] > 0, output / total[..., None], 0)
        logsumexp = (most + np.log2(total)) * np.float32(math.log(2))
    return {"output": output.astype(dtype), "logsumexp": logsumexp}


def _exp2(numbers: np.ndarray, kernel: Kernel) -> np.ndarray:
    """Powers of 2 of numbers of at most 0."""
    if not kernel.cubic:
        return np.asarray(np.exp2(numbers))
    numbers = np.maximum(numbers, np.float32(-127))
    whole = np.floor(numbers)
    part = numbers - whole
    found = np.full_like(part, CUBIC[3])
    for coefficient in CUBIC[2::-1]:
        found = found * part + np.float32(coefficient)
    return np.asarray(np.ldexp(found, whole.astype(np.int32)))


def _tanh(numbers: np.ndarray, kernel: Kernel) -> np.ndarray:
    """tanh; with `fast_tanh` off by up to TANH_ERROR of it, another part of it for each number."""
    exact = np.tanh(numbers)
    if not kernel.fast_tanh:
        return np.asarray(exact)
    return np.asarray(exact * (1 + np.float32(TANH_ERROR) * np.sin(numbers * np.float32(9973))))
