"""Addressing of tokens: views where pages follow each other; hostile tables are refused with field and index."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from attention_service import call
from attention_service.engines.tokens import Rows, Table, paged, ragged, slots
from attention_service.errors import InvalidRequest

Array = np.ndarray
ONES: Any = np.ones


def table(*rows: list[int], lengths: list[int], page: int) -> Table:
    return Table.of_rows("block_table", np.array(rows), ("seq_lens", np.array(lengths)), page, len(rows))


def test_pages_that_follow_each_other_are_a_view() -> None:
    cache = np.arange(5 * 2 * 3 * 4.0).reshape(5, 2, 3, 4)
    tokens = paged("k", cache, "NHD", table([1, 2, 3], [3, 1, 0], lengths=[5, 3], page=2))
    view, copy = tokens.of(0), tokens.of(1)
    assert np.shares_memory(view, cache)
    assert not np.shares_memory(copy, cache)
    assert np.array_equal(view, [cache[1, 0], cache[1, 1], cache[2, 0], cache[2, 1], cache[3, 0]])
    assert np.array_equal(copy, [cache[3, 0], cache[3, 1], cache[1, 0]])


def test_tokens_beside_each_other_and_in_slots_are_views() -> None:
    array = np.arange(24.0).reshape(6, 2, 2)
    assert np.shares_memory(ragged("q", array, ("cu", np.array([0, 2, 6]))).of(1), array)
    rows = Rows(2, 3, np.array([1]), np.array([1]), np.array([2]))
    found = slots("k", array.reshape(2, 3, 2, 2), rows).of(0)
    assert np.shares_memory(found, array)
    assert np.array_equal(found, array[4:6])


def test_a_huge_table_of_a_huge_cache_costs_nothing() -> None:
    """2**31 pages, which a view of one page stands for; the last one is read."""
    one = np.arange(8.0).reshape(1, 2, 1, 4)
    cache = np.lib.stride_tricks.as_strided(one, (2**31, 2, 1, 4), (0, *one.strides[1:]))
    tokens = paged("k", cache, "NHD", table([2**31 - 1], lengths=[2], page=2))
    assert np.array_equal(tokens.of(0), one[0])


# Sequences of 3 and 0 and 2 queries; 5 and 1 and 4 keys in pages of 2.
GOOD: dict[str, Any] = {
    "query": ONES((5, 2, 4)),
    "key_cache": ONES((6, 2, 1, 4)),
    "value_cache": ONES((6, 2, 1, 4)),
    "query_start_loc": np.array([0, 3, 3, 5], np.int32),
    "seq_lens": np.array([5, 1, 4], np.int32),
    "block_table": np.array([[0, 2, 4], [5, -1, -1], [1, 3, 99]], np.int32),
}


def changed(name: str, place: tuple[int, ...], value: int) -> dict[str, Any]:
    array = GOOD[name].copy()
    array[place] = value
    return {name: array}


BAD: list[tuple[dict[str, Any], str, str]] = [
    (changed("block_table", (0, 1), -1), "/block_table/0/1", "-1"),
    (changed("block_table", (2, 1), 6), "/block_table/2/1", "6"),
    (changed("block_table", (1, 0), 2**31 - 1), "/block_table/1/0", "2147483647"),
    ({"block_table": GOOD["block_table"].astype(np.int64) + 2**40}, "/block_table/0/0", str(2**40)),
    ({"block_table": GOOD["block_table"].astype(np.uint64) + np.uint64(2**63)}, "/block_table", str(2**63 + 99)),
    ({"block_table": GOOD["block_table"].astype(float)}, "/block_table", "numbers"),
    ({"block_table": GOOD["block_table"][:2]}, "/block_table", "(2, 3)"),
    ({"block_table": GOOD["block_table"][0]}, "/block_table", "(3,)"),
    ({"block_table": None}, "/block_table", "none"),
    (changed("seq_lens", (0,), 7), "/seq_lens/0", "7"),
    (changed("seq_lens", (2,), -1), "/seq_lens/2", "-1"),
    (changed("seq_lens", (2,), 2**31 - 1), "/seq_lens/2", "2147483647"),
    ({"seq_lens": np.array([5, 1])}, "/seq_lens", "(2,)"),
    ({"seq_lens": np.array([5.0, 1, 4])}, "/seq_lens", "numbers"),
    (changed("query_start_loc", (0,), 1), "/query_start_loc/0", "1"),
    (changed("query_start_loc", (2,), 2), "/query_start_loc/2", "2"),
    (changed("query_start_loc", (3,), 6), "/query_start_loc/3", "6"),
    ({"query_start_loc": np.array([0, 2**63 - 1, -(2**63), 5])}, "/query_start_loc/1", str(2**63 - 1)),
    ({"query_start_loc": np.array([0, -(2**63), 2**63 - 1, 5])}, "/query_start_loc/1", str(-(2**63))),
    ({"query_start_loc": np.zeros((0,), int)}, "/query_start_loc", "(0,)"),
    ({"query_start_loc": np.zeros((2, 2), int)}, "/query_start_loc", "(2, 2)"),
    ({"query_start_loc": np.array([0, 5])}, "/block_table", "(3, 3)"),
    ({"query": ONES((5, 4))}, "/query", "(5, 4)"),
    ({"query": ONES((5, 2, 4), complex)}, "/query", "complex"),
    ({"query": ONES((5, 2, 4), np.uint8)}, "/query", "uint8"),
    ({"query": ONES((5, 2, 3))}, "/key_cache", "4"),
    ({"query": "much"}, "/query", "much"),
    ({"query": [[1.0], [1.0, 2.0]]}, "/query", "array of 2"),
    ({"key_cache": ONES((6, 2, 2, 4))}, "/value_cache", "1"),
    ({"key_cache": ONES((6, 2, 3, 4)), "value_cache": ONES((6, 2, 3, 4))}, "/key_cache", "3"),
    ({"key_cache": ONES((6, 0, 1, 4)), "seq_lens": np.zeros(3, int)}, "/key_cache", "got 0"),
    ({"key_cache": ONES((6, 2, 0, 4))}, "/key_cache", "(6, 2, 0, 4)"),
    ({"key_cache": ONES((6, 2, 4))}, "/key_cache", "(6, 2, 4)"),
    ({"value_cache": ONES((3, 2, 1, 4))}, "/block_table/0/2", "4"),
    ({"value_cache": ONES((6, 3, 1, 4))}, "/value_cache", "3"),
    ({"kv_cache": ONES((2, 6, 2, 1, 4))}, "/kv_cache", "both"),
    ({"kv_cache": ONES((2, 2, 2, 1, 4)), "key_cache": None, "value_cache": None}, "/kv_cache", "(2, 2, 2, 1, 4)"),
    ({"num_actual_tokens": 4}, "/num_actual_tokens", "4"),
    ({"num_actual_tokens": [5, 5]}, "/num_actual_tokens", "(2,)"),
    ({"sinks": ONES(3)}, "/sinks", "(3,)"),
    ({"sinks": np.array([1.0, np.nan])}, "/sinks/1", "nan"),
    ({"scale": np.inf}, "/scale", "inf"),
    ({"causal": 1}, "/causal", "1"),
    ({"k_scale": ONES(2)}, "/k_scale", "(2,)"),
    ({"sliding_window": 0}, "/sliding_window", "at least 1"),
    ({"sliding_window": 1.5}, "/sliding_window", "1.5"),
    ({"alibi_slopes": ONES((3, 2))}, "/alibi_slopes", "(3, 2)"),
    ({"block_tables": GOOD["block_table"]}, "/block_tables", "did you mean block_table?"),
]


def test_the_call_that_is_made_wrong_is_right() -> None:
    assert call("vllm.attention", **GOOD).output.shape == (5, 2, 4)


@pytest.mark.parametrize(("wrong", "pointer", "text"), BAD, ids=[f"{p} {t}" for _, p, t in BAD])
def test_hostile_arguments_are_refused_with_field_and_index(wrong: dict[str, Any], pointer: str, text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        call("vllm.attention", **GOOD | wrong)
    assert caught.value.faults[0].pointer == pointer
    assert text in caught.value.faults[0].sentence()


@pytest.mark.parametrize(
    ("wrong", "pointer"),
    [
        ({"paged_kv_last_page_len": np.array([0, 1])}, "/paged_kv_last_page_len/0"),
        ({"paged_kv_last_page_len": np.array([2, 3])}, "/paged_kv_last_page_len/1"),
        ({"paged_kv_last_page_len": np.array([2])}, "/paged_kv_last_page_len"),
        ({"paged_kv_indptr": np.array([0, 2, 4])}, "/paged_kv_indptr/2"),
        ({"paged_kv_indptr": np.array([0, 2, 1])}, "/paged_kv_indptr/2"),
        ({"paged_kv_indices": np.array([0, 1, 4])}, "/paged_kv_indices/2"),
        ({"paged_kv_indices": np.array([0, -1, 3])}, "/paged_kv_indices/1"),
        ({"paged_kv_cache": ONES((4, 3, 2, 1, 4))}, "/paged_kv_cache"),
        ({"paged_kv_cache": ONES((4, 2, 1, 4))}, "/paged_kv_cache"),
        ({"page_size": 4}, "/page_size"),
        ({"num_qo_heads": 3}, "/num_qo_heads"),
        ({"kv_layout": "NDH"}, "/kv_layout"),
        ({"kv_layout": ONES(3)}, "/kv_layout"),
        ({"custom_mask": ONES(13, bool)}, "/custom_mask"),
        ({"custom_mask": ONES(14)}, "/custom_mask"),
        ({"packed_custom_mask": ONES(2, np.uint8)}, "/packed_custom_mask"),
        ({"pos_encoding_mode": "ALIBI"}, "/pos_encoding_mode"),
        ({"pos_encoding_mode": "ROPE_LLAMA"}, "/pos_encoding_mode"),
        ({"kv_cache_sf": ONES(3)}, "/kv_cache_sf"),
        ({"uses_spcompress": True}, "/uses_spcompress"),
    ],
)
def test_hostile_pages_of_flashinfer_are_refused(wrong: dict[str, Any], pointer: str) -> None:
    """Sequences of 4 and 1 keys, 3 and 2 queries, in pages of 2."""
    good = {
        "q": ONES((5, 2, 4)),
        "paged_kv_cache": ONES((4, 2, 2, 1, 4)),
        "qo_indptr": np.array([0, 3, 5]),
        "paged_kv_indptr": np.array([0, 2, 3]),
        "paged_kv_indices": np.array([0, 1, 3]),
        "paged_kv_last_page_len": np.array([2, 1]),
        "custom_mask": ONES(14, bool),
    }
    call("flashinfer.BatchPrefillWithPagedKVCacheWrapper.run", **good)
    with pytest.raises(InvalidRequest) as caught:
        call("flashinfer.BatchPrefillWithPagedKVCacheWrapper.run", **good | wrong)
    assert caught.value.faults[0].pointer == pointer


def test_nan_is_refused_only_in_tokens_that_a_query_sees() -> None:
    """The third token of the third sequence is in page 3; the second of page 5 belongs to nothing."""
    keys = GOOD["key_cache"].copy()
    keys[5, 1] = np.nan
    assert np.isfinite(call("vllm.attention", **GOOD | {"key_cache": keys}).output).all()
    keys[3, 0, 0, 2] = np.nan
    with pytest.raises(InvalidRequest, match="nan in token 2 of sequence 2") as caught:
        call("vllm.attention", **GOOD | {"key_cache": keys})
    assert caught.value.faults[0].pointer == "/key_cache"
    # Beyond the window of both queries of the sequence, which are its last tokens.
    keys[3, 0, 0, 2], keys[1, 0] = 1.0, np.nan
    assert np.isfinite(call("vllm.attention", **GOOD | {"key_cache": keys, "sliding_window": 2}).output).all()


@pytest.mark.parametrize(
    "dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fnuz, np.int8], ids=str
)
def test_codes_are_exact(dtype: Any) -> None:
    """One key of each code with one feature: the sum of a softmax over k = code · factor, by hand."""
    bits = np.arange(256).astype(np.uint8).view(dtype).astype(np.float64)
    codes = np.arange(256).astype(np.uint8).view(dtype)[np.isfinite(bits) & (np.abs(bits) < 500)]
    values = codes.astype(np.float64)
    arrays: dict[str, Any] = {"k": codes[None, :, None, None], "v": codes[None, :, None, None], "q": ONES((1, 1, 1, 1))}
    factors: dict[str, Any] = {"k_descale": np.array([0.01]), "v_descale": np.array([[3.0]])}
    found = call("flash_attn.flash_attn_func", softmax_scale=1.0, **arrays, **factors)
    weights = np.exp(values * 0.01)
    assert found.logsumexp.item() == pytest.approx(np.log(weights.sum()), rel=1e-14)
    assert found.output.item() == pytest.approx((weights * values * 3).sum() / weights.sum(), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("shape", [(3,), (2, 3), (2, 1, 6), (1, 1), (2, 1, 7, 1)])
def test_factors_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    arrays = {"q": ONES((2, 3, 2, 4)), "k": ONES((2, 7, 1, 4)), "v": ONES((2, 7, 1, 4))}
    with pytest.raises(InvalidRequest, match=r"\(\), \(2,\), \(2, 1\) or \(2, 1, 7\)") as caught:
        call("flash_attn.flash_attn_func", **arrays, k_descale=ONES(shape))
    assert caught.value.faults[0].pointer == "/k_descale"
