"""Requests made to tell mistakes apart: unequal lengths, prime sizes, grouped heads, spiky scores, empty rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from attention_service.attention.arrays import FLOATS
from attention_service.attention.spec import AttentionSpec, Rotary, Window
from attention_service.backends.base import Check
from attention_service.codecs.decoded import Decoded
from attention_service.comparison.candidates import candidates
from attention_service.comparison.case import Case, make_case
from attention_service.comparison.evidence import Evidence
from attention_service.comparison.power import Power, power
from attention_service.comparison.samples import choose_sample
from attention_service.pipeline.prepare import make_spec_and_plan

# Seeds that are tried for a request that shows as much as possible.
TRIES: Final = 6
# Prime lengths, which no tile divides: key_length is that with the past.
BATCH: Final = 2
QUERIES: Final = 13
KEYS: Final = 67
PAST: Final = 5
WINDOW: Final = (7, 3)
# Keys, and features of a value, of a request whose values can be read transposed.
KEYS_OF_SQUARE: Final = 23
CHUNK: Final = 7
HEAD_DIM: Final = 8
# A scale whose scores overflow as exponentials, also in float64.
OVERFLOWING: Final = 100.0
VALUE_DIM: Final = 5


@dataclass(frozen=True)
class Recipe:
    """What a request is made of.

    options: fields of the API that it has, and `past`; keys: with the past; norm: options of all norms;
    scales_heads: True for a scale per head; has_row_sinks: True
    for a sink per query of each head
    """

    options: frozenset[str]
    dtype: str = "float32"
    batch: int = BATCH
    heads: int = 4
    kv_heads: int = 2
    queries: int = QUERIES
    keys: int = KEYS
    past: int = PAST
    head_dim: int = HEAD_DIM
    value_dim: int = VALUE_DIM
    window: Window = field(default_factory=lambda: Window(*WINDOW))
    chunk_size: int = CHUNK
    rotary: Mapping[str, Any] = field(default_factory=lambda: {"base": 500.0})
    norm: Mapping[str, str] = field(default_factory=dict)
    has_offset: bool = True
    softcap: float | None = None
    scale: float | None = None
    scales_heads: bool = False
    has_row_sinks: bool = False
    normalization: str = "softmax"


# The options that let mistakes of a group show.
NEEDS: Final[dict[str, tuple[str, ...]]] = {
    "causal": ("is_causal",),
    "chunk": ("chunk_size",),
    "window": ("window",),
    "mask": ("mask",),
    "padding": ("key_mask",),
    "segments": ("segment_ids",),
    "selected": ("selected_keys", "past"),
    "bias": ("bias",),
    "alibi": ("alibi_slopes",),
    "softcap": ("softcap", "bias"),
    "sinks": ("sinks",),
    "rotary": ("rotary", "past"),
    "norm": ("query_norm", "key_norm", "value_norm", "rotary"),
    "cache": ("past",),
    "gate": ("gate",),
    "empty": ("mask",),
}


# Mistakes that need an option of norms.
NORMS: Final = {
    "norm.before_rotary": ("position", "after"),
    "norm.no_mean": ("kind", "layer"),
    "norm.per_head": ("over", "all"),
}
# Mistakes that need a scale for each head.
PER_HEAD: Final = frozenset({"scale.first_head", "scale.shifted"})


def recipe_for(names: Iterable[str]) -> Recipe:
    """The recipe of a request that mistakes of these names apply to."""
    groups = {name.partition(".")[0] for name in names}
    options = {option for group in groups for option in NEEDS.get(group, ())}
    if "causal.added" in names:
        options -= {"is_causal"}
    found = Recipe(frozenset(options), value_dim=HEAD_DIM if "value.is_key" in names else VALUE_DIM)
    if "softmax.no_max" in names:
        found = replace(found, scale=OVERFLOWING)
    if any(name.startswith("sigmoid.") for name in names):
        found = replace(found, normalization="sigmoid")
    if NORMS.keys() & {*names}:
        options_of_norms = [NORMS[name] for name in names if name in NORMS]
        found = replace(found, norm=dict(options_of_norms))
    if "sinks.first_query" in names:
        found = replace(found, has_row_sinks=True)
    if PER_HEAD & {*names}:
        found = replace(found, scales_heads=True)
    if "mask.transposed" in names:
        found = replace(found, queries=KEYS)
    if "value.transposed" in names:
        found = replace(found, keys=KEYS_OF_SQUARE, value_dim=KEYS_OF_SQUARE)
    return found


def recipe_of(case: Case) -> Recipe:
    """The recipe of a small request with the options of another."""
    spec, sizes = case.spec, case.plan.sizes
    options = {name for name in OPTIONS if getattr(spec, name) is not None}
    if not spec.is_causal:
        options.remove("is_causal")
    if spec.past_key is not None:
        options.add("past")
    has_offset = spec.query_offset is not None or spec.past_key is not None
    group = sizes.num_heads // sizes.num_kv_heads
    shown = min(sizes.num_kv_heads, 2 if group > 1 else 4)
    return Recipe(
        frozenset(options),
        dtype=case.dtype.name,
        heads=shown * min(group, 3),
        kv_heads=shown,
        head_dim=sizes.head_dim,
        value_dim=sizes.value_dim,
        # Without an offset, a request with masks by position has as many queries as keys.
        queries=QUERIES if has_offset or not POSITIONAL & options else KEYS,
        has_offset=has_offset,
        chunk_size=min(spec.chunk_size or CHUNK, CHUNK),
        rotary=_rotary(spec.rotary),
        norm=_options_of_norms(spec),
        window=_narrowed(spec.window),
        softcap=spec.softcap,
        scale=None if isinstance(spec.scale, np.ndarray) else spec.scale,
        has_row_sinks=spec.sinks is not None and spec.sinks.ndim > 1,
        scales_heads=isinstance(spec.scale, np.ndarray),
        normalization=spec.normalization,
    )


def make_input(recipe: Recipe, seed: int) -> dict[str, Any]:
    """The fields of a request, arrays as ndarrays, in layout bhld. The same seed makes the same request."""
    random = np.random.default_rng(seed)
    dtype = FLOATS[recipe.dtype]

    def normal(*shape: int, spread: float = 1.0) -> np.ndarray:
        return (random.normal(size=shape) * spread).astype(dtype)

    options, b, g = recipe.options, recipe.batch, recipe.kv_heads
    past = recipe.past if "past" in options else 0
    query = normal(b, recipe.heads, recipe.queries, recipe.head_dim, spread=2.5)  # spiky scores
    key = normal(b, g, recipe.keys - past, recipe.head_dim)
    # A mean of its own for each head, so that the values of other heads show.
    value = (normal(b, g, recipe.keys - past, recipe.value_dim) + random.normal(size=(1, g, 1, 1)) * 2).astype(dtype)
    found: dict[str, Any] = {"query": query, "key": key, "value": value, "layout": "bhld"}
    if past:
        found["past_key"] = normal(b, g, past, recipe.head_dim)
        found["past_value"] = normal(b, g, past, recipe.value_dim)
    for name in sorted(options - {"past"}):
        found[name] = OPTIONS[name](random, recipe)
    if POSITIONAL & options and recipe.has_offset:
        # One batch entry at the beginning of the keys, the others towards their end.
        found["query_offset"] = np.linspace(3, recipe.keys - recipe.queries, b).round().astype(np.int64)
    if recipe.scales_heads:
        found["scale"] = _floats(random.uniform(0.2, 0.8, recipe.heads), recipe)
    elif recipe.scale is not None:
        found["scale"] = recipe.scale
    if recipe.normalization != "softmax":
        found["normalization"] = recipe.normalization
    return found


def _mask(random: np.random.Generator, recipe: Recipe) -> np.ndarray:
    mask = random.random((recipe.batch, recipe.heads, recipe.queries, recipe.keys)) < 0.6
    mask[0, 0, recipe.queries // 3] = False  # a row that sees nothing
    return mask


def _rotary(rotary: Rotary | None) -> dict[str, Any]:
    """The options of a rotary embedding; tables become the usual base."""
    if rotary is None:
        return {"base": 500.0}
    dim = rotary.dim if rotary.cos is None else 2 * rotary.cos.shape[-1]
    found = {"base": rotary.base, "dim": dim, "interleaved": rotary.interleaved}
    return {name: value for name, value in found.items() if value is not None}


def _options_of_norms(spec: AttentionSpec) -> dict[str, str]:
    """The options that the norms of a request have, those of the value last."""
    given = [norm for norm in (spec.value_norm, spec.key_norm, spec.query_norm) if norm is not None]
    return {name: getattr(norm, name) for norm in given for name in ("kind", "over", "position")}


def _norm(random: np.random.Generator, recipe: Recipe, features: int, *, rotates: bool = True) -> dict[str, Any]:
    """A norm with weights. features: of all heads"""
    options = {name: option for name, option in recipe.norm.items() if rotates or name != "position"}
    dim = recipe.head_dim if rotates else recipe.value_dim
    return {
        **options,
        "weight": _floats(random.normal(size=features if options.get("over") == "all" else dim) + 1, recipe),
    }


def _narrowed(window: Window | None) -> Window:
    """A window with the same bounded sides, no wider than small requests have."""
    if window is None:
        return Window(*WINDOW)
    left, right = (
        None if width is None else min(width, most)
        for width, most in zip((window.left, window.right), WINDOW, strict=True)
    )
    return Window(left, right)


def _sides(window: Window) -> dict[str, int]:
    found = {"left": window.left, "right": window.right}
    return {side: width for side, width in found.items() if width is not None}


def _floats(array: np.ndarray, recipe: Recipe) -> np.ndarray:
    return array.astype(np.float32 if recipe.dtype != "float64" else np.float64)


# The options that read query_offset.
POSITIONAL: Final = frozenset({"is_causal", "window", "chunk_size", "alibi_slopes"})
# The value of each option of a request.
OPTIONS: Final[dict[str, Callable[[np.random.Generator, Recipe], Any]]] = {
    "is_causal": lambda random, recipe: True,
    "window": lambda random, recipe: _sides(recipe.window),
    "chunk_size": lambda random, recipe: recipe.chunk_size,
    "mask": _mask,
    "key_mask": lambda random, recipe: random.random((recipe.batch, recipe.keys)) < 0.7,
    "query_lengths": lambda random, recipe: random.integers(recipe.queries // 2, recipe.queries, recipe.batch),
    "key_lengths": lambda random, recipe: random.integers(recipe.keys // 2, recipe.keys, recipe.batch),
    "segment_ids": lambda random, recipe: {
        "query": random.integers(0, 2, (recipe.batch, recipe.queries)),
        "key": random.integers(0, 2, (recipe.batch, recipe.keys)),
    },
    "selected_keys": lambda random, recipe: random.integers(
        -1, recipe.keys, (recipe.batch, recipe.heads, recipe.queries, recipe.keys // 3)
    ),
    "bias": lambda random, recipe: _floats(random.normal(size=(1, recipe.heads, recipe.queries, recipe.keys)), recipe),
    "alibi_slopes": lambda random, recipe: _floats(2.0 ** -np.arange(1, recipe.heads + 1), recipe),
    "softcap": lambda random, recipe: recipe.softcap or 3.0,
    "sinks": lambda random, recipe: _floats(
        random.normal(size=(recipe.batch, recipe.heads, recipe.queries) if recipe.has_row_sinks else recipe.heads) * 2,
        recipe,
    ),
    "gate": lambda random, recipe: _floats(
        random.uniform(0.1, 1, (recipe.batch, recipe.heads, recipe.queries, recipe.value_dim)), recipe
    ),
    "rotary": lambda random, recipe: dict(recipe.rotary),
    "query_norm": lambda random, recipe: _norm(random, recipe, recipe.heads * recipe.head_dim),
    "key_norm": lambda random, recipe: _norm(random, recipe, recipe.kv_heads * recipe.head_dim),
    "value_norm": lambda random, recipe: _norm(random, recipe, recipe.kv_heads * recipe.value_dim, rotates=False),
}


def power_of(fields: dict[str, Any], names: Collection[str], check: Check) -> Power:
    """The power of a request. fields: as `make_input` makes them; names: of the arrays that are compared"""
    spec, plan = make_spec_and_plan(Decoded(fields, frozenset()))
    case = make_case(spec, plan.dtype)
    evidence = Evidence.of(case, choose_sample(case, None), None, names)
    return power(evidence, list(candidates(case, evidence.sample, evidence.right, check)), check)


@dataclass(frozen=True)
class Suggestion:
    """A request that shows mistakes: its seed, its fields, and the names of the mistakes."""

    seed: int
    fields: dict[str, Any]
    kills: tuple[str, ...]


def suggest(
    recipe: Recipe, wanted: Collection[str], names: Collection[str], seed: int, check: Check, *, apart: bool = False
) -> Suggestion | None:
    """The request of a few seeds that shows most of the wanted mistakes; None if none shows any.

    names: of the arrays that are compared; seed: the first that is tried
    apart: True if the wanted mistakes must also have different answers
    """
    best: Suggestion | None = None
    for one in _tried(recipe, wanted, names, seed, check, apart=apart):
        if best is None or len(one.kills) > len(best.kills):
            best = one
        if len(best.kills) == len(wanted):
            break
    return best if best is not None and best.kills else None


def _tried(
    recipe: Recipe, wanted: Collection[str], names: Collection[str], seed: int, check: Check, *, apart: bool
) -> Iterator[Suggestion]:
    for tried in range(seed, seed + TRIES):
        fields = make_input(recipe, tried)
        found = power_of(fields, names, check)
        same = {name for group in found.indistinguishable if len({*group} & {*wanted}) > 1 for name in group}
        shown = {*found.killed} - (same if apart else set())
        yield Suggestion(tried, fields, tuple(name for name in wanted if name in shown))
