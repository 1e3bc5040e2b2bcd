"""What calls of engines take before they are computed, and what is estimated for them: hostile sizes cost nothing."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from attention_service.engines.call import Call
from attention_service.engines.table import decode
from attention_service.errors import InvalidRequest

ONES: Any = np.ones


def decoded(function: str, **arguments: Any) -> Call:
    found = decode(function, arguments)
    assert isinstance(found, Call)
    return found


def peak(do: Callable[[], Any]) -> int:
    """The most bytes that are held at a time, without what is there before."""
    tracemalloc.start()
    try:
        do()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_the_most_scores_are_of_one_long_sequence_beside_many_short_ones() -> None:
    """4,000 · 8,000 scores, and 4,096 times 1 · 2, which have more queries and keys together."""
    queries, keys = (np.cumsum([0, size, *[each] * 4096]) for size, each in ((4000, 1), (8000, 2)))
    arrays = {"q": ONES((queries[-1], 1, 1)), "k": ONES((keys[-1], 1, 1)), "v": ONES((keys[-1], 1, 1))}
    call = decoded("flash_attn.flash_attn_varlen_func", **arrays, cu_seqlens_q=queries, cu_seqlens_k=keys)
    assert [0] in call.largest()


def test_a_table_is_not_repeated_for_sequences_that_share_its_rows() -> None:
    """A row of 50,000 entries for 200 sequences; then the first fault is in the row that has it."""
    caches = {name: ONES((4, 2, 1, 1)) for name in ("k_cache", "v_cache")}
    given = {"q": ONES((200, 1, 1, 1)), **caches, "cache_seqlens": 3, "cache_batch_idx": np.zeros(200, np.int32)}
    given["page_table"] = np.zeros((1, 50_000), np.int64)
    assert peak(lambda: decoded("flash_attn.flash_attn_with_kvcache", **given)) < 4 * given["page_table"].nbytes
    given["page_table"] = np.array([[9, 9], [0, 1], [0, 4]])  # the first row belongs to no sequence
    given["cache_batch_idx"] = np.arange(200) % 2 + 1
    with pytest.raises(InvalidRequest) as caught:
        decoded("flash_attn.flash_attn_with_kvcache", **given)
    assert caught.value.faults[0].pointer == "/page_table/2/1"


def test_factors_are_repeated_neither_for_all_heads_nor_beyond_the_longest_sequence() -> None:
    """Of 20,000 factors the one query needs one."""
    arrays = {"q": ONES((1, 1, 1000, 1)), "k": ONES((1, 1, 1, 1)), "v": ONES((1, 1, 1, 1))}
    factors = ONES((1, 1, 20_000), np.float32)
    assert peak(lambda: decoded("flash_attn.flash_attn_func", **arrays, q_descale=factors)) < 4 * factors.nbytes


def test_of_large_pages_only_the_tokens_that_are_used_are_copied() -> None:
    """One of 20,000 tokens for each of 200 sequences; then the last of one page and the first of another."""
    page = 20_000
    arrays = {"query": ONES((200, 1, 16)), "query_start_loc": np.arange(201)}
    caches = {"key_cache": ONES((1, 1, 2, page, 8), np.float16), "value_cache": ONES((1, 1, 16, page), np.float16)}
    where: dict[str, Any] = {"seq_lens": np.ones(200, np.int32), "block_table": np.zeros((200, 1), np.int32)}
    one = decoded("vllm.attention", **arrays, **caches, **where)
    assert peak(lambda: one.request(list(range(200)))) < 2**18
    cache = np.arange(2.0 * page).reshape(2, page, 1, 1)
    where = {"page_table": [[1, 0]], "cache_seqlens": [page + 1], "cache_leftpad": [page - 1]}
    two = decoded("flash_attn.flash_attn_with_kvcache", q=ONES((1, 1, 1, 1)), k_cache=cache, v_cache=cache, **where)
    assert peak(lambda: two.key.of(0)) < cache.nbytes / 8
    assert two.key.of(0).ravel().tolist() == [2 * page - 1, 0]
