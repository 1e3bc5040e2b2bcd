"""vLLM: what an attention layer and its metadata say, whatever backend computes it."""

from __future__ import annotations

import numpy as np

from attention_service.attention.arrays import FLOATS, per_head
from attention_service.engines.arguments import Arguments, options, scaled
from attention_service.engines.call import RAGGED, Call, window_of
from attention_service.engines.tokens import Table, numbers, paged, ragged
from attention_service.errors import FieldConflict, InvalidValue, ShapeMismatch


def attention(given: Arguments) -> Call:
    """The attention of a layer over its paged cache."""
    query = ragged(*given.named("query"), given.named("query_start_loc"))
    total, tokens = given.integer("num_actual_tokens"), int(query.lengths.sum())
    if total is not None and total != tokens:
        raise FieldConflict.at("/num_actual_tokens", f"{tokens}, the end of query_start_loc", str(total))
    (key_name, keys, key_axes), (value_name, values, value_axes) = _caches(given)
    page = keys.shape[{"NHD": 1, "HND": 2}.get(key_axes, 3)]
    table = Table.of_rows("block_table", given.array("block_table"), given.named("seq_lens"), page, len(query.lengths))
    key, value = paged(key_name, keys, key_axes, table), paged(value_name, values, value_axes, table)
    fields, names = options(given, query, scale="scale", softcap="logits_soft_cap", sinks="sinks")
    if (slopes := given.maybe("alibi_slopes")) is not None:
        fields["alibi_slopes"] = per_head(slopes, "/alibi_slopes", query.heads, FLOATS["float64"])
    causal, size = given.flag("causal", default=True), given.integer("sliding_window")
    if size is not None and size < 1:
        raise InvalidValue.of("/sliding_window", "at least 1", size, "leave it out for no window")
    left = None if size is None else size - 1
    window, moved = window_of("sliding_window", left, 0 if causal else left)
    query, key = scaled(given, "q_scale", query), scaled(given, "k_scale", key)
    return Call(query, key, scaled(given, "v_scale", value), RAGGED, fields | window, offset=moved, names=names)


def _caches(given: Arguments) -> list[tuple[str, np.ndarray, str]]:
    """The caches of keys and values with their arguments and layouts. Errors: FieldConflict, ShapeMismatch."""
    if "kv_cache" not in given:
        keys, values = given.array("key_cache"), given.array("value_cache")
        axes = ("classic key", "classic value") if keys.ndim == 5 else ("NHD", "NHD")
        numbers("key_cache", keys, 5 if keys.ndim == 5 else 4, "pages, page, hk, d")
        return [("key_cache", keys, axes[0]), ("value_cache", values, axes[1])]
    if "key_cache" in given or "value_cache" in given:
        raise FieldConflict.at("/kv_cache", "kv_cache, or key_cache and value_cache", "both")
    cache = given.array("kv_cache")
    if cache.ndim == 4 and cache.shape[-1] % 2 == 0:
        return [("kv_cache", part, "HND") for part in np.array_split(cache, 2, axis=-1)]
    numbers("kv_cache", cache, 5, "2, pages, page, hk, d) or (pages, hk, page, 2d")
    places = [axis for axis in (0, 1) if cache.shape[axis] == 2]
    if len(places) != 1:
        hint = "send key_cache and value_cache" if places else ""
        raise ShapeMismatch.of("/kv_cache", "2 on the first or on the second axis, not on both", cache, hint)
    return [("kv_cache", _part(cache, places[0], n), "NHD") for n in (0, 1)]


def _part(cache: np.ndarray, axis: int, n: int) -> np.ndarray:
    """Keys (0) or values (1), as a view."""
    return cache[n] if axis == 0 else cache[:, n]
