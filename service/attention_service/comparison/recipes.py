"""Recipes: the sizes and options of requests that are made to show mistakes."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from pydantic import TypeAdapter, ValidationError

from attention_service.attention.plan import Plan
from attention_service.attention.shapes import Sizes
from attention_service.attention.spec import AttentionSpec, Rotary, Window
from attention_service.attention.terms import FIELDS as TERMS
from attention_service.attention.terms import POSITIONAL
from attention_service.comparison.case import TILES, Case
from attention_service.comparison.mutants import MUTANTS
from attention_service.comparison.samples import MAX_HEADS
from attention_service.errors import InvalidValue

# Prime lengths, which no tile divides: key_length is that with the past.
BATCH: Final = 2
QUERIES: Final = 13
TILED_QUERIES: Final = 19
KEYS: Final = 67
# The widest windows, chunks and other integers of terms that are kept, and the largest groups of query heads.
MAX_REACH: Final = 512
MAX_GROUP: Final = 16
PAST: Final = 5
WINDOW: Final = (7, 3)
# Keys that fill a tile of 128 twice, where those of larger tiles are too many.
KEYS_OF_TILE: Final = 259
# Queries that fill the largest tile of kernels, of 128, twice, and more.
MOST_QUERIES: Final = 269
# Keys, and features of a value, of a request whose values can be read transposed.
KEYS_OF_SQUARE: Final = 23
HEAD_DIM: Final = 8
# A scale whose scores overflow as exponentials, also in float64.
OVERFLOWING: Final = 100.0
VALUE_DIM: Final = 5
# What bounds the memory of a made input (see `suggestion_bytes`): the widest head dimension, and the most numbers of
# keys and values of a sample, each query head with its own.
MAX_DIM: Final = 1024
MAX_NUMBERS: Final = 1_100_000


@dataclass(frozen=True)
class Recipe:
    """What a request is made of.

    options: fields of the API that it has, and `past`; keys: with the past; norm: options of all norms;
    numbers: of options that are one number, as `chunk_size`; those without one have that of an example
    scales_heads: True for a scale per head; has_row_sinks: True for a sink per query of each head
    size: a factor of queries and keys; tiles: see Case
    alignment: of queries and keys, if there is an offset: `last` with last, `first` with first, by `one` number, or by
    a number for `each` batch entry
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
    numbers: Mapping[str, int | float] = field(default_factory=dict)
    rotary: Mapping[str, Any] = field(default_factory=lambda: {"base": 500.0})
    norm: Mapping[str, str] = field(default_factory=dict)
    has_offset: bool = True
    alignment: str = "each"
    softcap: float | None = None
    clip: float | None = None
    scale: float | None = None
    scales_heads: bool = False
    has_row_sinks: bool = False
    size: float = 1.0
    normalization: str = "softmax"
    tiles: tuple[int, ...] = TILES

    @property
    def sizes(self) -> Sizes:
        """The lengths of all axes."""
        return Sizes(
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            batch_size=self.batch,
            query_length=self.queries,
            key_length=self.keys,
            head_dim=self.head_dim,
            value_dim=self.value_dim,
        )


# The options that let mistakes of a group show; a group that is named for the field of a term needs that field.
NEEDS: Final[dict[str, tuple[str, ...]]] = {
    "causal": ("is_causal",),
    "chunk": ("chunk_size",),
    "window": ("window",),
    "mask": ("mask",),
    "padding": ("key_mask",),
    "segments": ("segment_ids",),
    "merge": ("is_causal",),
    "selected": ("selected_keys", "past"),
    "bias": ("bias",),
    "alibi": ("alibi_slopes",),
    "relative": ("relative_keys",),
    "softcap": ("softcap", "bias"),
    "sinks": ("sinks",),
    "rotary": ("rotary", "past"),
    "clip": ("clip_qkv",),
    "norm": ("query_norm", "key_norm", "value_norm", "output_norm", "rotary"),
    "cache": ("past",),
    "gate": ("gate",),
    "empty": ("mask",),
}


# The options of a request that made inputs have.
MADE: Final = TERMS.union({"grad_output", "grad_logsumexp"}, *NEEDS.values()) - {"past"}


def _needs(group: str) -> tuple[str, ...]:
    """The options that let the mistakes of a group show."""
    return NEEDS.get(group, (group,) if group in TERMS else ())


def is_given(value: Any) -> bool:
    """True for the value of a field that a request has."""
    return value is not None and value is not False


def options_of(names: Iterable[str], spec: AttentionSpec) -> tuple[str, ...]:
    """The fields of a request that mistakes are about, by the names of these."""
    groups = dict.fromkeys(name.partition(".")[0] for name in names)
    fields = {"padding": ("key_mask", "key_lengths"), "cache": ("past_key",), "norm": NEEDS["norm"][:-1]}
    about = (field for group in groups for field in fields.get(group, _needs(group)[:1]))
    return tuple(name for name in about if is_given(getattr(spec, name)))


# Mistakes that need an option of norms.
NORMS: Final = {
    "norm.before_rotary": ("position", "after"),
    "norm.no_mean": ("kind", "layer"),
    "norm.per_head": ("over", "all"),
}
# Mistakes that need other fields of a recipe.
FIELDS: Final[dict[str, dict[str, Any]]] = {
    "softmax.no_max": {"scale": OVERFLOWING},
    "sinks.first_query": {"has_row_sinks": True},
    "scale.first_head": {"scales_heads": True},
    "scale.shifted": {"scales_heads": True},
    "mask.transposed": {"queries": KEYS},
    "mask.in_max": {"scale": OVERFLOWING, "options": frozenset({"is_causal", "mask"})},
    "scale.zero_is_default": {"scale": 0.0},
    "heads.as_tokens": {"kv_heads": 4, "queries": KEYS},
    "window.missing_rows": {"queries": TILED_QUERIES},
    "rotary.other_dim": {"rotary": {"base": 500.0, "dim": HEAD_DIM // 2}},
    "precision.overflow16": {"dtype": "float16", "size": OVERFLOWING},
    "value.is_key": {"value_dim": HEAD_DIM},
    "value.transposed": {"keys": KEYS_OF_SQUARE, "value_dim": KEYS_OF_SQUARE},
}


def recipe_for(names: Iterable[str], tiles: tuple[int, ...] = TILES) -> Recipe:
    """The recipe of a request that mistakes of these names apply to. tiles: see Case"""
    groups = {name.partition(".")[0] for name in names}
    options = {option for group in groups for option in _needs(group)}
    if "causal.added" in names:
        options -= {"is_causal"}
    found = Recipe(frozenset(options), tiles=tiles)
    if needs_tiles(names):
        found = replace(found, keys=keys_of_tiles(tiles))
    if any(name.startswith("sigmoid.") for name in names):
        found = replace(found, normalization="sigmoid")
    if NORMS.keys() & {*names}:
        options_of_norms = [NORMS[name] for name in names if name in NORMS]
        found = replace(found, norm=dict(options_of_norms))
    for name in FIELDS.keys() & {*names}:
        found = replace(found, **FIELDS[name])
    return found


def needs_tiles(names: Iterable[str]) -> bool:
    """True if one of these mistakes needs the keys of several tiles."""
    return any(row.by_tile for name in names if (row := MUTANTS.get(name)))


def keys_of_tiles(tiles: Collection[int]) -> int:
    """Keys that fill each of these tiles twice, and a tail, which is more than the last key if the tile is."""
    return 2 * max(tiles) + max(1, min(3, max(tiles) - 1))


def as_long(recipe: Recipe, queries: int, keys: int) -> Recipe:
    """The recipe with at least so many queries and keys, up to two tiles and a tail: what tiles do wrong shows then.

    No tile divides the keys, nor those before the first query if the last one sees all of them. One query stays one:
    kernels of one query are others.
    """
    is_square = recipe.queries == recipe.keys
    keys = max(recipe.keys, min(max(keys, queries) if is_square else keys, keys_of_tiles(TILES))) | 1
    if is_square:
        return replace(recipe, queries=keys, keys=keys)
    queries = 1 if queries == 1 else min(max(recipe.queries, min(queries, MOST_QUERIES)) | 1, keys)
    while queries > 1 and (keys - queries) % min(TILES) == 0:
        keys += 2
    return replace(recipe, queries=queries, keys=keys)


def longest(recipe: Recipe, sizes: Sizes) -> Recipe:
    """The recipe with the lengths in which mistakes of all tiles show. sizes: of the request that it is for"""
    return as_long(recipe, min(sizes.query_length, 2) * MOST_QUERIES, keys_of_tiles(TILES))


def recipe_of(case: Case, wanted: Collection[str] = (), tiles: tuple[int, ...] = TILES) -> Recipe:
    """The recipe of a small request with the options of another. wanted: mistakes that it should show; tiles: see Case

    It is narrower than the other where that has more than MAX_DIM features.
    """
    return _recipe(case.spec, case.plan.sizes, case.dtype, wanted, tiles)


def recipe_of_request(
    spec: AttentionSpec, plan: Plan, wanted: Collection[str] = (), tiles: tuple[int, ...] = TILES
) -> Recipe:
    """The same of a request in the type of its plan. spec: with cotangents, if inputs of gradients are asked for"""
    return _recipe(spec, plan.sizes, plan.dtype, wanted, tiles)


def _recipe(
    spec: AttentionSpec, sizes: Sizes, dtype: np.dtype, wanted: Collection[str], tiles: tuple[int, ...]
) -> Recipe:
    wide = tiles if needs_tiles(wanted) else ()
    return replace(recipe_for_sizes(spec, sizes, dtype, wide), tiles=tiles)


def recipe_as_json(recipe: Recipe) -> str:
    """The fields of a recipe that are not at their defaults, for a command line; tiles have an option of their own."""
    fields = TypeAdapter(Recipe).dump_python(recipe, mode="json", exclude_defaults=True, exclude={"tiles"})
    return json.dumps(fields | {"options": sorted(recipe.options)})


def recipe_from_json(text: str, tiles: tuple[int, ...] = TILES) -> Recipe:
    """The recipe that `recipe_as_json` wrote. Errors: InvalidValue."""
    expected = "the JSON of a recipe, as a report prints it"
    try:
        recipe = TypeAdapter(Recipe).validate_json(text)
    except ValidationError:
        raise InvalidValue.of("--recipe", expected, text) from None
    if not recipe.options <= MADE | {"past"}:
        raise InvalidValue.of("--recipe", expected, text)
    return replace(recipe, tiles=tiles)


def recipe_for_sizes(spec: AttentionSpec, sizes: Sizes, dtype: np.dtype, tiles: tuple[int, ...]) -> Recipe:
    """The recipe of a small request with the options of a spec. tiles: those that its keys should fill twice"""
    options = {name for name in MADE if is_given(getattr(spec, name))}
    if spec.past_key is not None:
        options.add("past")
    has_offset = spec.query_offset is not None or spec.past_key is not None
    head_dim, value_dim = min(sizes.head_dim, MAX_DIM), min(sizes.value_dim, MAX_DIM)
    window, numbers = _narrowed(spec.window), _numbers(spec)
    sides = (window.left or 0, window.right or 0) if "window" in options else ()
    reach = max([0, *sides, *(number for number in numbers.values() if isinstance(number, int))])
    keys = max(keys_of_tiles(tiles) if tiles else KEYS, reach + KEYS - max(WINDOW))
    group = min(sizes.num_heads // sizes.num_kv_heads, MAX_GROUP)
    batch, shown, group, keys = _fitting(
        head_dim + value_dim, min(sizes.num_kv_heads, 2 if group > 1 else 4), group, keys, "output_norm" in options
    )
    return Recipe(
        frozenset(options),
        dtype=dtype.name,
        batch=batch,
        heads=shown * group,
        kv_heads=shown,
        keys=keys,
        head_dim=head_dim,
        value_dim=value_dim,
        # Without an offset, a request with masks by position has as many queries as keys.
        queries=(QUERIES if spec.window is None else TILED_QUERIES) if has_offset or not POSITIONAL & options else keys,
        has_offset=has_offset,
        alignment=_alignment(spec, sizes),
        numbers=numbers,
        rotary=_rotary(spec.rotary, head_dim),
        norm=_options_of_norms(spec),
        window=window,
        softcap=spec.softcap,
        clip=spec.clip_qkv,
        scale=None if isinstance(spec.scale, np.ndarray) else spec.scale,
        has_row_sinks=spec.sinks is not None and spec.sinks.ndim > 1,
        scales_heads=isinstance(spec.scale, np.ndarray),
        normalization=spec.normalization,
    )


def _alignment(spec: AttentionSpec, sizes: Sizes) -> str:
    """How the offset of a request places queries among keys: kernels that take one number know no other."""
    if spec.query_offset is None or spec.query_offset.size > 1:
        return "each"
    offset = int(spec.query_offset.reshape(()))
    return "last" if offset == sizes.key_length - sizes.query_length else "one" if offset else "first"


def resized(
    recipe: Recipe, *, queries: int | None, keys: int | None, heads: int | None, head_dim: int | None
) -> Recipe:
    """The recipe with other sizes. Errors: InvalidValue for those that no request has, or that take too much memory."""
    group = recipe.heads // recipe.kv_heads
    least, most = recipe.past + 2, MAX_NUMBERS // BATCH
    for name, size, low, factor in (
        ("queries", queries, 1, 1),
        ("keys", keys, least, 1),
        ("heads", heads, group, group),
        ("head_dim", head_dim, 1, 1),
    ):
        if size is not None and not (low <= size <= most and size % factor == 0):
            expected = f"a multiple of {factor}" if factor > 1 else f"at least {low}"
            raise InvalidValue.of(f"--{name.replace('_', '-')}", expected, size)
    if recipe.queries == recipe.keys:
        queries = keys = keys or queries or recipe.keys
    recipe = replace(recipe, queries=queries or recipe.queries)
    if queries is not None and queries > (keys or recipe.keys):
        raise InvalidValue.of("--queries", f"at most as many as keys, {keys or recipe.keys}", queries)
    h = heads or recipe.heads
    value_dim = recipe.value_dim if head_dim is None or recipe.value_dim != recipe.head_dim else head_dim
    recipe = replace(
        recipe, keys=keys or recipe.keys, heads=h, kv_heads=h // group, head_dim=head_dim or recipe.head_dim
    )
    return replace(recipe, value_dim=value_dim, queries=min(recipe.queries, recipe.keys))


def _fitting(width: int, shown: int, group: int, keys: int, all_heads: bool) -> tuple[int, int, int, int]:
    """Batch entries, key/value heads, query heads of each, and keys of a request whose sample is not too large.

    width: features of a key and a value; shown, group, keys: what is wanted; all_heads: True if a sample has all heads
    """
    few = min(shown, 2), min(group, 2)
    sizes = [(b, shown, group, keys) for b in (BATCH, 1)] + [(1, *few, n) for n in (keys, KEYS_OF_TILE, KEYS)]
    for batch, g, each, n in sizes:
        heads = g * each if all_heads else min(g * each, MAX_HEADS)
        if n <= keys and batch * heads * n * width <= MAX_NUMBERS:
            return batch, g, each, n
    return 1, *few, KEYS_OF_SQUARE


def _rotary(rotary: Rotary | None, head_dim: int) -> dict[str, Any]:
    """The options of a rotary embedding, of at most so many features; tables become the usual base."""
    if rotary is None:
        return {"base": 500.0}
    dim = rotary.dim if rotary.cos is None else 2 * rotary.cos.shape[-1]
    dim = None if dim is None else min(dim, head_dim // 2 * 2)
    found = {"base": rotary.base, "dim": dim, "interleaved": rotary.interleaved}
    return {name: value for name, value in found.items() if value is not None}


def _options_of_norms(spec: AttentionSpec) -> dict[str, str]:
    """The options that the norms of a request have, those of the query before those of others."""
    norms = (spec.output_norm, spec.value_norm, spec.key_norm, spec.query_norm)
    given = [norm for norm in norms if norm is not None]
    return {name: getattr(norm, name) for norm in given for name in ("kind", "over", "position")}


def _numbers(spec: AttentionSpec) -> dict[str, int | float]:
    """The fields of terms that are one number, by name: integers, as sizes of chunks, up to MAX_REACH."""
    given = {name: value for name in sorted(TERMS) if type(value := getattr(spec, name)) in (int, float)}
    return {name: min(value, MAX_REACH) if isinstance(value, int) else value for name, value in given.items()}


def _narrowed(window: Window | None) -> Window:
    """A window with the same sides, up to MAX_REACH."""
    if window is None:
        return Window(*WINDOW)
    left, right = (None if width is None else min(width, MAX_REACH) for width in (window.left, window.right))
    return Window(left, right)
