"""FlashInfer 0.6: decode.py, prefill.py, cascade.py, mla/. Arguments of __init__, plan and run are one set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from attention_service.engines.arguments import Arguments, functions, options, scaled
from attention_service.engines.call import TOKENS, Answer, Call, Fields, Form, window_of
from attention_service.engines.partial import State, merge
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

# Line by line: arguments, the functions, the meaning (`functions` of arguments.py).
TABLE: Final = """
q | prefill1 decode paged ragged | queries (total_q, h, d)
q | decode1 | query (h, d)
k v | prefill1 decode1 | keys and values (k, hk, d), with HND (hk, k, d)
k v | ragged | keys and values (total_k, hk, d)
query | trt_decode trt_context | queries (total_q, h, d)
q_nope q_pe | mla | queries (total_q, h, 512) without rotation, and their rotated part (total_q, h, 64)
paged_kv_cache | decode paged | (pages, 2, page, hk, d), with HND (pages, 2, hk, page, d), or a pair of caches without the 2
kv_cache | trt_decode trt_context | (pages, 2, hk, page, d), with NHD (pages, 2, page, hk, d), or a pair of caches without the 2
ckv_cache kpe_cache | mla | keys (pages, page, 512) without rotation, which are the values, and their rotated part (pages, page, 64)
kv_layout | prefill1 decode1 decode paged ragged | NHD (the default) or HND
kv_layout | trt_decode trt_context | HND (the default) or NHD
indptr | decode | (b + 1), where the pages of each sequence begin in indices
indices | decode | pages of all sequences
last_page_len | decode | (b), how many keys are in the last page of each sequence
qo_indptr | paged ragged mla | (b + 1), where the queries of each sequence begin
kv_indptr | ragged | (b + 1), where the keys of each sequence begin
paged_kv_indptr | paged | (b + 1), where the pages of each sequence begin in paged_kv_indices
paged_kv_indices | paged | pages of all sequences
paged_kv_last_page_len | paged | (b), how many keys are in the last page of each sequence
kv_indptr | mla | (b + 1), where the pages of each sequence begin in kv_indices
kv_indices | mla | pages of all sequences
kv_len_arr | mla | (b), the keys of each sequence
block_tables | trt_decode trt_context | (b, max pages), or (b, 2, max pages) where uses_shared_paged_kv_idx is false
seq_lens | trt_decode trt_context | (b), the keys of each sequence
cum_seq_lens_q | trt_decode trt_context | (b + 1), where the queries of each sequence begin
uses_shared_paged_kv_idx | trt_decode trt_context | true (the default): one table for keys and values
q_len_per_req | decode trt_decode | queries of each sequence, the last one at the last key; in trtllm_batch_decode 1 by default
causal | prefill1 paged ragged mla | `is_causal`, the last query at the last key
causal | trt_context | the same, true by default
custom_mask | prefill1 | `mask` (q, k), true = attends; it replaces causal, not window_left
custom_mask | paged ragged | the masks of all sequences, flat; they replace causal, not window_left
packed_custom_mask | prefill1 paged ragged | the same, eight to a byte, the first in the lowest bit, each sequence from a new byte
window_left | prefill1 decode1 decode paged ragged trt_decode trt_context | `window.left`; −1 is unbounded
window_right | decode | `window.right`, 0 by default; −1 is unbounded
sm_scale | prefill1 decode1 decode paged ragged mla | `scale`
logits_soft_cap | prefill1 decode1 decode paged ragged | `softcap`; 0 is none
sinks | decode paged trt_decode trt_context | `sinks`, (h)
q_scale | decode1 decode paged ragged | a number that queries are multiplied by
k_scale v_scale | prefill1 decode1 decode paged ragged | numbers that keys and values are multiplied by
scale_q scale_k scale_v | prefill1 | (h), (hk), (hk), factors of queries, keys and values
bmm1_scale | trt_decode trt_context | `scale`, with the factors of queries and keys in it; 1 by default
bmm2_scale | trt_decode trt_context | a number that values are multiplied by
ckv_scale kpe_scale | mla | numbers that ckv_cache and kpe_cache are multiplied by
return_lse_base_on_e | mla | true: natural logarithms; of base 2 otherwise, as in all other functions
v_a v_b | merge_state | outputs of two parts (n, h, d)
s_a s_b | merge_state | their logsumexps (n, h), of base 2
v | merge_states | outputs of all parts (n, parts, h, d)
s | merge_states | their logsumexps (n, parts, h), of base 2
pos_encoding_mode | prefill1 decode1 decode paged ragged | refused unless "NONE": rotate before; its ALiBi adds slope · (j − i)
kv_cache_sf | prefill1 decode paged ragged trt_decode trt_context | refused: FP4 caches are not read
ckv_scale_arr | mla | refused: use one ckv_scale
mask bmm1_scale_log2 | trt_decode | refused: trees of speculation, and scales as logarithms
enable_block_sparse_attention | trt_decode | refused unless false: pages of each head are not read
skip_softmax_threshold_scale_factor | decode paged trt_decode trt_context | refused: it skips keys
uses_spcompress | paged trt_context | refused unless false: it skips keys
o_scale | ragged mla trt_decode | refused unless 1: the output is not quantised
o_sf_scale | trt_decode trt_context | refused unless 1: the output is not quantised
prefix_len_ptr token_pos_in_items_ptr max_item_len_ptr | paged ragged | refused: items of several prompts are not read
v_indptr o_indptr | ragged | refused: values and outputs lie as keys and queries
num_qo_heads num_kv_heads | decode paged ragged | must be as in the arrays
head_dim | decode | must be as in the arrays
head_dim_qk head_dim_vo | paged ragged | must be as in the arrays
page_size | decode paged mla | must be as in the arrays
num_heads head_dim_ckv head_dim_kpe | mla | must be as in the arrays
float_workspace_buffer use_cuda_graph | decode paged ragged mla | changes nothing
jit_args kv_data_type | decode paged ragged | changes nothing
o_data_type non_blocking fixed_split_size disable_split_kv enable_pdl | decode paged ragged | changes nothing
jit_kwargs use_fp16_qk_reduction | paged ragged | changes nothing
seq_lens block_tables | decode paged | changes nothing
seq_lens | ragged | changes nothing
seq_lens_q token_pos_in_items_len max_token_per_sequence max_sequence_kv | paged ragged | changes nothing
qo_indptr_buf custom_mask_buf mask_indptr_buf | paged ragged | changes nothing
paged_kv_indptr_buf paged_kv_indices_buf paged_kv_last_page_len_buf | paged | changes nothing
paged_kv_indptr_buffer paged_kv_indices_buffer paged_kv_last_page_len_buffer | decode | changes nothing
kv_indptr_buf | ragged | changes nothing
use_tensor_cores data_type | decode | changes nothing
use_tensor_cores | decode1 | changes nothing
o_dtype use_fp16_qk_reduction | prefill1 | changes nothing
use_fp16_softmax | paged trt_context | changes nothing
kv_data_type use_profiler profiler_buffer kv_len page_table | mla | changes nothing
backend | prefill1 decode paged ragged mla trt_decode | changes nothing
q_data_type out lse | decode paged ragged mla | changes nothing
return_lse | prefill1 decode1 decode paged ragged mla trt_decode trt_context | changes nothing
rope_scale rope_theta | prefill1 decode1 decode paged ragged | changes nothing
workspace_buffer out lse out_dtype o_sf_vec_size enable_pdl max_q_len multi_ctas_kv_counter_buffer | trt_decode trt_context | changes nothing
max_seq_len bf16q_fp8kv_transform_mode | trt_decode | changes nothing
max_kv_len batch_size cum_seq_lens_kv | trt_context | changes nothing
"""  # noqa: E501


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
    return _call(given, query, *_pages(given, "paged_kv_cache", "NHD", names), causal=given.flag("causal"))


def ragged_prefill(given: Arguments) -> Call:
    """BatchPrefillWithRaggedKVCacheWrapper."""
    given.choice("kv_layout", ("NHD",))
    query = ragged(*given.named("q"), given.named("qo_indptr"))
    key, value = (ragged(*given.named(name), given.named("kv_indptr")) for name in "kv")
    return _call(given, query, key, value, causal=given.flag("causal"))


def mla(given: Arguments) -> Call:
    """BatchMLAPagedAttentionWrapper: one key of all heads, in two parts, whose first part is the value."""
    bounds = given.named("qo_indptr")
    query = joined(*(ragged(*given.named(name), bounds) for name in ("q_nope", "q_pe")))
    caches = [
        (name, numbers(name, given.array(name), 3, "pages, page, d")[:, :, None]) for name in ("ckv_cache", "kpe_cache")
    ]
    page = caches[0][1].shape[1]
    entries = whole("kv_indices", given.array("kv_indices"), (None,), "pages of all sequences,")
    start, pages = boundaries(*given.named("kv_indptr"), len(entries), "entries of kv_indices")
    table = Table("kv_indices", entries, start, counts(*given.named("kv_len_arr"), pages * page), page)
    if caches[1][1].shape[:2] != caches[0][1].shape[:2]:
        raise ShapeMismatch.of(
            "/kpe_cache", f"pages and tokens {shape(caches[0][1].shape[:2])}, as ckv_cache", caches[1][1]
        )
    value, rotated = (paged(name, cache, "NHD", table) for name, cache in caches)
    value, rotated = scaled(given, "ckv_scale", value), scaled(given, "kpe_scale", rotated)
    if "sm_scale" not in given:
        raise MissingField.at("/sm_scale", "a number", "none", "1/√d of the model, not of the compressed keys")
    form = TOKENS._replace(base="e" if given.flag("return_lse_base_on_e") else "2")
    given.agree(
        {"num_heads": query.heads, "head_dim_ckv": value.features, "head_dim_kpe": rotated.features, "page_size": page}
    )
    return _call(given, query, joined(value, rotated), value, causal=given.flag("causal"), form=form)


def trtllm_decode(given: Arguments) -> Call:
    """trtllm_batch_decode_with_kv_cache."""
    return _trtllm(given, "q_len_per_req" if "cum_seq_lens_q" not in given else None, causal=True)


def trtllm_context(given: Arguments) -> Call:
    """trtllm_batch_context_with_kv_cache."""
    for name in ("bmm1_scale", "bmm2_scale", "cum_seq_lens_q"):
        given.array(name)
    return _trtllm(given, None, causal=given.flag("causal", default=True))


def merge_state(given: Arguments) -> Answer:
    """merge_state: two parts."""
    return _merged([(given.named(f"v_{one}"), given.named(f"s_{one}")) for one in "ab"])


def merge_states(given: Arguments) -> Answer:
    """merge_states: parts on the second axis."""
    v, s = given.array("v"), given.array("s")
    if v.ndim != 4 or s.shape != v.shape[:-1]:
        raise ShapeMismatch.of("/s", f"{shape(v.shape[:-1])}, v (n, parts, h, d) without d", s)
    return _merged([(("v", v[:, n]), ("s", s[:, n])) for n in range(v.shape[1])])


def _merged(parts: list[Any]) -> Answer:
    states = [State(output, sums) for (_, output), (_, sums) in parts]
    if not states:
        raise ShapeMismatch.at("/v", "at least one part", "none")
    return Answer(*merge(states, "2", names=[(one, other) for (one, _), (other, _) in parts]))


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
    """The caches of keys and values, of one tensor or a pair, and their layout."""
    found = given.given.get(name)
    if isinstance(found, list | tuple) and len(found) == 2:
        return [(np.asarray(one), layout) for one in found]
    cache = numbers(name, given.array(name), 5, "pages, 2, page, hk, d" if layout == "NHD" else "pages, 2, hk, page, d")
    if cache.shape[1] != 2:
        raise ShapeMismatch.of(f"/{name}", "2 on the second axis, keys and values", cache)
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


_MADE: Final[dict[str, tuple[str, Callable[[Arguments], Call | Answer]]]] = {
    "prefill1": ("single_prefill_with_kv_cache", single_prefill),
    "decode1": ("single_decode_with_kv_cache", single_decode),
    "decode": ("BatchDecodeWithPagedKVCacheWrapper.run", decode),
    "paged": ("BatchPrefillWithPagedKVCacheWrapper.run", paged_prefill),
    "ragged": ("BatchPrefillWithRaggedKVCacheWrapper.run", ragged_prefill),
    "mla": ("BatchMLAPagedAttentionWrapper.run", mla),
    "trt_decode": ("trtllm_batch_decode_with_kv_cache", trtllm_decode),
    "trt_context": ("trtllm_batch_context_with_kv_cache", trtllm_context),
    "merge_state": ("merge_state", merge_state),
    "merge_states": ("merge_states", merge_states),
}
FUNCTIONS: Final = {
    f"flashinfer.{_MADE[name][0]}": function
    for name, function in functions(TABLE, {name: make for name, (_, make) in _MADE.items()}).items()
}
