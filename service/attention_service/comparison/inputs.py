"""Requests made to tell mistakes apart: unequal lengths, prime sizes, grouped heads, spiky scores, empty rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from attention_service.attention.arrays import FLOATS
from attention_service.attention.shapes import Sizes
from attention_service.attention.spec import AttentionSpec, Rotary, Window
from attention_service.backends.base import Check
from attention_service.codecs.decoded import Decoded
from attention_service.comparison.candidates import candidates
from attention_service.comparison.case import TILES, Case, make_case
from attention_service.comparison.evidence import Evidence
from attention_service.comparison.mutants import MUTANTS
from attention_service.comparison.power import Power, power
from attention_service.comparison.samples import MAX_HEADS, MAX_SCORES, WHOLE, choose_sample
from attention_service.errors import InvalidValue
from attention_service.pipeline.prepare import make_spec_and_plan

# Seeds that are tried for a request that shows as much as possible.
TRIES: Final = 6
# Prime lengths, which no tile divides: key_length is that with the past.
BATCH: Final = 2
QUERIES: Final = 13
TILED_QUERIES: Final = 19
KEYS: Final = 67
# The widest windows and chunks that are kept, and the largest groups of query heads.
MAX_REACH: Final = 512
MAX_GROUP: Final = 16
PAST: Final = 5
WINDOW: Final = (7, 3)
# Keys that fill a tile of 128 twice, where those of larger tiles are too many.
KEYS_OF_TILE: Final = 257
# Keys, and features of a value, of a request whose values can be read transposed.
KEYS_OF_SQUARE: Final = 23
CHUNK: Final = 7
HEAD_DIM: Final = 8
# A scale whose scores overflow as exponentials, also in float64.
OVERFLOWING: Final = 100.0
VALUE_DIM: Final = 5
# What bounds the memory of a made input (see `suggestion_bytes`): the widest head dimension; the most numbers of keys
# and values of a sample, each query head with its own; the most numbers of outputs that are kept for each mutant; and
# bytes that a sample keeps.
MAX_DIM: Final = 1024
MAX_NUMBERS: Final = 1_100_000
MADE_OUTPUTS: Final = 2**14
MADE_ROOM: Final = 2**23


@dataclass(frozen=True)
class Recipe:
    """What a request is made of.

    options: fields of the API that it has, and `past`; keys: with the past; norm: options of all norms;
    scales_heads: True for a scale per head; has_row_sinks: True for a sink per query of each head
    size: a factor of queries and keys; tiles: see Case
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
    clip: float | None = None
    scale: float | None = None
    scales_heads: bool = False
    has_row_sinks: bool = False
    size: float = 1.0
    normalization: str = "softmax"
    tiles: tuple[int, ...] = TILES


# The options that let mistakes of a group show.
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


def options_of(names: Iterable[str], spec: AttentionSpec) -> tuple[str, ...]:
    """The fields of a request that mistakes are about, by the names of these."""
    groups = dict.fromkeys(name.partition(".")[0] for name in names)
    fields = {"padding": ("key_mask", "key_lengths"), "cache": ("past_key",), "norm": NEEDS["norm"][:-1]}
    about = (field for group in groups for field in fields.get(group, NEEDS.get(group, ())[:1]))
    return tuple(name for name in about if getattr(spec, name) is not None)


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
    "window.missing_rows": {"queries": TILED_QUERIES},
    "rotary.other_dim": {"rotary": {"base": 500.0, "dim": HEAD_DIM // 2}},
    "precision.overflow16": {"dtype": "float16", "size": OVERFLOWING},
    "value.is_key": {"value_dim": HEAD_DIM},
    "value.transposed": {"keys": KEYS_OF_SQUARE, "value_dim": KEYS_OF_SQUARE},
}


def recipe_for(names: Iterable[str], tiles: tuple[int, ...] = TILES) -> Recipe:
    """The recipe of a request that mistakes of these names apply to. tiles: see Case"""
    groups = {name.partition(".")[0] for name in names}
    options = {option for group in groups for option in NEEDS.get(group, ())}
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
    """Keys that fill each of these tiles twice, and one more, so that there is a tail."""
    return 2 * max(tiles) + 1


def recipe_of(case: Case, wanted: Collection[str] = (), tiles: tuple[int, ...] = TILES) -> Recipe:
    """The recipe of a small request with the options of another. wanted: mistakes that it should show; tiles: see Case

    It is narrower than the other where that has more than MAX_DIM features.
    """
    wide = tiles if needs_tiles(wanted) else ()
    return replace(recipe_for_sizes(case.spec, case.plan.sizes, case.dtype, wide), tiles=tiles)


def recipe_for_sizes(spec: AttentionSpec, sizes: Sizes, dtype: np.dtype, tiles: tuple[int, ...]) -> Recipe:
    """The recipe of a small request with the options of a spec. tiles: those that its keys should fill twice"""
    options = {name for name in OPTIONS if getattr(spec, name) is not None}
    if not spec.is_causal:
        options.remove("is_causal")
    if spec.past_key is not None:
        options.add("past")
    has_offset = spec.query_offset is not None or spec.past_key is not None
    head_dim, value_dim = min(sizes.head_dim, MAX_DIM), min(sizes.value_dim, MAX_DIM)
    window, chunk = _narrowed(spec.window), min(spec.chunk_size or CHUNK, MAX_REACH)
    reach = max(window.left or 0, window.right or 0) if "window" in options else 0
    reach = max(reach, chunk if "chunk_size" in options else 0)
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
        chunk_size=chunk,
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


def resized(recipe: Recipe, *, keys: int | None, heads: int | None, head_dim: int | None) -> Recipe:
    """The recipe with other sizes. Errors: InvalidValue for those that no request has, or that take too much memory."""
    group = recipe.heads // recipe.kv_heads
    least, most = recipe.past + 2, MAX_NUMBERS // BATCH
    for name, size, low, factor in (
        ("keys", keys, least, 1),
        ("heads", heads, group, group),
        ("head_dim", head_dim, 1, 1),
    ):
        if size is not None and not (low <= size <= most and size % factor == 0):
            expected = f"a multiple of {factor}" if factor > 1 else f"at least {low}"
            raise InvalidValue.of(f"--{name.replace('_', '-')}", expected, size)
    if recipe.queries == recipe.keys and keys is not None:
        recipe = replace(recipe, queries=keys)
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


def _norm(random: np.random.Generator, recipe: Recipe, features: int, *, rotates: bool = True) -> dict[str, Any]:
    """A norm with weights. features: of all heads"""
    options = {name: option for name, option in recipe.norm.items() if rotates or name != "position"}
    dim = recipe.head_dim if rotates else recipe.value_dim
    return {
        **options,
        "weight": _floats(random.normal(size=features if options.get("over") == "all" else dim) + 1, recipe),
    }


def _narrowed(window: Window | None) -> Window:
    """A window with the same sides, up to MAX_REACH."""
    if window is None:
        return Window(*WINDOW)
    left, right = (None if width is None else min(width, MAX_REACH) for width in (window.left, window.right))
    return Window(left, right)


def _sides(window: Window) -> dict[str, int]:
    found = {"left": window.left, "right": window.right}
    return {side: width for side, width in found.items() if width is not None}


def _floats(array: np.ndarray, recipe: Recipe) -> np.ndarray:
    return array.astype(np.float32 if recipe.dtype != "float64" else np.float64)


# The options that read query_offset.
POSITIONAL: Final = frozenset({"is_causal", "window", "chunk_size", "alibi_slopes", "relative_keys"})
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
    "relative_keys": lambda random, recipe: {
        "key": _floats(random.normal(size=(recipe.heads, recipe.queries + recipe.keys - 1, recipe.head_dim)), recipe),
        "first": 1 - recipe.queries,
        "query_bias": _floats(random.normal(size=(recipe.heads, recipe.head_dim)), recipe),
    },
    "softcap": lambda random, recipe: recipe.softcap or 3.0,
    "clip_qkv": lambda random, recipe: recipe.clip or 0.8,
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
    "output_norm": lambda random, recipe: _norm(random, recipe, recipe.heads * recipe.value_dim, rotates=False),
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
) -> Power:
    """The power of a request. fields: as `make_input` makes them; names: of the arrays that are compared

    tiles: see Case; wanted: the names of the mutants that are looked at
    """
    spec, plan = make_spec_and_plan(Decoded(fields, frozenset()))
    case = replace(make_case(spec, plan.dtype, check), room=MADE_ROOM, tiles=tiles)
    sample = choose_sample(case, None, made_scores(names), MADE_OUTPUTS)
    evidence = Evidence.of(case, sample, None, names)
    return power(evidence, list(candidates(case, evidence.sample, evidence.right, check, wanted)), check)


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
        found = power_of(fields, names, check, recipe.tiles, wanted)
        same = {name for group in found.indistinguishable if len({*group} & {*wanted}) > 1 for name in group}
        shown = {*found.killed} - (same if apart else set())
        yield Suggestion(tried, fields, tuple(name for name in wanted if name in shown))
