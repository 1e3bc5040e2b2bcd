"""Random calls of engines, answered with a mistake of addressing: gathers of NumPy with the mistake, then loops."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import ml_dtypes
import numpy as np

from tests.helpers.engine_calls import Array
from tests.test_compare_calls import DECODE, MERGES, VARLEN, Paged, attended

TYPES: Final = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))


class Planted(NamedTuple):
    """A call, and what a kernel with a mistake returns."""

    function: str
    arguments: dict[str, Any]
    output: Array
    sums: Array
    version: int | None = None


Read = Callable[[Paged, int], tuple[Array, Array]]


# Entries and tokens behind those of the last sequence, which a kernel reads that believes in more.
SPARE: Final = 40


def flat(call: Paged, n: int) -> list[int]:
    """All entries of the table from those of a sequence on."""
    entries = [page for table in call.tables for page in table]
    return [*entries[sum(map(len, call.tables[:n])) :], *[0] * SPARE]


def rightly(call: Paged, n: int) -> tuple[Array, Array]:
    return call.keys(n, call.tables[n], call.lengths[n])


def halved(call: Paged, n: int) -> tuple[Array, Array]:
    return call.keys(n, flat(call, n), call.lengths[n], call.page // 2)


def extended(call: Paged, n: int) -> tuple[Array, Array]:
    return call.keys(n, flat(call, n), call.lengths[n] + call.page * (call.lengths[n] % call.page == 0))


READS: Final[dict[str, Read]] = {
    "pages.last_full": lambda call, n: call.keys(n, call.tables[n], len(call.tables[n]) * call.page),
    "pages.order": lambda call, n: call.keys(n, sorted(call.tables[n]), call.lengths[n]),
    "pages.batch_shifted": lambda call, n: call.keys(n, flat(call, (n - 1) % len(call.tables)), call.lengths[n]),
    "pages.size": halved,
    "pages.one_more": extended,
}


def of_pages(name: str, random: np.random.Generator) -> Planted:
    """A decode with a mistake of pages."""
    page, b = int(random.choice([2, 4, 8, 16])), int(random.integers(2, 7))
    lengths = random.integers(1, 5 * page, b)
    lengths = np.where(random.random(b) < 0.4, -(-lengths // page) * page, lengths).tolist()
    call = Paged.drawn(lengths, page=page, seed=int(random.integers(2**32)), poison=name == "pages.stale_slot")
    read = READS.get(name, rightly)
    found = [attended(call.q[n : n + 1], *read(call, n)) for n in range(b)]
    output, sums = (np.concatenate([one[i] for one in found]) for i in (0, 1))
    if name == "pages.stale_slot":
        output[np.array(lengths) % page > 0] = np.nan
    spare = np.append(call.arguments["indices"], np.zeros(SPARE, np.int32))
    return Planted(DECODE, call.arguments | {"indices": spare}, output, sums / math.log(2))


def factors(name: str, given: dict[str, Array], random: np.random.Generator) -> dict[str, Array]:
    """The factors (b, hk) that a kernel with a mistake multiplies by."""
    found, chosen = dict(given), str(random.choice(["q", "k", "v"]))
    wrong: dict[str, Callable[[Array], Array]] = {
        "descale.absent": lambda x: np.ones_like(x),
        "descale.twice": lambda x: x**2,
        "descale.first_head": lambda x: np.repeat(x[:, :1], x.shape[1], axis=1),
        "descale.scalar": lambda x: np.full_like(x, x[0, 0]),
    }
    if name == "descale.swapped":
        return found | {"k": given["v"], "v": given["k"]}
    return found | {chosen: wrong[name](given[chosen])} if name in wrong else found


def of_ragged(name: str, random: np.random.Generator) -> Planted:
    """A causal ragged batch with a mistake of lengths, alignment, factors or sinks."""
    b = int(random.integers(2, 6))
    keys, queries = random.integers(2, 24, b), random.integers(1, 12, b)
    used = np.maximum(keys - random.integers(0, 6, b), 1) if name == "ragged.padded_length" else keys
    ends = {"q": np.cumsum([0, *queries]), "k": np.cumsum([0, *keys]), "v": np.cumsum([0, *keys])}
    arrays = {"q": random.normal(size=(ends["q"][-1], 4, 8)).astype(np.float32)}
    arrays |= {role: random.normal(size=(ends["k"][-1] + SPARE, 2, 8)).astype(np.float32) for role in "kv"}
    scales = {role: random.uniform(0.5, 2, size=(b, 2)) for role in "qkv"} if name.startswith("descale.") else {}
    wrong = factors(name, scales, random)
    offsets = used - queries
    lengths = used
    if name == "ragged.top_left":
        offsets = np.zeros(b, int)
    elif name == "ragged.previous_offset":
        offsets = np.roll(offsets, 1)
    elif name == "ragged.lengths_of_first":
        lengths, offsets = np.full(b, keys[0]), keys[0] - queries
    elif name == "ragged.padded_length":
        lengths, offsets = keys, keys - queries
    found = []
    for n in range(b):
        q = arrays["q"][ends["q"][n] : ends["q"][n + 1]]
        k, v = (arrays[role][ends[role][n] : ends[role][n] + lengths[n]] for role in "kv")
        if wrong:
            q, k, v = (x * np.repeat(wrong[r][n], x.shape[1] // 2)[:, None] for r, x in (("q", q), ("k", k), ("v", v)))
        found.append(attended(q, k, v, offset=int(offsets[n])))
    output, sums = (np.concatenate([one[i] for one in found]) for i in (0, 1))
    arguments = {**arrays, "causal": True, "cu_seqlens_q": ends["q"], "cu_seqlens_k": ends["k"]}
    arguments |= {f"{role}_descale": scale for role, scale in scales.items()}
    if name == "ragged.padded_length":
        arguments["seqused_k"] = used
    if name == "merge.sink_each":
        sinks = random.normal(size=4)
        arguments["learnable_sink"] = sinks
        parts = int(random.choice([2, 4, 8]))
        total = np.logaddexp(sums, sinks + math.log(parts))
        output, sums = output * np.exp(sums - total)[..., None], total
    return Planted(VARLEN, arguments, output, sums.T)


def of_states(name: str, random: np.random.Generator) -> Planted:
    """Parts that are merged with a mistake."""
    n, parts, h = (int(random.integers(*sizes)) for sizes in ((1, 9), (2, 6), (1, 5)))
    v, s = random.normal(size=(n, parts, h, 4)), random.normal(size=(n, parts, h)) * 3
    is_empty = random.random(s.shape) < 0.2
    s[is_empty], v[is_empty] = -np.inf, 0.0
    logits = np.where(is_empty, 0.0, s)
    weights = np.where(is_empty, 0.0, np.exp(logits) if name == "merge.base2" else np.exp2(logits))
    total = weights.sum(axis=1)
    if name == "merge.equal_weights":
        weights = np.ones_like(weights) * ~is_empty.all(axis=1, keepdims=True)
    elif name == "merge.empty_weighs":
        weights = np.where(is_empty, 1.0, weights)
        total = weights.sum(axis=1)
    divisor = weights.sum(axis=1)[..., None]
    summed = np.einsum("nph,nphe->nhe", weights, v)
    output = np.divide(summed, divisor, out=np.zeros_like(summed), where=divisor > 0)
    with np.errstate(divide="ignore"):
        sums = np.log(total) if name == "merge.base2" else np.log2(total)
    return Planted(MERGES, {"v": v, "s": s}, output, sums)


MAKERS: Final[dict[str, Callable[[str, np.random.Generator], Planted]]] = {
    **dict.fromkeys((*READS, "pages.stale_slot"), of_pages),
    **dict.fromkeys(
        (f"ragged.{one}" for one in ("top_left", "previous_offset", "lengths_of_first", "padded_length")), of_ragged
    ),
    **dict.fromkeys((f"descale.{one}" for one in ("absent", "twice", "first_head", "scalar", "swapped")), of_ragged),
    **dict.fromkeys(("merge.base2", "merge.equal_weights", "merge.empty_weighs"), of_states),
    "merge.sink_each": of_ragged,
}


def plant(name: str, seed: int) -> Planted:
    """A random call that a kernel with this mistake answered, in a random type."""
    random = np.random.default_rng([seed, *name.encode()])
    found = MAKERS[name](name, random)
    dtype = TYPES[int(random.integers(len(TYPES)))]
    return found._replace(output=found.output.astype(dtype), sums=found.sums.astype(np.float32))
