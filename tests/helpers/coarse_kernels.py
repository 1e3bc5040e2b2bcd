"""Kernels of half types that round too coarsely, or have a wrong formula in some rows; random requests for them.

Float32 in one pass: no line is shared with the product.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from attention_service.attention.arrays import BFLOAT16
from tests.helpers.right_kernels import FOLDS, Kernel, flash

LOG2E: Final = math.log2(math.e)
# What is rounded to the half type; sums after each tile of keys.
COARSE: Final = ("products", "scaled scores", "capped scores", "scores in base 2", "sums")
PLACES: Final = ("tile", "tail", "head", "tile of a head", "row", "every other tile")


@dataclass(frozen=True)
class Formula:
    """What a kernel computes otherwise than it should.

    scale: times the right scale; factor: of the output; later: keys that a causal row sees too many; dropped: keys that
    no row sees; caps: False without the softcap
    """

    scale: float = 1.0
    factor: float = 1.0
    later: int = 0
    dropped: tuple[int, int] = (0, 0)
    caps: bool = True


def random_request(random: np.random.Generator) -> dict[str, Any]:
    """A request of a half type: few or many rows and keys, heads, rows and features of other scales."""
    dtype = [BFLOAT16, np.dtype(np.float16)][random.integers(2)]
    d, heads, batch = (int(random.choice(sizes)) for sizes in ((16, 32, 64, 80, 128), (1, 2, 4), (1, 1, 2)))
    queries = int(random.choice([4, 16, 33, 64, 100, 200, 300]))
    keys = queries + int(random.choice([0, 0, 7, 100, 500, 1500]))
    query = random.normal(size=(batch, heads, queries, d)) * random.choice([0.1, 0.5, 1.0, 2.0, 4.0])
    key, value = random.normal(size=(2, batch, 1, keys, d))
    if random.random() < 0.3:
        query *= np.exp(random.normal(size=(1, heads, 1, 1)))
    if random.random() < 0.3:
        query[:, :, queries // 2 :] *= 4
    if random.random() < 0.2:
        value *= np.exp(random.normal(size=(1, 1, 1, d)))
    request = {"query": query, "key": key, "value": value}
    request = {name: array.astype(dtype) for name, array in request.items()} | {"layout": "bhld"}
    if random.random() < 0.5:
        request |= {"is_causal": True, "query_offset": keys - queries}
    if random.random() < 0.2:
        request["softcap"] = float(random.choice([5.0, 20.0, 50.0]))
    return request


def random_kernel(random: np.random.Generator) -> Kernel:
    """A right kernel with any liberties."""
    flags = {name: bool(random.random() < 0.5) for name in ("rounds_weights", "cubic", "fast_tanh")}
    rounds_sum = flags["rounds_weights"] and bool(random.random() < 0.5)
    return Kernel(int(random.choice([16, 32, 64, 128])), str(random.choice(FOLDS)), rounds_sum=rounds_sum, **flags)


def right(request: dict[str, Any], kernel: Kernel) -> np.ndarray:
    """The output (b, h, q, e) of a right kernel."""
    options = {name: request[name] for name in ("is_causal", "softcap") if name in request}
    with np.errstate(all="ignore"):
        return flash(request["query"], request["key"], request["value"], kernel, **options)["output"]


def wrong(
    request: dict[str, Any], *, coarse: str = "", tile: int = 64, weights: bool = False, formula: Formula = Formula()
) -> np.ndarray:
    """The output (b, h, q, e) of a kernel. coarse: one of COARSE; weights: True to round weights, which is legal."""
    query, key, value = (request[name].astype(np.float32) for name in ("query", "key", "value"))
    dtype, keys, later = request["query"].dtype, key.shape[2], keys_after(request)

    def rounded(array: np.ndarray, *when: str) -> np.ndarray:
        return array.astype(dtype).astype(np.float32) if coarse in when else array

    scores = rounded(query @ key.swapaxes(-1, -2), "products") * np.float32(formula.scale / math.sqrt(query.shape[-1]))
    scores = rounded(scores, "scaled scores")
    if (cap := request.get("softcap")) is not None and formula.caps:
        scores = np.tanh(scores / np.float32(cap)) * np.float32(cap)
    scores = rounded(scores, "capped scores")
    scores = rounded(scores * np.float32(LOG2E), "scores in base 2")
    seen = np.arange(keys) <= later + formula.later if request.get("is_causal") else np.ones((1, keys), bool)
    seen = seen & ~((np.arange(keys) >= formula.dropped[0]) & (np.arange(keys) < formula.dropped[1]))
    scores = np.where(seen, scores, -np.inf)
    most = scores.max(axis=-1, keepdims=True)
    exponentials = np.exp2(scores - np.where(np.isneginf(most), 0, most))
    total, output = (
        np.zeros((*query.shape[:3], 1), np.float32),
        np.zeros((*query.shape[:3], value.shape[-1]), np.float32),
    )
    for start in range(0, keys, tile):
        part = exponentials[..., start : start + tile]
        total = rounded(total + part.sum(axis=-1, keepdims=True), "sums")
        part = part.astype(dtype).astype(np.float32) if weights else part
        output = rounded(output + part @ value[:, :, start : start + tile], "sums")
    with np.errstate(all="ignore"):
        return (np.where(total > 0, output / total, 0) * np.float32(formula.factor)).astype(dtype)


def keys_after(request: dict[str, Any]) -> np.ndarray:
    """(q, 1), the last key that each causal row sees."""
    found: np.ndarray = np.arange(request["query"].shape[2])[:, None] + request.get("query_offset", 0)
    return found


def exact(request: dict[str, Any]) -> np.ndarray:
    """The right output in float64."""
    query, key, value = (request[name].astype(np.float64) for name in ("query", "key", "value"))
    scores = query @ key.swapaxes(-1, -2) / math.sqrt(query.shape[-1])
    if (cap := request.get("softcap")) is not None:
        scores = np.tanh(scores / cap) * cap
    if request.get("is_causal"):
        scores = np.where(np.arange(key.shape[2]) <= keys_after(request), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    found: np.ndarray = weights / weights.sum(axis=-1, keepdims=True) @ value
    return found


def random_formula(random: np.random.Generator, request: dict[str, Any]) -> Formula:
    """A formula that is wrong for a request."""
    keys = request["key"].shape[2]
    start = int(random.integers(0, keys))
    found = [
        Formula(scale=float(random.choice([0.5, 0.9, 1.05, LOG2E]))),
        Formula(factor=float(random.choice([0.97, 1.02, 1.1]))),
        Formula(dropped=(start, start + int(random.choice([1, 8, 16])))),
        Formula(dropped=(keys - 1, keys)),
    ]
    if request.get("is_causal"):
        found.append(Formula(later=int(random.choice([-1, 1]))))
    if "softcap" in request:
        found.append(Formula(caps=False))
    return found[int(random.integers(len(found)))]


def random_place(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """(b, h, q), True for some rows."""
    _, heads, queries = shape
    tile, head, found = int(random.choice([16, 32, 64])), int(random.integers(heads)), np.zeros(shape, bool)
    start = int(random.integers(-(-queries // tile))) * tile
    place = str(random.choice(PLACES))
    if place == "tile":
        found[:, :, start : start + tile] = True
    elif place == "tail":
        found[:, :, (queries - 1) // tile * tile :] = True
    elif place == "head":
        found[:, head] = True
    elif place == "tile of a head":
        found[:, head, start : start + tile] = True
    elif place == "row":
        found[:, :, int(random.integers(queries))] = True
    else:
        found[:, :, np.arange(queries) // tile % 2 == 1] = True
    return found


def size(output: np.ndarray, request_exact: np.ndarray, where: np.ndarray) -> float:
    """The root mean square of the errors of some rows."""
    apart = (output.astype(np.float64) - request_exact)[where]
    return float(np.sqrt(np.mean(np.square(apart)))) if apart.size else 0.0
