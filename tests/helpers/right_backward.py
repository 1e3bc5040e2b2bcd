"""Right backward passes as production writes them: tiles, weights from the logsumexp, D from the rounded output.

Tri Dao, "FlashAttention-2" (2023), algorithm 2. Nothing of the service computes in them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from attention_service.attention.arrays import BFLOAT16


@dataclass(frozen=True)
class BackwardKernel:
    """What a right backward pass does.

    rows, keys: of a tile; rounds: weights and gradients of scores are rounded before products
    expands: gradients of key and value are rounded for each query head before groups are summed up (FlashAttention)
    splits: parts of the keys whose gradients of the query are added at the end
    """

    rows: int = 64
    keys: int = 64
    rounds: bool = False
    expands: bool = False
    splits: int = 1


class _Scores:
    """The masked scores of a request, and the derivative of its softcap, by tile. options: as of `backward`"""

    def __init__(self, query: np.ndarray, key: np.ndarray, options: dict[str, Any]) -> None:
        self.query, self.key, self.options = query, key, options
        self.scale = np.asarray(options.get("scale", 1 / math.sqrt(query.shape[-1])), query.dtype)

    def of(self, rows: slice, keys: slice) -> tuple[np.ndarray, np.ndarray]:
        """Both of a tile, (b, h, r, k)."""
        options, wide = self.options, self.query.dtype
        capped = (self.query[:, :, rows] @ self.key[:, :, keys].swapaxes(-1, -2)) * self.scale
        slope = np.ones_like(capped)
        if "softcap" in options:
            cap = np.asarray(options["softcap"], wide)
            capped = cap * np.tanh(capped / cap)
            slope = 1 - np.square(capped / cap)
        if "bias" in options:
            capped = capped + options["bias"][:, :, rows, keys].astype(wide)
        i, j = np.arange(self.query.shape[2])[rows, None], np.arange(self.key.shape[2])[keys]
        if options.get("is_causal"):
            capped = np.where(j <= i + options.get("query_offset", 0), capped, -np.inf)
        if "key_mask" in options:
            capped = np.where(options["key_mask"][:, None, None, keys], capped, -np.inf)
        return capped, slope

    def forward(self, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Output (b, h, q, e) and logsumexp (b, h, q, 1)."""
        whole = self.of(slice(None), slice(None))[0]
        most = whole.max(axis=-1, keepdims=True)
        sinks = self.options.get("sinks")
        if sinks is not None:
            most = np.maximum(most, sinks.astype(whole.dtype)[:, None, None])
        shift = np.where(np.isfinite(most), most, 0)
        exponentials = np.exp(whole - shift)
        total = exponentials.sum(axis=-1, keepdims=True)
        if sinks is not None:
            total = total + np.exp(sinks.astype(whole.dtype)[:, None, None] - shift)
        total = np.where(total == 0, 1, total)
        return (exponentials / total) @ value, shift + np.log(total)


def backward(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    grad_output: np.ndarray,
    kernel: BackwardKernel,
    **options: Any,
) -> dict[str, np.ndarray]:
    """The gradients of query, key and value (b, h, l, d) in the type of the query.

    options: of a request: is_causal with query_offset, scale, softcap, sinks (h,), bias (1, h, q, k), key_mask (b, k),
    grad_logsumexp
    """
    dtype, wide = query.dtype, np.float64 if query.dtype == np.float64 else np.float32
    group = query.shape[1] // key.shape[1]
    q, do = query.astype(wide), grad_output.astype(wide)
    k, v = (np.repeat(array.astype(wide), group, axis=1) for array in (key, value))
    scores = _Scores(q, k, options)

    def rounded(array: np.ndarray) -> np.ndarray:
        return array.astype(dtype).astype(wide) if kernel.rounds else array

    output, logsumexp = scores.forward(v)
    delta = (rounded(output) * do).sum(axis=-1, keepdims=True)
    if "grad_logsumexp" in options:
        delta = delta - options["grad_logsumexp"].astype(wide)[..., None]
    dk, dv, dq = np.zeros_like(k), np.zeros_like(v), np.zeros((kernel.splits, *q.shape), wide)
    for which, part in enumerate(np.array_split(np.arange(k.shape[2]), kernel.splits)):
        for keys, rows in itertools.product(_slices(part, kernel.keys), _slices(np.arange(q.shape[2]), kernel.rows)):
            capped, slope = scores.of(rows, keys)
            weights = np.exp(capped - logsumexp[:, :, rows])
            dv[:, :, keys] += rounded(weights).swapaxes(-1, -2) @ do[:, :, rows]
            dp = do[:, :, rows] @ v[:, :, keys].swapaxes(-1, -2)
            ds = rounded(weights * (dp - delta[:, :, rows]) * slope)
            dq[which][:, :, rows] += ds @ k[:, :, keys]
            dk[:, :, keys] += ds.swapaxes(-1, -2) @ q[:, :, rows]
    dk *= scores.scale
    if kernel.expands:
        dk, dv = (array.astype(dtype).astype(wide) for array in (dk, dv))
    dk, dv = (array.reshape(array.shape[0], -1, group, *array.shape[2:]).sum(axis=2) for array in (dk, dv))
    found = {"grad_query": dq.sum(axis=0) * scores.scale, "grad_key": dk, "grad_value": dv}
    return {name: array.astype(dtype) for name, array in found.items()}


def _slices(part: np.ndarray, length: int) -> list[slice]:
    """Consecutive indices in slices of a length."""
    return [slice(part[i], part[min(i + length, len(part)) - 1] + 1) for i in range(0, len(part), length)]


def random_request(random: np.random.Generator) -> tuple[dict[str, Any], BackwardKernel, dict[str, Any]]:
    """A random request in layout bhld with a cotangent, a right kernel for its type, and the options of the kernel."""
    types = [np.dtype(np.float32), BFLOAT16, np.dtype(np.float16), np.dtype(np.float64)]
    dtype = types[random.integers(len(types))]
    d, g = int(random.choice([1, 2, 4, 8, 16, 32, 64, 128])), int(random.integers(1, 3))
    b, h, e = int(random.integers(1, 3)), g * int(random.integers(1, 4)), int(random.choice([d, d, 3]))
    queries = int(random.integers(1, 150))
    keys = queries if random.random() < 0.5 else int(random.integers(1, 300))
    arrays = {
        "query": random.normal(size=(b, h, queries, d)) * random.choice([0.01, 0.3, 1, 4]),
        "key": random.normal(size=(b, g, keys, d)),
        "value": random.normal(size=(b, g, keys, e)) + random.choice([0, 0, 5]),
        "grad_output": random.normal(size=(b, h, queries, e)) * random.choice([1e-3, 1, 1, 30]),
    }
    options: dict[str, Any] = {}
    if random.random() < 0.5:
        options |= {"is_causal": True, "query_offset": np.asarray(keys - queries if random.random() < 0.7 else 0)}
    made: dict[str, Callable[[], Any]] = {
        "softcap": lambda: float(random.choice([1, 5, 20, 50])),
        "sinks": lambda: (random.normal(size=h) * 2).astype(np.float32),
        "bias": lambda: random.normal(size=(1, h, queries, keys)).astype(np.float32),
        "key_mask": lambda: random.random((b, keys)) < 0.7,
        "grad_logsumexp": lambda: random.normal(size=(b, h, queries)).astype(np.float32),
        "scale": lambda: float(random.choice([0.05, 0.3, 1])),
    }
    options |= {name: make() for name, make in made.items() if random.random() < 0.2}
    is_half = dtype.itemsize == 2
    kernel = BackwardKernel(
        rows=int(random.choice([16, 32, 64, 128])),
        keys=int(random.choice([16, 32, 64, 128])),
        rounds=is_half and bool(random.random() < 0.8),
        expands=is_half and bool(random.random() < 0.5),
        splits=int(random.choice([1, 1, 2, 4])) if keys >= 4 else 1,
    )
    fields = {name: array.astype(dtype) for name, array in arrays.items()} | {"layout": "bhld"}
    return fields, kernel, options
