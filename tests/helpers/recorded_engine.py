"""Recordings of an engine that decodes: paged attention in bfloat16, sequence by sequence, as a kernel returns it."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Final

import ml_dtypes
import numpy as np

from tests.helpers.flight_recorder import FlightRecorder

WRAPPER: Final = "BatchDecodeWithPagedKVCacheWrapper"
# As str(inspect.signature(...)) writes them; of performance, some arguments.
INIT: Final = (
    "(self, float_workspace_buffer: torch.Tensor, kv_layout: str = 'NHD', use_cuda_graph: bool = False) -> None"
)
PLAN: Final = (
    "(self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor, num_qo_heads: int, "
    "num_kv_heads: int, head_dim: int, page_size: int) -> None"
)
RUN: Final = (
    "(self, q: torch.Tensor, paged_kv_cache: Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]], *args, "
    "return_lse: bool = False) -> Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]"
)
PAGE: Final = 16
BFLOAT16: Final = np.dtype(ml_dtypes.bfloat16)


def record_decoding(
    root: Path,
    calls: int,
    wrong: Collection[int] = (),
    *,
    sequences: int = 8,
    heads: tuple[int, int] = (32, 8),
    features: int = 128,
    tokens: tuple[int, int] = (80, 120),
    seed: int = 0,
) -> FlightRecorder:
    """Record decode calls of one object, each with its plan. In those of `wrong`, sequences read a neighbour's pages.

    heads: of queries and of keys; tokens: least and most of a sequence
    """
    random, recorder, me = np.random.default_rng(seed), FlightRecorder(root), object()
    recorder.record(f"{WRAPPER}.__init__", INIT, (me, np.zeros(8, np.uint8), "NHD"), {}, self_id=1)
    most = -(-tokens[1] // PAGE)
    cache = random.normal(size=(sequences * most, 2, PAGE, heads[1], features)).astype(BFLOAT16)
    for number in range(calls):
        lengths = random.integers(tokens[0], tokens[1] + 1, sequences)
        taken = -(-lengths // PAGE)
        indptr = np.concatenate([[0], np.cumsum(taken)]).astype(np.int32)
        indices = random.permutation(len(cache))[: indptr[-1]].astype(np.int32)
        last = (lengths - (taken - 1) * PAGE).astype(np.int32)
        query = random.normal(size=(sequences, heads[0], features)).astype(BFLOAT16)
        plan = (me, indptr, indices, last, heads[0], heads[1], features, PAGE)
        recorder.record(f"{WRAPPER}.plan", PLAN, plan, {}, self_id=1)
        rows = np.roll(indptr[:-1], 1) if number in wrong else indptr[:-1]
        result = decoded(query, cache, [indices[row:] for row in rows], lengths)
        recorder.record(f"{WRAPPER}.run", RUN, (me, query, cache), {"return_lse": True}, result, self_id=1)
    return recorder


def decoded(
    query: np.ndarray, cache: np.ndarray, tables: list[np.ndarray], lengths: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The output (b, h, d) in bfloat16 and the logsumexp (b, h) of base 2. tables: the pages of each sequence"""
    b, h, d = query.shape
    output, sums = np.empty((b, h, d), BFLOAT16), np.empty((b, h), np.float32)
    group = h // cache.shape[3]
    for n, (pages, length) in enumerate(zip(tables, lengths.tolist(), strict=True)):
        keys, values = (
            cache[pages[: -(-length // PAGE)], kind].reshape(-1, *cache.shape[3:])[:length] for kind in (0, 1)
        )
        keys, values = (np.repeat(array.astype(np.float32), group, axis=1) for array in (keys, values))
        scores = np.einsum("hd,thd->ht", query[n].astype(np.float32), keys, optimize=True) / np.float32(np.sqrt(d))
        top = scores.max(axis=1, keepdims=True)
        weights = np.exp(scores - top)
        total = weights.sum(axis=1, keepdims=True)
        output[n] = np.einsum("ht,thd->hd", weights / total, values, optimize=True).astype(BFLOAT16)
        sums[n] = ((top + np.log(total)) / np.log(2))[:, 0]
    return output, sums
