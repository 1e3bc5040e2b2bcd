"""Requests made to tell mistakes apart: unequal lengths, prime sizes, grouped heads, spiky scores, empty rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from service.attention.arrays import FLOATS
from service.attention.spec import AttentionSpec
from service.codecs.decoded import Decoded
from service.compare.candidates import Check
from service.compare.case import make_case
from service.compare.power import Power, power
from service.pipeline.prepare import make_spec_and_plan

# Seeds that are tried for a request that shows as much as possible.
TRIES: Final = 6
BATCH, QUERIES, KEYS, PAST = 2, 13, 37, 5
HEAD_DIM: Final = 8
VALUE_DIM: Final = 5


@dataclass(frozen=True)
class Recipe:
    """Which options a request has, and its sizes. The fields are those of the API.

    keys: those of the cache included, at least 16
    """

    options: frozenset[str]
    dtype: str = "float32"
    heads: int = 4
    kv_heads: int = 2
    value_dim: int = VALUE_DIM
    softcap: float | None = None
    scale: float | None = None
    normalization: str = "softmax"
    head_dim: int = HEAD_DIM
    queries: int = QUERIES
    keys: int = KEYS


# The options that let mistakes of a group show.
NEEDS: Final[dict[str, tuple[str, ...]]] = {
    "causal": ("is_causal", "query_offset"),
    "chunk": ("chunk_size", "query_offset"),
    "window": ("window", "query_offset"),
    "mask": ("mask",),
    "padding": ("key_mask",),
    "segments": ("segment_ids",),
    "bias": ("bias",),
    "alibi": ("alibi_slopes", "query_offset"),
    "softcap": ("softcap", "bias"),
    "sinks": ("sinks",),
    "rotary": ("rotary", "past"),
    "norm": ("query_norm", "key_norm", "rotary"),
    "cache": ("past",),
    "empty": ("mask",),
}


def recipe_for(names: Iterable[str]) -> Recipe:
    """The recipe of a request that mistakes of these names apply to."""
    groups = {name.partition(".")[0] for name in names}
    options = {option for group in groups for option in NEEDS.get(group, ())}
    if "causal.added" in names:
        options -= {"is_causal"}
    return Recipe(frozenset(options), value_dim=HEAD_DIM if "value.is_key" in names else VALUE_DIM)


def recipe_like(spec: AttentionSpec, dtype: np.dtype, heads: int, kv_heads: int, *, same_dims: bool) -> Recipe:
    """The recipe of a small request with the options of another."""
    names = ("window", "mask", "key_mask", "bias", "alibi_slopes", "sinks", "rotary", "query_norm", "key_norm")
    options = {
        name
        for name in (*names, "segment_ids", "chunk_size", "key_lengths", "softcap")
        if getattr(spec, name) is not None
    }
    options |= {"is_causal"} if spec.is_causal else set()
    options |= {"past"} if spec.past_key is not None else set()
    group = heads // kv_heads
    shown = min(kv_heads, 2 if group > 1 else 4)
    return Recipe(
        frozenset(options),
        dtype=dtype.name,
        heads=shown * min(group, 3),
        kv_heads=shown,
        value_dim=HEAD_DIM if same_dims else VALUE_DIM,
        softcap=spec.softcap,
        scale=spec.scale,
        normalization=spec.normalization,
    )


def make_input(recipe: Recipe, seed: int) -> dict[str, Any]:
    """The fields of a request, arrays as ndarrays, in layout bhld. The same seed makes the same request."""
    random = np.random.default_rng(seed)
    dtype = FLOATS[recipe.dtype]

    def normal(*shape: int, spread: float = 1.0) -> np.ndarray:
        return (random.normal(size=shape) * spread).astype(dtype)

    options, h, g = recipe.options, recipe.heads, recipe.kv_heads
    past = PAST if "past" in options else 0
    new = recipe.keys - past
    query = normal(BATCH, h, recipe.queries, recipe.head_dim, spread=2.5)  # spiky scores
    key = normal(BATCH, g, new, recipe.head_dim)
    # A mean of its own for each head and key, so that means and other heads show.
    value = (normal(BATCH, g, new, recipe.value_dim) + random.normal(size=(1, g, 1, 1)) * 2).astype(dtype)
    found: dict[str, Any] = {"query": query, "key": key, "value": value, "layout": "bhld"}
    if past:
        found["past_key"] = normal(BATCH, g, past, recipe.head_dim)
        found["past_value"] = normal(BATCH, g, past, recipe.value_dim)
    for name in sorted(options - {"past"}):
        found[name] = OPTIONS[name](random, recipe)
    if {"is_causal", "window", "chunk_size", "alibi_slopes"} & options:
        found["query_offset"] = np.array([3, 11])
    found.pop("softcap", None) if recipe.softcap is None and "softcap" not in options else None
    if recipe.scale is not None:
        found["scale"] = recipe.scale
    if recipe.normalization != "softmax":
        found["normalization"] = recipe.normalization
    return found


def _mask(random: np.random.Generator, recipe: Recipe) -> np.ndarray:
    mask = random.random((BATCH, recipe.heads, recipe.queries, recipe.keys)) < 0.6
    mask[0, 0, min(4, recipe.queries - 1)] = False  # a row that sees nothing
    return mask


def _floats(array: np.ndarray, recipe: Recipe) -> np.ndarray:
    return array.astype(np.float32 if recipe.dtype != "float64" else np.float64)


# The value of each option of a request.
OPTIONS: Final[dict[str, Callable[[np.random.Generator, Recipe], Any]]] = {
    "is_causal": lambda random, recipe: True,
    "query_offset": lambda random, recipe: np.array([3, 11]),
    "window": lambda random, recipe: {"left": 7, "right": 3},
    "chunk_size": lambda random, recipe: 7,
    "mask": _mask,
    "key_mask": lambda random, recipe: random.random((BATCH, recipe.keys)) < 0.7,
    "key_lengths": lambda random, recipe: np.array([recipe.keys - 6, recipe.keys - 15]),
    "segment_ids": lambda random, recipe: {
        "query": random.integers(0, 2, (BATCH, recipe.queries)),
        "key": random.integers(0, 2, (BATCH, recipe.keys)),
    },
    "bias": lambda random, recipe: _floats(random.normal(size=(1, recipe.heads, recipe.queries, recipe.keys)), recipe),
    "alibi_slopes": lambda random, recipe: _floats(2.0 ** -np.arange(1, recipe.heads + 1), recipe),
    "softcap": lambda random, recipe: recipe.softcap or 3.0,
    "sinks": lambda random, recipe: _floats(random.normal(size=recipe.heads) * 2, recipe),
    "rotary": lambda random, recipe: {"base": 500.0},
    "query_norm": lambda random, recipe: {"weight": _floats(random.normal(size=recipe.head_dim) + 1, recipe)},
    "key_norm": lambda random, recipe: {"weight": _floats(random.normal(size=recipe.head_dim) + 1, recipe)},
}


def power_of(fields: dict[str, Any], names: Collection[str], check: Check) -> Power:
    """The power of a request. fields: as `make_input` makes them; names: of the arrays that are compared"""
    spec, plan = make_spec_and_plan(Decoded(fields, frozenset()))
    return power(make_case(spec, plan.dtype), names, check)


@dataclass(frozen=True)
class Suggestion:
    """A request that shows mistakes: its seed, its fields, and the names of the mistakes."""

    seed: int
    fields: dict[str, Any]
    kills: tuple[str, ...]


def suggest(
    recipe: Recipe, wanted: Collection[str], names: Collection[str], seed: int, check: Check
) -> Suggestion | None:
    """The request of a few seeds that shows most of the wanted mistakes; None if none shows any.

    names: of the arrays that are compared; seed: the first that is tried
    """
    best: Suggestion | None = None
    for one in _tried(recipe, wanted, names, seed, check):
        if best is None or len(one.kills) > len(best.kills):
            best = one
        if len(best.kills) == len(wanted):
            break
    return best if best is not None and best.kills else None


def _tried(
    recipe: Recipe, wanted: Collection[str], names: Collection[str], seed: int, check: Check
) -> Iterator[Suggestion]:
    for tried in range(seed, seed + TRIES):
        fields = make_input(recipe, tried)
        killed = power_of(fields, names, check).killed
        yield Suggestion(tried, fields, tuple(name for name in wanted if name in killed))
