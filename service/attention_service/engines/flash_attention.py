"""FlashAttention 2, 3 and 4: flash_attn_interface.py of flash_attn and hopper, flash_attn/cute/interface.py."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from attention_service.attention.arrays import FLOATS, cast
from attention_service.engines.arguments import Arguments, options
from attention_service.engines.call import DENSE, RAGGED, Call, Fields, Form, window_of
from attention_service.engines.tokens import (
    Rows,
    Table,
    Tokens,
    boundaries,
    counts,
    dense,
    descaled,
    joined,
    numbers,
    paged,
    ragged,
    slots,
    whole,
)
from attention_service.errors import FieldConflict, InvalidValue, ShapeMismatch, shape


def func(given: Arguments) -> Call:
    """flash_attn_func: sequences of one length."""
    query, key, value = (dense(*given.named(name)) for name in "qkv")
    return _call(given, query, key, value, DENSE)


def varlen(given: Arguments) -> Call:
    """flash_attn_varlen_func: sequences beside each other; keys may lie in pages, in version 4 all also in slots."""
    query = _tokens(given, "q", "cu_seqlens_q", given.maybe_named("seqused_q"))
    name = _table(given)
    if name is None:
        used = given.maybe_named("seqused_k")
        key, value = (_tokens(given, one, "cu_seqlens_k", used) for one in "kv")
    else:
        k = numbers("k", given.array("k"), 4, "pages, page, hk, d")
        capacity = len(query.lengths) * (given.array(name).shape[-1] if given.array(name).ndim else 0) * k.shape[1]
        if "seqused_k" in given or name == "page_table":
            lengths = given.named("seqused_k")
        else:
            bounds = given.named("cu_seqlens_k")
            lengths = ("cu_seqlens_k", boundaries(*bounds, capacity, "tokens of the pages")[1])
        table = Table.of_rows(name, given.array(name), lengths, k.shape[1], len(query.lengths))
        key, value = (paged(one, given.array(one), "NHD", table) for one in "kv")
    return _call(given, query, key, value, RAGGED if "cu_seqlens_q" in given else DENSE)


def kvcache(given: Arguments) -> Call:
    """flash_attn_with_kvcache: cached keys in slots or pages, then new ones."""
    given.version = given.version or 3
    query = _tokens(given, "q", "cu_seqlens_q", None)
    form = RAGGED if "cu_seqlens_q" in given else DENSE
    b = len(query.lengths)
    new = [_tokens(given, one, "cu_seqlens_k_new", None) for one in "kv" if one in given]
    if len(new) == 1:
        raise FieldConflict.at(f"/{new[0].name}", "both k and v, or neither", "one")
    if new and len(new[0].lengths) != b:
        raise FieldConflict.at("/k", f"{b} sequences, as q", str(len(new[0].lengths)))
    if new and "cache_seqlens" not in given:
        raise FieldConflict.at("/k", "cache_seqlens beside new keys", "none")
    cached = _cached(given, b, new[0].lengths if new else np.zeros(b, np.int64))
    if "rotary_cos" in given and (not new or not new[0].lengths.all()):
        raise FieldConflict.at("/rotary_cos", "new keys of each sequence, k and v", "none")
    if not new:
        return _call(given, query, *cached, form)
    return _call(given, query, new[0], new[1], form, cached)


def _tokens(given: Arguments, name: str, bounds: str, used: tuple[str, np.ndarray] | None) -> Tokens:
    """Tokens beside each other with boundaries, else in slots."""
    if bounds in given:
        return ragged(*given.named(name), given.named(bounds), used)
    return dense(*given.named(name), used)


def _table(given: Arguments) -> str | None:
    names = [name for name in ("block_table", "page_table") if name in given]
    if len(names) == 2:
        raise FieldConflict.at("/page_table", "one table, of version 2 or of 3 and 4", "two")
    return names[0] if names else None


def _cached(given: Arguments, b: int, new: np.ndarray) -> tuple[Tokens, Tokens]:
    """Cached keys and values. new: the number of tokens that are appended to each sequence, (b,)"""
    name = _table(given)
    cache = numbers("k_cache", given.array("k_cache"), 4, "slots, l, hk, d")
    table = None if name is None else whole(name, given.array(name), (None, None), "b, max pages")
    rows, columns = (len(cache), 1) if table is None else table.shape
    slot = np.arange(b)
    if "cache_batch_idx" in given:
        slot = counts("cache_batch_idx", given.array("cache_batch_idx"), np.full(b, rows - 1))
    elif rows != b:
        raise ShapeMismatch.at(f"/{name or 'k_cache'}", f"{b} sequences, as q, or cache_batch_idx", str(rows))
    most = np.full(b, columns * cache.shape[1]) - new
    if (most < 0).any():
        raise ShapeMismatch.at("/k", f"at most {columns * cache.shape[1]} tokens, as the cache", str(int(new.max())))
    lengths = counts(*given.named("cache_seqlens"), most) if "cache_seqlens" in given else most
    pad = given.maybe("cache_leftpad")
    first = np.zeros(b, np.int64) if pad is None else counts("cache_leftpad", pad, lengths)
    if name is None or table is None:
        found = [given.array(one) for one in ("k_cache", "v_cache")]
        if found[1].shape[:2] != cache.shape[:2]:
            raise ShapeMismatch.of("/v_cache", f"slots and tokens {shape(cache.shape[:2])}, as k_cache", found[1])
        at = Rows(len(cache), cache.shape[1], slot, first, lengths - first, cache.shape[1] - first)
        return slots("k_cache", found[0], at), slots("v_cache", found[1], at)
    if pad is not None and name == "block_table":
        raise FieldConflict.at(
            "/cache_leftpad", "no block_table beside it", "both", "FlashAttention 2 refuses them, too"
        )
    pages = Table(name, table.reshape(-1), slot * columns, lengths, cache.shape[1], columns)
    key, value = (paged(one, given.array(one), "NHD", pages, first) for one in ("k_cache", "v_cache"))
    return key, value


def _call(
    given: Arguments, query: Tokens, key: Tokens, value: Tokens, form: Form, past: tuple[Tokens, Tokens] | None = None
) -> Call:
    """The call, with the options that all functions have."""
    query = descaled("q_descale", given.maybe("q_descale"), query, key.heads)
    key = descaled("k_descale", given.maybe("k_descale"), key, key.heads)
    value = descaled("v_descale", given.maybe("v_descale"), value, value.heads)
    if past is not None:
        for name in ("k_descale", "v_descale"):
            if (factors := given.maybe(name)) is not None and factors.ndim > 2:
                raise ShapeMismatch.of(f"/{name}", "(), (b,) or (b, hk) beside new keys", factors)
        before, values = past
        values = descaled("v_descale", given.maybe("v_descale"), values, values.heads)
        past = descaled("k_descale", given.maybe("k_descale"), before, before.heads), values
    if "qv" in given:
        if given.version is None:
            raise FieldConflict.at("/qv", "`version` beside it: 4 returns the logsumexp in other axes", "none")
        if given.version == 4:
            form = form._replace(logsumexp=form.output, heads_first=False)
        query = joined(query, _tokens(given, "qv", "cu_seqlens_q", given.maybe_named("seqused_q")))
        key, past = joined(key, value), None if past is None else (joined(*past), past[1])
    fields, names = options(given, query, scale="softmax_scale", softcap="softcap", sinks="learnable_sink")
    window, moved = _window(given)
    fields |= window
    if (chunk := given.integer("attention_chunk") or 0) > 0:
        fields["chunk_size"] = chunk
    own = slopes = _alibi(given, query, fields)
    if "rotary_cos" in given and past is not None:
        own = rotary = _rotary(given, query, key, is_local=bool(window) or chunk > 0)
        if slopes is not None:
            own = lambda sequence: rotary(sequence) | slopes(sequence)  # noqa: E731
    return Call(query, key, value, form, fields, own, past, moved, names)


def _alibi(given: Arguments, query: Tokens, fields: Fields) -> Callable[[int], Fields] | None:
    """Adds slopes that all sequences have to the fields; else returns those of each."""
    slopes = given.maybe("alibi_slopes")
    if slopes is None:
        return None
    b, h = len(query.lengths), query.heads
    if slopes.shape not in ((h,), (b, h)):
        raise ShapeMismatch.of("/alibi_slopes", f"{shape((h,))} or {shape((b, h))}", slopes)
    slopes = cast(slopes, FLOATS["float64"], "/alibi_slopes")
    if slopes.ndim == 2:
        return lambda sequence: {"alibi_slopes": slopes[sequence]}
    fields["alibi_slopes"] = slopes
    return None


def _rotary(given: Arguments, query: Tokens, key: Tokens, *, is_local: bool) -> Callable[[int], Fields]:
    """The rotation of each sequence. Without a mask by position, all queries are rotated to the first new position."""
    cos, sin = (numbers(name, given.array(name), 2, "positions, d/2") for name in ("rotary_cos", "rotary_sin"))
    if sin.shape != cos.shape:
        raise ShapeMismatch.of("/rotary_sin", f"{shape(cos.shape)}, as rotary_cos", sin)
    new, most = key.lengths, np.full(len(key.lengths), len(cos))
    name = "rotary_seqlens" if "rotary_seqlens" in given else "cache_seqlens"
    first = counts(name, given.array(name), most - np.maximum(new, query.lengths if is_local else 1))
    interleaved = given.flag("rotary_interleaved", default=True)

    def own(sequence: int) -> Fields:
        at = int(first[sequence])
        positions = at + np.arange(query.lengths[sequence]) * is_local
        rotary: Fields = {"cos": cos, "sin": sin, "interleaved": interleaved, "query_positions": positions}
        return {"rotary": rotary | {"key_positions": at + np.arange(new[sequence])}}

    return own


def _window(given: Arguments) -> tuple[Fields, int]:
    """The fields of window and causal, and what moves the offset. Errors: InvalidValue.

    Versions differ in what a negative side means: without a version, one that would differ is refused.
    """
    sides, causal = given.sides("window_size"), given.flag("causal")
    versions = (3, 4) if given.version is None else (given.version,)
    readings = {_later(*sides, causal) if version == 4 else _earlier(*sides, causal) for version in versions}
    if len(readings) > 1:
        raise InvalidValue.of("/window_size", "a window that all versions read alike, or `version`", list(sides))
    return window_of("window_size", *readings.pop())


def _earlier(left: int | None, right: int | None, causal: bool) -> tuple[int | None, int | None]:
    """The window of versions 2 and 3, whose -1 is unbounded. Errors: InvalidValue."""
    if any(side is not None and side < -1 for side in (left, right)):
        raise InvalidValue.of("/window_size", "sides of at least 0, or -1 for no bound", [left, right])
    return (None if left == -1 else left), (0 if causal else None if right == -1 else right)


def _later(left: int | None, right: int | None, causal: bool) -> tuple[int | None, int | None]:
    """The window of version 4, whose None is unbounded; two negative sides are none."""
    if left is not None and right is not None and left < 0 and right < 0:
        left, right = None, None
    return left, 0 if causal else right
