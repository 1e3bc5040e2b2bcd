"""Mistakes of addressing are named first in the words of every library, and in random calls of every function."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from attention_service.backends.base import no_check
from attention_service.comparison.calls.explain import explanations, shown
from attention_service.comparison.calls.question import make_call_question
from attention_service.engines.table import decode
from tests.helpers.engine_calls import Draw, Drawn
from tests.helpers.engine_draws import DRAWS
from tests.helpers.planted_calls import MAKERS, plant
from tests.test_compare_calls import (
    BACKEND,
    DECODE,
    PAGES,
    VARLEN,
    Paged,
    decoded,
    first,
    in_axes,
    judged,
    last_full,
    order,
)

Array = np.ndarray
PREFILL = "flashinfer.BatchPrefillWithPagedKVCacheWrapper.run"
# One mistake of each kind that is found in less than a second: of pages, of ragged batches, of merged states.
QUICK = ("pages.order", "ragged.top_left", "merge.base2")


def hnd(cache: Array) -> Array:
    """A cache (pages, page, hk, d) with the axes (pages, hk, page, d)."""
    return cache.swapaxes(1, 2)


def rows_of(tables: list[list[int]], extra: int = 2) -> Array:
    """A table with rows, whose free entries are page 0."""
    width = max(map(len, tables)) + extra
    return np.array([row + [0] * (width - len(row)) for row in tables], np.int32)


def vocabularies(call: Paged) -> dict[str, tuple[str, dict[str, Any], int | None, bool]]:
    """The same decode in the words of every library; True if its output has the axes (b, 1, h, e)."""
    b, table, lengths = len(call.lengths), rows_of(call.tables), np.array(call.lengths, np.int32)
    ones, keys = np.arange(b + 1, dtype=np.int32), np.cumsum([0, *call.lengths]).astype(np.int32)
    q, k, v, lists = call.q, call.k, call.v, call.arguments
    prefill = {f"paged_kv_{name}": lists[name] for name in ("indptr", "indices", "last_page_len")} | {"qo_indptr": ones}
    classic = {
        "key_cache": hnd(k).reshape(len(k), 2, -1, 2, 4).transpose(0, 1, 3, 2, 4),
        "value_cache": v.transpose(0, 2, 3, 1),
    }
    metadata = {"query": q, "query_start_loc": ones, "seq_lens": lengths, "block_table": table}
    trt = {"query": q, "block_tables": table, "seq_lens": lengths, "bmm1_scale": 1 / math.sqrt(8)}
    lists = {name: lists[name] for name in ("q", "indptr", "indices", "last_page_len")}
    cached = {"q": q[:, None], "k_cache": k, "v_cache": v, "cache_seqlens": lengths, "causal": True}
    torch = {"query": q, "key": k, "value": v, "cu_seq_q": ones, "cu_seq_k": None, "enable_gqa": True}
    varlen = {"q": q, "k": k, "v": v, "cu_seqlens_q": ones, "causal": True}
    return {
        "kvcache 2": ("flash_attn.flash_attn_with_kvcache", {**cached, "block_table": table}, 2, True),
        "kvcache 3": ("flash_attn.flash_attn_with_kvcache", {**cached, "page_table": table}, 3, True),
        "varlen 2": (VARLEN, {**varlen, "cu_seqlens_k": keys, "block_table": table}, 2, False),
        "varlen 4": (VARLEN, {**varlen, "seqused_k": lengths, "page_table": table}, 4, False),
        "decode": (DECODE, {**lists, "paged_kv_cache": np.stack([k, v], axis=1)}, None, False),
        "decode HND": (DECODE, {**lists, "paged_kv_cache": (hnd(k), hnd(v)), "kv_layout": "HND"}, None, False),
        "prefill": (PREFILL, {"q": q, **prefill, "paged_kv_cache": (k, v), "causal": True}, None, False),
        "torch": ("torch.varlen_attn", {**torch, "block_table": table, "seqused_k": lengths}, None, False),
        "vllm": ("vllm.attention", {**metadata, "kv_cache": np.stack([k, v])}, None, False),
        "vllm classic": ("vllm.attention", {**metadata, **classic}, None, False),
        "trtllm": ("flashinfer.trtllm_batch_decode_with_kv_cache", {**trt, "kv_cache": (hnd(k), hnd(v))}, None, False),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", vocabularies(PAGES))
def test_mistakes_are_named_in_every_vocabulary(name: str) -> None:
    function, arguments, version, has_queries = vocabularies(PAGES)[name]
    for expected, read in (("", None), ("pages.last_full", last_full), ("pages.order", order)):
        output, _ = decoded(PAGES, read or (lambda n: PAGES.keys(n, PAGES.tables[n], PAGES.lengths[n])))
        report = judged(function, arguments, output[:, None] if has_queries else output, version=version)
        if not expected:
            assert report.verdict.status == "correct"
        else:
            assert first(report) == ("wrong", expected, "proof")


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAWS)
def test_every_mistake_of_random_calls_can_be_tried(name: str) -> None:
    """Also where other lengths would need more of a mask, or of factors, than there is: that shows nothing."""
    for seed in range(300, 330):
        drawn = DRAWS[name](Draw(seed))
        output, sums = in_axes(drawn, np.dtype(np.float64))
        noise = np.random.default_rng(seed).permutation(output.reshape(-1)).reshape(output.shape)
        call = decode(drawn.function, drawn.arguments, drawn.version)
        asked = make_call_question(drawn.function, call, {"output": noise, "logsumexp": sums})
        with np.errstate(all="ignore"):
            found = list(explanations(asked, {"output": 1.0, "logsumexp": 0.0}, [0], BACKEND, no_check))
            power = {mistake.name for mistake, _, _ in shown(asked, BACKEND, no_check)}
        assert {one.mistake.name for one in found} <= power


def planted(drawn: Drawn) -> str:
    """Changes what a random call stands for, but not the call; the name of the mistake, "" for none."""
    seen = drawn.options.visible
    is_aligned = not {"causal", "window_size", "sliding_window", "window_left"}.isdisjoint(drawn.arguments)
    if any((one.factors[1] != 1).any() for one in drawn.sequences):
        for one in drawn.sequences:
            one.factors = (one.factors[0], one.factors[1] ** 2, one.factors[2])
        return "descale.twice"
    if drawn.options.sinks is not None:
        drawn.options.sinks = drawn.options.sinks + math.log(2)
        return "merge.sink_each"
    if is_aligned and drawn.options.slopes is None:
        drawn.options.visible = lambda i, j, q, k: seen(i + q - k, j, q, k)  # those functions add k - q
        return "ragged.top_left"
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in DRAWS if name not in ("torch SDPA", "flash_attn_func")])
def test_planted_mistakes_of_random_calls_are_named_first(name: str) -> None:
    """An answer that is wrong has a proof, and the first that is told is the mistake, or says the same of the call."""
    told = 0
    for seed in range(8):
        drawn = DRAWS[name](Draw(seed))
        wanted = planted(drawn)
        query = drawn.query
        if not wanted or query.dtype.itemsize < 4:  # too coarse for a small mistake
            continue
        report = judged(drawn.function, drawn.arguments, *in_axes(drawn, query.dtype), drawn.version)
        if report.verdict.status not in ("wrong", "imprecise"):
            continue
        best = report.hypotheses[0]
        assert wanted in (best.name, *best.also), (name, seed, report.verdict)
        told += best.certainty == "proof"
    assert told or name in ("flashinfer single", "flashinfer MLA")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in MAKERS]
)
def test_a_random_planted_mistake_is_named_first(name: str) -> None:
    """Of each mistake; `python -m tests.deep_engines` has thousands."""
    told = 0
    for seed in range(4):
        call = plant(name, seed)
        report = judged(call.function, call.arguments, call.output, call.sums, call.version)
        if report.verdict.status in ("wrong", "imprecise"):
            best = report.hypotheses[0]
            assert name in (best.name, *best.also), (seed, report.verdict)
            told += 1
    assert told
