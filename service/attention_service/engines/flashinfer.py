"""FlashInfer 0.6 and 0.7: decode.py, prefill.py, cascade.py, mla/. Arguments of __init__, plan and run are one set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from attention_service.engines.arguments import Arguments, options, scaled
from attention_service.engines.call import RAGGED, TOKENS, Call, Fields, Form, Merge, window_of
from attention_service.engines.partial import State
from attention_service.engines.tokens import (
    Table,
    Tokens,
    boundaries,
    counts,
    descaled,
    joined,
    last_pages,
    numbers,
    paged,
    ragged,
    whole,
)
from attention_service.errors import FieldConflict, InvalidArray, MissingField, ShapeMismatch, shape
from attention_service.schemas.merge import MAX_PARTS

# Features of compressed keys where a plan does not say it: those of DeepSeek.
CKV: Final = 512

# More scores than any mask has.
MOST_SCORES: Final = 2.0**53


def single_prefill(given: Arguments) -> Call:
    """single_prefill_with_kv_cache: one sequence."""
    query, key, value = _single(given, numbers("q", given.array("q"), 3, "q, h, d"))
    # One sequence: factors of heads stand for (b, hk).
    found = []
    for name, tokens in (("scale_q", query), ("scale_k", key), ("scale_v", value)):
        factors = given.maybe(name)
        factors = factors[None] if factors is not None and factors.ndim == 1 else factors
        found.append(descaled(name, factors, tokens, tokens.heads))
    return _call(given, *found, causal=given.flag("causal"))


def single_decode(given: Arguments) -> Call:
    """single_decode_with_kv_cache: one query."""
    query = numbers("q", given.array("q"), 2, "h, d")
    form = Form(lambda x: x[0, 0], lambda x: x[0, 0], "2")
    return _call(given, *_single(given, query[None]), causal=True, form=form)


def decode(given: Arguments) -> Call:
    """BatchDecodeWithPagedKVCacheWrapper: the same number of queries for each sequence, most often one."""
    key, value = _pages(given, "paged_kv_cache", "NHD", ("indptr", "indices", "last_page_len"))
    query = _queries(given, "q", len(key.lengths))
    right = given.integer("window_right") or 0
    return _call(given, query, key, value, causal=right == 0, right=right)


def paged_prefill(given: Arguments) -> Call:
    """BatchPrefillWithPagedKVCacheWrapper."""
    names = ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
    query = ragged(*given.named("q"), given.named("qo_indptr"))
    pages = _pages(given, "paged_kv_cache", "NHD", names)
    return _call(given, query, *pages, causal=given.flag("causal"), form=_form(given))


def ragged_prefill(given: Arguments) -> Call:
    """BatchPrefillWithRaggedKVCacheWrapper."""
    given.choice("kv_layout", ("NHD",))
    query = ragged(*given.named("q"), given.named("qo_indptr"))
    key, value = (ragged(*given.named(name), given.named("kv_indptr")) for name in "kv")
    return _call(given, query, key, value, causal=given.flag("causal"), form=_form(given))


def _form(given: Arguments) -> Form:
    """The axes and the base of the logsumexp of prefill."""
    base = {"log2": "2", "ln": "e"}[given.choice("lse_base", ("log2", "ln"))]
    is_first = given.choice("lse_layout", ("NH", "HN")) == "HN"
    return (RAGGED if is_first else TOKENS)._replace(base=base)


def mla(given: Arguments) -> Call:
    """BatchMLAPagedAttentionWrapper: one key of all heads, in two parts, whose first part is the value."""
    is_dense = "block_tables" in given
    bounds = given.named("cum_seq_lens_q" if is_dense else "qo_indptr")
    query = joined(*(ragged(*part, bounds) for part in _parts(given, "query", ("q_nope", "q_pe"))))
    caches = [
        (name, numbers(name, array, 3, "pages, page, d")[:, :, None])
        for name, array in _parts(given, "kv_cache", ("ckv_cache", "kpe_cache"))
    ]
    page = caches[0][1].shape[1]
    if is_dense:
        rows = given.array("block_tables")
        table = Table.of_rows("block_tables", rows, given.named("seq_lens"), page, len(query.lengths))
    else:
        entries = whole("kv_indices", given.array("kv_indices"), (None,), "pages of all sequences,")
        start, pages = boundaries(*given.named("kv_indptr"), len(entries), "entries of kv_indices")
        table = Table("kv_indices", entries, start, counts(*given.named("kv_len_arr"), pages * page), page)
    value, rotated = (paged(name, cache, "NHD", table) for name, cache in caches)
    value, rotated = scaled(given, "ckv_scale", value), scaled(given, "kpe_scale", rotated)
    scale = "bmm1_scale" if "bmm1_scale" in given else "sm_scale"
    if scale not in given:
        raise MissingField.at("/sm_scale", "a number", "none", "1/√d of the model, not of the compressed keys")
    mode = given.choice("lse_mode", ("none", "base2", "basee"))
    given.agree(
        {"num_heads": query.heads, "head_dim_ckv": value.features, "head_dim_kpe": rotated.features, "page_size": page}
    )
    key, value = joined(value, rotated), scaled(given, "bmm2_scale", value)
    form = TOKENS._replace(base="e" if given.flag("return_lse_base_on_e") or mode == "basee" else "2")
    return _call(given, query, key, value, causal=given.flag("causal"), form=form, scale=scale)


def _parts(given: Arguments, whole_name: str, names: tuple[str, str]) -> list[tuple[str, np.ndarray]]:
    """Features without rotation and rotated ones: two arguments, a pair, or one array that has them beside each other.

    Errors: FieldConflict for both, MissingField, InvalidArray.
    """
    if whole_name not in given:
        return [given.named(name) for name in names]
    if any(name in given for name in names):
        raise FieldConflict.at(f"/{whole_name}", f"{whole_name}, or {' and '.join(names)}", "both")
    pair = given.given[whole_name]
    if isinstance(pair, list | tuple) and len(pair) == 2 and all(isinstance(one, np.ndarray) for one in pair):
        return [(whole_name, one) for one in pair]
    array, size = numbers(whole_name, given.array(whole_name), 3, "…, …, d"), given.integer("head_dim_ckv") or CKV
    return [(whole_name, array[..., :size]), (whole_name, array[..., size:])]


def trtllm_decode(given: Arguments) -> Call:
    """trtllm_batch_decode_with_kv_cache."""
    return _trtllm(given, "q_len_per_req" if "cum_seq_lens_q" not in given else None, causal=True)


def trtllm_context(given: Arguments) -> Call:
    """trtllm_batch_context_with_kv_cache."""
    for name in ("bmm1_scale", "bmm2_scale", "cum_seq_lens_q"):
        given.array(name)
    return _trtllm(given, None, causal=given.flag("causal", default=True))


def merge_state(given: Arguments) -> Merge:
    """merge_state: two parts."""
    for name in ("v_a", "v_b"):
        if (v := given.array(name)).ndim != 3:
            raise ShapeMismatch.of(f"/{name}", "(n, h, d)", v)
    return _merged([(given.named(f"v_{one}"), given.named(f"s_{one}")) for one in "ab"])


def merge_states(given: Arguments) -> Merge:
    """merge_states: parts on the second axis."""
    v, s = given.array("v"), given.array("s")
    if v.ndim != 4 or s.shape != v.shape[:-1]:
        raise ShapeMismatch.of("/s", f"{shape(v.shape[:-1])}, v (n, parts, h, d) without d", s)
    if not 1 <= v.shape[1] <= MAX_PARTS:
        raise ShapeMismatch.of("/v", f"1 to {MAX_PARTS} parts on the second axis", v)
    return _merged([(("v", v[:, n]), ("s", s[:, n])) for n in range(v.shape[1])])


def _merged(parts: list[Any]) -> Merge:
    states = [State(output, sums) for (_, output), (_, sums) in parts]
    return Merge(states, [(one, other) for (one, _), (other, _) in parts])


def _single(given: Arguments, q: np.ndarray) -> tuple[Tokens, Tokens, Tokens]:
    """The tokens of one sequence, each by its boundaries."""
    order = (0, 1, 2) if given.choice("kv_layout", ("NHD", "HND")) == "NHD" else (1, 0, 2)
    arrays = [("q", q), *((one, numbers(one, given.array(one), 3, "k, hk, d").transpose(order)) for one in "kv")]
    query, key, value = (ragged(name, array, (name, np.array([0, len(array)]))) for name, array in arrays)
    return query, key, value


def _queries(given: Arguments, name: str, b: int) -> Tokens:
    """Queries of decode, the same number for each sequence."""
    q = numbers(name, given.array(name), 3, "b · q, h, d")
    each = given.integer("q_len_per_req")
    each = len(q) // b if each is None and b else each or 0
    if len(q) != b * each:
        raise ShapeMismatch.of(f"/{name}", f"{each} queries for each of {b} sequences", q)
    return ragged(name, q, ("q_len_per_req", np.arange(b + 1) * each))


def _caches(given: Arguments, name: str, layout: str) -> list[tuple[np.ndarray, str]]:
    """The caches of keys and values, of one tensor or a pair of arrays, and their layout."""
    found = given.given.get(name)
    if isinstance(found, list | tuple) and len(found) == 2 and all(isinstance(one, np.ndarray) for one in found):
        return [(one, layout) for one in found]
    cache = numbers(name, given.array(name), 5, "pages, 2, page, hk, d" if layout == "NHD" else "pages, 2, hk, page, d")
    hint = "a pair is two arrays, in JSON typed ones" if given.is_untyped(name) and len(cache) == 2 else ""
    if cache.shape[1] != 2:
        raise ShapeMismatch.of(f"/{name}", "2 on the second axis, keys and values", cache, hint)
    if hint:
        raise ShapeMismatch.of(f"/{name}", "an array, as lists with two pages may be a pair", cache, hint)
    return [(cache[:, 0], layout), (cache[:, 1], layout)]


def _pages(given: Arguments, name: str, layout: str, names: tuple[str, str, str]) -> tuple[Tokens, Tokens]:
    """Keys and values of pages that are listed for each sequence."""
    layout = given.choice("kv_layout", (layout, "HND" if layout == "NHD" else "NHD"))
    caches = _caches(given, name, layout)
    page = _page(name, *caches[0])
    bounds, indices, last = (given.named(one) for one in names)
    table = last_pages(bounds, indices, last, page)
    given.agree({"page_size": page})
    key, value = (paged(name, cache, axes, table) for cache, axes in caches)
    return key, value


def _page(name: str, cache: np.ndarray, layout: str) -> int:
    """The length of a page."""
    size: int = numbers(name, cache, 4, "pages, …, d").shape[1 if layout == "NHD" else 2]
    return size


def _trtllm(given: Arguments, each: str | None, *, causal: bool) -> Call:
    """Pages of a table with rows, in layout HND by default; of keys and values apart where they do not share it."""
    layout = given.choice("kv_layout", ("HND", "NHD"))
    caches = _caches(given, "kv_cache", layout)
    page = _page("kv_cache", *caches[0])
    lengths = whole("seq_lens", given.array("seq_lens"), (None,), "b,")
    shared = given.flag("uses_shared_paged_kv_idx", default=True)
    rows = given.array("block_tables")
    sizes = (len(lengths), None) if shared else (len(lengths), 2, None)
    rows = whole("block_tables", rows, sizes, "b, max pages" if shared else "b, 2, max pages")
    tables = [rows, rows] if shared else [rows[:, 0], rows[:, 1]]
    key, value = (
        paged("kv_cache", cache, axes, Table.of_rows("block_tables", table, ("seq_lens", lengths), page, len(lengths)))
        for (cache, axes), table in zip(caches, tables, strict=True)
    )
    if each is None:
        query = ragged(*given.named("query"), given.named("cum_seq_lens_q"))
    else:
        query = _queries(Arguments({"q_len_per_req": 1} | dict(given.given)), "query", len(lengths))
    return _call(given, query, key, scaled(given, "bmm2_scale", value), causal=causal, scale="bmm1_scale")


def _call(
    given: Arguments,
    query: Tokens,
    key: Tokens,
    value: Tokens,
    *,
    causal: bool,
    right: int = -1,
    form: Form = TOKENS,
    scale: str = "sm_scale",
) -> Call:
    """The call, with the options that all functions have."""
    if len(key.lengths) != len(query.lengths):
        raise FieldConflict.at(
            f"/{key.name}", f"{len(query.lengths)} sequences, as {query.name}", str(len(key.lengths))
        )
    given.agree({"num_qo_heads": query.heads, "num_kv_heads": key.heads, "head_dim": query.features})
    given.agree({"head_dim_qk": query.features, "head_dim_vo": value.features})
    fields, names = options(given, query, scale=scale, softcap="logits_soft_cap", sinks="sinks")
    if scale == "bmm1_scale":
        fields.setdefault("scale", 1.0)
    query, key, value = (scaled(given, f"{one}_scale", x) for one, x in zip("qkv", (query, key, value), strict=True))
    own = _masks(given, query.lengths, key.lengths)
    left = given.integer("window_left")
    left = None if left is None or left < 0 else left
    bound = 0 if causal and own is None else None if right < 0 else right
    window, moved = window_of("window_left", left, bound)
    return Call(query, key, value, form, fields | window, own, None, moved, names | {"mask": "custom_mask"})


def _masks(given: Arguments, queries: np.ndarray, keys: np.ndarray) -> Callable[[int], Fields] | None:
    """The mask of each sequence, from one array of all; None without masks. Errors: InvalidArray, ShapeMismatch."""
    is_packed = "packed_custom_mask" in given
    name = "packed_custom_mask" if is_packed else "custom_mask"
    mask = given.maybe(name)
    if mask is None:
        return None
    if float(queries.astype(np.float64) @ keys) > MOST_SCORES:  # their product may be no integer of 64 bits
        raise ShapeMismatch.of(f"/{name}", "a mask of all scores, which are too many", mask)
    bits = queries * keys
    sizes = -(-bits // 8) if is_packed else bits
    if mask.dtype != (np.uint8 if is_packed else np.bool_):
        raise InvalidArray.of(f"/{name}", "bytes, of type uint8" if is_packed else "booleans", mask)
    is_square = not is_packed and len(bits) == 1 and mask.shape == (queries[0], keys[0])
    if mask.shape != (sizes.sum(),) and not is_square:
        raise ShapeMismatch.of(
            f"/{name}", f"{shape((int(sizes.sum()),))}, a {'bit' if is_packed else 'boolean'} a score", mask
        )
    flat, ends = mask.reshape(-1), np.cumsum(sizes)

    def own(sequence: int) -> Fields:
        part = flat[ends[sequence] - sizes[sequence] : ends[sequence]]
        part = np.unpackbits(part, count=int(bits[sequence]), bitorder="little").astype(bool) if is_packed else part
        return {"mask": part.reshape(queries[sequence], keys[sequence])}

    return own
