"""Random merges of parts of the keys by kernels with mistakes: formulas of NumPy that read the arguments."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from tests.helpers.planted_reads import TYPES, Array


class Call(NamedTuple):
    """A call of merge_state or merge_states."""

    function: str
    arguments: dict[str, Any]
    version: None = None


@dataclass
class Planted:
    """A call, and what a kernel with a mistake returned for it, in its type, and exactly."""

    call: tuple[Call, Array, Array]
    expected: tuple[Array, Array]


# Output (n, h, e) and logarithm (n, h) of parts v (n, p, h, e) with logarithms s (n, p, h) of base 2.
Formula = Callable[[Array, Array], tuple[Array, Array]]


def weighted(v: Array, weights: Array, total: Array | None = None, base: float = 2.0) -> tuple[Array, Array]:
    """The sum of parts by weights, and the logarithm of a total; 0 where all weights are."""
    own = weights.sum(axis=1)
    shares = np.divide(weights, own[:, None], out=np.zeros_like(weights), where=own[:, None] > 0)
    with np.errstate(divide="ignore"):
        sums = np.log(own if total is None else total) / math.log(base)
    return (shares[..., None] * np.where(shares[..., None] > 0, v, 0)).sum(axis=1), sums


def powers(s: Array, base: float = 2.0) -> Array:
    with np.errstate(over="ignore"):
        return np.where(np.isinf(s), 0.0, base ** np.where(np.isinf(s), 0.0, s))


def rightly(v: Array, s: Array) -> tuple[Array, Array]:
    return weighted(v, powers(s))


def natural(v: Array, s: Array) -> tuple[Array, Array]:
    return weighted(v, powers(s, math.e), base=math.e)


def natural_weights(v: Array, s: Array) -> tuple[Array, Array]:
    return weighted(v, powers(s, math.e))


def natural_weights_alone(v: Array, s: Array) -> tuple[Array, Array]:
    return weighted(v, powers(s, math.e), powers(s).sum(axis=1))


def natural_sums(v: Array, s: Array) -> tuple[Array, Array]:
    return weighted(v, powers(s), base=math.e)


def mean(v: Array, s: Array) -> tuple[Array, Array]:
    """Of all parts, those without keys included, whose output counts as 0."""
    kept = np.where(np.isinf(s)[..., None], 0.0, v)
    return kept.mean(axis=1), rightly(v, s)[1]


def mean_of_present(v: Array, s: Array) -> tuple[Array, Array]:
    return weighted(v, np.where(np.isinf(s), 0.0, 1.0), powers(s).sum(axis=1))


def empty_weighs(v: Array, s: Array) -> tuple[Array, Array]:
    return weighted(v, np.where(np.isinf(s), 1.0, powers(s)))


def empty_weighs_in_output(v: Array, s: Array) -> tuple[Array, Array]:
    return weighted(v, np.where(np.isinf(s), 1.0, powers(s)), powers(s).sum(axis=1))


def without(part: int) -> Formula:
    def of(v: Array, s: Array) -> tuple[Array, Array]:
        return rightly(np.delete(v, part, axis=1), np.delete(s, part, axis=1))

    return of


def last_twice(v: Array, s: Array) -> tuple[Array, Array]:
    return rightly(np.concatenate([v, v[:, -1:]], axis=1), np.concatenate([s, s[:, -1:]], axis=1))


def largest(v: Array, s: Array) -> tuple[Array, Array]:
    """Of the part with the largest logarithm alone."""
    best = s.argmax(axis=1)[:, None]
    weights = np.zeros_like(s)
    np.put_along_axis(weights, best, 1.0, axis=1)
    weights = np.where(np.isinf(s), 0.0, weights)
    return weighted(v, weights, powers(s).max(axis=1))


def next_sums(v: Array, s: Array) -> tuple[Array, Array]:
    """The weight of the next part."""
    rolled = np.roll(s, -1, axis=1)
    return weighted(v, np.where(np.isinf(s), 0.0, powers(rolled)))


def next_head(v: Array, s: Array) -> tuple[Array, Array]:
    rolled = np.roll(s, -1, axis=2)
    return weighted(v, np.where(np.isinf(s), 0.0, powers(rolled)))


def linear(v: Array, s: Array) -> tuple[Array, Array]:
    """Weights that are logarithms."""
    return weighted(v, np.where(np.isinf(s), 0.0, np.abs(s)), powers(s).sum(axis=1))


def reciprocal(v: Array, s: Array) -> tuple[Array, Array]:
    """The sign of the logarithms is another one."""
    return weighted(v, powers(np.where(np.isinf(s), -np.inf, -s)), powers(s).sum(axis=1))


MISTAKES: Final[dict[str, tuple[Formula, tuple[str, ...]]]] = {
    "base.natural": (natural, ("merge.base2",)),
    "base.weights": (natural_weights, ("merge.base2",)),
    "base.weights_alone": (natural_weights_alone, ("merge.base2",)),
    "base.sums": (natural_sums, ("merge.base2", "logsumexp.base2", "logsumexp.natural")),
    "mean.all": (mean, ("merge.equal_weights",)),
    "mean.present": (mean_of_present, ("merge.equal_weights",)),
    "empty.weighs": (empty_weighs, ("merge.empty_weighs",)),
    "empty.weighs_in_output": (empty_weighs_in_output, ("merge.empty_weighs",)),
    "part.last_missing": (without(-1), ("keys.last_dropped",)),
    "part.first_missing": (without(0), ("keys.first_dropped",)),
    "part.last_twice": (last_twice, ()),
    "part.largest": (largest, ()),
    "sums.of_next_part": (next_sums, ()),
    "sums.of_next_head": (next_head, ()),
    "weights.linear": (linear, ()),
    "weights.reciprocal": (reciprocal, ()),
}


def drawn(seed: int, name: str) -> tuple[Call, Array, Array, np.dtype]:
    """A random call, and its parts in float64."""
    random = np.random.default_rng([seed, *name.encode()])
    n, parts, h, e = (int(random.integers(*sizes)) for sizes in ((1, 9), (2, 6), (1, 5), (4, 17)))
    dtype = TYPES[int(random.choice(3, p=[0.5, 0.25, 0.25]))]
    is_pair = random.random() < 0.3
    parts = 2 if is_pair else parts
    v = random.normal(size=(n, parts, h, e)).astype(dtype)
    s = (random.normal(size=(n, parts, h)) * random.choice([0.5, 2, 4])).astype(np.float32)
    if random.random() < 0.6:
        is_empty = random.random(s.shape) < 0.25
        s[is_empty] = -np.inf
        v[is_empty] = random.choice([0.0, 7.0])
    if is_pair:
        arguments = {"v_a": v[:, 0], "s_a": s[:, 0], "v_b": v[:, 1], "s_b": s[:, 1]}
        call = Call("flashinfer.merge_state", arguments)
    else:
        call = Call("flashinfer.merge_states", {"v": v, "s": s})
    return call, v.astype(np.float64), s.astype(np.float64), dtype


def plant(name: str, seed: int) -> Planted | None:
    """A random merge by a kernel with a mistake; None if nothing changes."""
    for attempt in range(9):
        call, v, s, dtype = drawn(9 * seed + attempt, name)
        output, sums = MISTAKES[name][0](v, s)
        wanted = rightly(v, s)
        if not all(np.allclose(x, y, 1e-3, 1e-3) for x, y in zip((output, sums), wanted, strict=True)):
            return Planted((call, output.astype(dtype), sums.astype(np.float32)), (output, sums))
    return None


def right(seed: int) -> tuple[Call, Array, Array]:
    """A random merge, and what a right kernel returns."""
    call, v, s, dtype = drawn(seed, "right")
    output, sums = rightly(v, s)
    return call, output.astype(dtype), sums.astype(np.float32)


def says(name: str, planted: Planted) -> bool:
    """True if a mistake with this name of the product explains what came back."""
    arguments = planted.call[0].arguments
    v, s = (
        arguments[x] if x in arguments else np.stack([arguments[f"{x}_a"], arguments[f"{x}_b"]], axis=1) for x in "vs"
    )
    formulas = [formula for formula, names in MISTAKES.values() if name in names]
    found = [formula(v.astype(np.float64), s.astype(np.float64)) for formula in formulas]
    return any(all(np.allclose(x, y, 1e-4, 1e-4) for x, y in zip(one, planted.expected, strict=True)) for one in found)


def is_true(fact: Any, planted: Planted) -> bool:
    """True if the weights that a fact lists are those that the output is made with."""
    if fact.name != "part_weights":
        return True
    arguments = planted.call[0].arguments
    v = arguments["v"] if "v" in arguments else np.stack([arguments["v_a"], arguments["v_b"]], axis=1)
    row, head = (int(fact.numbers[name][0]) for name in ("row", "head"))
    made = np.array(fact.numbers["weights"]) @ np.nan_to_num(v[row, :, head].astype(np.float64))
    scale = 1 + np.abs(v[row, :, head].astype(np.float64)).max()
    return bool(np.abs(made - planted.expected[0][row, head]).max() < 0.05 * scale)
