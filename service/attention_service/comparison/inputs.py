"""Requests made to tell mistakes apart: unequal lengths, prime sizes, grouped heads, spiky scores, empty rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, Final

import numpy as np

from attention_service.attention.arrays import FLOATS
from attention_service.attention.score_term import ScoreTerm
from attention_service.attention.spec import Window
from attention_service.attention.terms import POSITIONAL, TERMS
from attention_service.backends.base import Check
from attention_service.backends.threads import TilePool
from attention_service.codecs.decoded import Decoded
from attention_service.comparison.candidates import candidates
from attention_service.comparison.case import TILES, make_case
from attention_service.comparison.engine.power import Power, power
from attention_service.comparison.engine.suggestion import Suggestion
from attention_service.comparison.mutants import MUTANTS
from attention_service.comparison.outputs import Outputs
from attention_service.comparison.recipes import Recipe
from attention_service.comparison.samples import MAX_SCORES, WHOLE, choose_sample
from attention_service.errors import InvalidRequest
from attention_service.pipeline.prepare import make_spec_and_plan

# Seeds that are tried for a request that shows as much as possible.
TRIES: Final = 6
# The lowest and the highest sink, about: the largest score of a row is 4 to 8.
SINKS: Final = (-2.0, 8.0)
# What bounds the memory of a made input (see `suggestion_bytes`): the most numbers of outputs that are kept for each
# mutant, and bytes that a sample keeps.
MADE_OUTPUTS: Final = 2**14
MADE_ROOM: Final = 2**23


def make_input(recipe: Recipe, seed: int) -> dict[str, Any]:
    """The fields of a request, arrays as ndarrays, in layout bhld. The same seed makes the same request."""
    random = np.random.default_rng(seed)
    dtype = FLOATS[recipe.dtype]

    def normal(*shape: int, spread: float = 1.0) -> np.ndarray:
        return (random.normal(size=shape) * spread).astype(dtype)

    options, b, g = recipe.options, recipe.batch, recipe.kv_heads
    past = recipe.past if "past" in options else 0
    query = normal(b, recipe.heads, recipe.queries, recipe.head_dim, spread=2.5 * recipe.size)  # spiky scores
    key = normal(b, g, recipe.keys - past, recipe.head_dim, spread=recipe.size)
    # A mean of its own for each head, so that the values of other heads show.
    value = (normal(b, g, recipe.keys - past, recipe.value_dim) + random.normal(size=(1, g, 1, 1)) * 2).astype(dtype)
    found: dict[str, Any] = {"query": query, "key": key, "value": value, "layout": "bhld"}
    if past:
        found["past_key"] = normal(b, g, past, recipe.head_dim)
        found["past_value"] = normal(b, g, past, recipe.value_dim)
    for name in sorted(options - {"past"}):
        found[name] = (OPTIONS | COTANGENTS)[name](random, recipe)
    if POSITIONAL & options and recipe.has_offset:
        last = recipe.keys - recipe.queries
        # One batch entry at the beginning of the keys, the others towards their end.
        of_entries = np.linspace(3, last, b).round().astype(np.int64)
        found["query_offset"] = {"last": last, "first": 0, "one": 3}.get(recipe.alignment, of_entries)
    if recipe.scales_heads:
        found["scale"] = _floats(random.uniform(0.2, 0.8, recipe.heads), recipe)
    elif recipe.scale is not None:
        found["scale"] = recipe.scale
    if COTANGENTS.keys() & options:
        found["gradients"] = "all"
    if recipe.normalization != "softmax":
        found["normalization"] = recipe.normalization
    return found


def _norm(random: np.random.Generator, recipe: Recipe, features: int, *, rotates: bool = True) -> dict[str, Any]:
    """A norm with weights. features: of all heads"""
    options = {name: option for name, option in recipe.norm.items() if rotates or name != "position"}
    dim = recipe.head_dim if rotates else recipe.value_dim
    return {
        **options,
        "weight": _floats(random.normal(size=features if options.get("over") == "all" else dim) + 1, recipe),
    }


def _sides(window: Window) -> dict[str, int]:
    found = {"left": window.left, "right": window.right}
    return {side: width for side, width in found.items() if width is not None}


def _sinks(random: np.random.Generator, recipe: Recipe) -> np.ndarray:
    """Sinks below the scores that rows see, between these, and above all of them, which has a sum rescaled."""
    shape = (recipe.batch, recipe.heads, recipe.queries) if recipe.has_row_sinks else (recipe.heads,)
    low, high = SINKS
    spread = (random.permutation(prod(shape)) + 0.5) / prod(shape)
    return low + (high - low) * spread.reshape(shape) + random.normal(size=shape) / 2


def _floats(value: Any, recipe: Recipe) -> Any:
    """A value of a field, whose arrays of numbers are float32 unless the request is float64."""
    if isinstance(value, dict):
        return {name: _floats(item, recipe) for name, item in value.items()}
    is_array = isinstance(value, np.ndarray) and value.dtype.kind == "f"
    return value.astype(np.float32 if recipe.dtype != "float64" else np.float64) if is_array else value


def _example(kind: type[ScoreTerm], random: np.random.Generator, recipe: Recipe) -> Any:
    """The value of the field of a term: the number of the recipe, or an example."""
    number = recipe.numbers.get(kind.field)
    return _floats(kind.example(random, recipe.sizes), recipe) if number is None else number


# The value of each option of a request.
OPTIONS: Final[dict[str, Callable[[np.random.Generator, Recipe], Any]]] = {
    **{kind.field: partial(_example, kind) for kind in TERMS},
    "window": lambda random, recipe: _sides(recipe.window),
    "softcap": lambda random, recipe: recipe.softcap or 3.0,
    "clip_qkv": lambda random, recipe: recipe.clip or 0.8,
    "sinks": lambda random, recipe: _floats(_sinks(random, recipe), recipe),
    "gate": lambda random, recipe: _floats(
        random.uniform(0.1, 1, (recipe.batch, recipe.heads, recipe.queries, recipe.value_dim)), recipe
    ),
    "rotary": lambda random, recipe: dict(recipe.rotary),
    "query_norm": lambda random, recipe: _norm(random, recipe, recipe.heads * recipe.head_dim),
    "key_norm": lambda random, recipe: _norm(random, recipe, recipe.kv_heads * recipe.head_dim),
    "value_norm": lambda random, recipe: _norm(random, recipe, recipe.kv_heads * recipe.value_dim, rotates=False),
    "output_norm": lambda random, recipe: _norm(random, recipe, recipe.heads * recipe.value_dim, rotates=False),
}

# Likewise, of what a request is differentiated by.
COTANGENTS: Final[dict[str, Callable[[np.random.Generator, Recipe], Any]]] = {
    "grad_output": lambda random, recipe: random.normal(
        size=(recipe.batch, recipe.heads, recipe.queries, recipe.value_dim)
    ).astype(FLOATS[recipe.dtype]),
    "grad_logsumexp": lambda random, recipe: _floats(
        random.normal(size=(recipe.batch, recipe.heads, recipe.queries)), recipe
    ),
}


def made_scores(names: Collection[str]) -> int:
    """How many scores the sample of a made input has; fewer if weights are compared, as those of mutants are kept."""
    return WHOLE if "attention_weights" in names else MAX_SCORES


def power_of(
    fields: dict[str, Any],
    names: Collection[str],
    check: Check,
    tiles: tuple[int, ...] = TILES,
    wanted: Collection[str] = MUTANTS,
    pool: TilePool | None = None,
) -> Power:
    """The power of the forward pass of a request.

    fields: as `make_input` makes them; names: of the arrays that are compared
    tiles, pool: see Case; wanted: the names of the mutants that are looked at
    """
    forward = {name: value for name, value in fields.items() if name not in {"gradients", *COTANGENTS}}
    spec, plan = make_spec_and_plan(Decoded(forward, frozenset()))
    case = replace(make_case(spec, plan.dtype, check), room=MADE_ROOM, tiles=tiles, pool=pool)
    sample = choose_sample(case, None, made_scores(names), MADE_OUTPUTS)
    outputs = Outputs.of(case, sample, None, names)
    return power(outputs, list(candidates(case, sample, outputs.right, check, wanted)), check)


def suggestions(
    recipe: Recipe,
    wanted: Collection[str],
    names: Collection[str],
    seed: int,
    check: Check,
    pool: TilePool | None = None,
    *,
    apart: bool = False,
) -> Iterator[Suggestion]:
    """Requests of a few seeds, and the wanted mistakes that each shows.

    names: of the arrays that are compared; seed: the first that is tried; pool: see Case
    apart: True if the wanted mistakes must also have different answers
    """
    for tried in range(seed, seed + TRIES):
        fields = make_input(recipe, tried)
        try:
            found = power_of(fields, names, check, recipe.tiles, wanted, pool)
        except InvalidRequest:
            continue  # options that cannot stand together in these sizes, which is no error of the caller
        same = {name for group in found.indistinguishable if len({*group} & {*wanted}) > 1 for name in group}
        shown = {*found.killed} - (same if apart else set())
        yield Suggestion(tried, fields, tuple(name for name in wanted if name in shown))
