"""Comparisons of calls of other engines: right answers are right, and each mistake of addressing is named first.

Kernels with mistakes are written here: a gather of NumPy with the mistake, then attention by loops.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from attention_service.backends.registry import Backends
from attention_service.comparison.calls.compare import compare_call
from attention_service.comparison.calls.question import make_call_question
from attention_service.comparison.calls.report import make_call_report
from attention_service.engines.table import decode
from attention_service.schemas.compare import CompareReport
from tests.helpers.engine_calls import Draw, Drawn
from tests.helpers.engine_draws import DRAWS

Array = np.ndarray
BACKEND = Backends(threads=1).choose("numpy", "cpu")
BF16 = np.dtype(ml_dtypes.bfloat16)
DECODE = "flashinfer.BatchDecodeWithPagedKVCacheWrapper.run"
VARLEN = "flash_attn.flash_attn_varlen_func"
# Random calls of each function, right and in every type.
EXAMPLES = 22


def judged(
    function: str,
    arguments: dict[str, Any],
    output: Array | None,
    sums: Array | None = None,
    version: int | None = None,
) -> CompareReport:
    """The report on what a function returned."""
    returned = {name: x for name, x in (("output", output), ("logsumexp", sums)) if x is not None}
    asked = make_call_question(function, decode(function, arguments, version), returned or None)
    return make_call_report(compare_call(asked, BACKEND))


def in_axes(drawn: Drawn, dtype: np.dtype) -> tuple[Array, Array]:
    """What a right kernel returns for a random call, in its own axes; rows that belong to no sequence are NaN."""
    found = drawn.expected()
    query = next(drawn.arguments[name] for name in ("q", "query", "q_nope") if name in drawn.arguments)
    h, e = found[0][0].shape[1:]
    if drawn.form == "one":
        output, sums = found[0][0][0], found[0][1][0]
    elif drawn.form == "heads":
        output, sums = (np.stack([one[n].swapaxes(0, 1) for one in found]) for n in (0, 1))
    elif drawn.form == "dense":
        length = query.shape[1]
        output, sums = np.full((len(found), length, h, e), np.nan), np.full((len(found), h, length), np.nan)
        for n, (rows, logits, _) in enumerate(found):
            output[n, : len(rows)], sums[n, :, : len(rows)] = rows, logits.T
    else:
        output, sums = np.full((len(query), h, e), np.nan), np.full((len(query), h), np.nan)
        for start, (rows, logits, _) in zip(drawn.about["starts"], found, strict=True):
            output[start : start + len(rows)], sums[start : start + len(rows)] = rows, logits
        sums = sums.T if drawn.form == "ragged" else sums
    with np.errstate(over="ignore"):
        return output.astype(dtype), sums.astype(np.float64 if dtype == np.float64 else np.float32)


@pytest.mark.parametrize("name", DRAWS)
def test_no_right_answer_is_accused(name: str) -> None:
    """Random calls of every function, whose answers are those of loops over tokens, in a type that a kernel returns."""
    for seed in range(EXAMPLES):
        drawn = DRAWS[name](Draw(seed))
        query = next(drawn.arguments[one] for one in ("q", "query", "q_nope") if one in drawn.arguments)
        dtype = BF16 if query.dtype.itemsize == 1 else query.dtype
        report = judged(drawn.function, drawn.arguments, *in_axes(drawn, dtype), drawn.version)
        rows = sum(len(one.query) for one in drawn.sequences)
        assert report.verdict.status == ("correct" if rows else "inconclusive"), (name, seed, report.verdict)
        assert report.metadata["dtype"] == dtype.name
        assert report.power.mutants == 0  # nobody asked for it


@dataclass(frozen=True)
class Paged:
    """A decode over pages: q (b, h, d); caches (pages, page, hk, d); of each sequence its pages and its length."""

    q: Array
    k: Array
    v: Array
    tables: list[list[int]]
    lengths: list[int]

    @classmethod
    def drawn(cls, lengths: list[int], *, page: int = 4, seed: int = 0, poison: bool = False) -> Paged:
        random = np.random.default_rng(seed)
        counts = [-(-n // page) for n in lengths]
        order = random.permutation(sum(counts) + 2).tolist()
        tables = [[order.pop() for _ in range(count)] for count in counts]
        q = random.normal(size=(len(lengths), 4, 8)).astype(np.float32)
        k, v = (random.normal(size=(sum(counts) + 2, page, 2, 8)).astype(np.float32) for _ in range(2))
        if poison:
            for table, n in zip(tables, lengths, strict=True):
                k[table[-1], (n - 1) % page + 1 :] = v[table[-1], (n - 1) % page + 1 :] = np.nan
        return cls(q, k, v, tables, lengths)

    @property
    def page(self) -> int:
        return len(self.k[0])

    @property
    def arguments(self) -> dict[str, Any]:
        bounds = np.cumsum([0, *map(len, self.tables)]).astype(np.int32)
        indices = np.array([page for table in self.tables for page in table], np.int32)
        last = np.array([(n - 1) % self.page + 1 for n in self.lengths], np.int32)
        cache = np.stack([self.k, self.v], axis=1)
        return {"q": self.q, "paged_kv_cache": cache, "indptr": bounds, "indices": indices, "last_page_len": last}

    def keys(self, n: int, pages: list[int], length: int, page: int | None = None) -> tuple[Array, Array]:
        """Keys and values of tokens of pages; page: their length, as a kernel believes"""
        page = self.page if page is None else page
        places = [(pages[t // page], t % page) for t in range(length)]
        k, v = (np.array([cache[place] for place in places]).reshape(length, 2, 8) for cache in (self.k, self.v))
        return k, v


def attended(
    q: Array, k: Array, v: Array, *, offset: int | None = None, scale: float | None = None
) -> tuple[Array, Array]:
    """Output (q, h, e) and natural logsumexp (q, h) of a sequence; causal with an offset."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    scores = np.einsum("qhd,khd->qhk", q, k) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if offset is not None:
        hidden = np.arange(len(k))[None] > np.arange(len(q))[:, None] + offset
        scores = np.where(hidden[:, None], -np.inf, scores)
    most = scores.max(axis=-1, keepdims=True, initial=-1e300)
    weights = np.exp(scores - most)
    total = weights.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        sums = (most + np.log(total))[..., 0]
        shares = np.where(total > 0, weights / total, 0)
    return np.einsum("qhk,khe->qhe", shares, v), np.where(total[..., 0] > 0, sums, -np.inf)


def decoded(call: Paged, read: Callable[[int], tuple[Array, Array]]) -> tuple[Array, Array]:
    """What a kernel that reads these keys and values of each sequence returns, in base 2."""
    found = [attended(call.q[n : n + 1], *read(n)) for n in range(len(call.lengths))]
    output, sums = (np.concatenate([one[i] for one in found]) for i in (0, 1))
    return output.astype(np.float32), (sums / math.log(2)).astype(np.float32)


PAGES = Paged.drawn([5, 8, 11, 2, 14])


def last_full(n: int) -> tuple[Array, Array]:
    return PAGES.keys(n, PAGES.tables[n], len(PAGES.tables[n]) * PAGES.page)


def order(n: int) -> tuple[Array, Array]:
    return PAGES.keys(n, sorted(PAGES.tables[n]), PAGES.lengths[n])


def half_pages(n: int) -> tuple[Array, Array]:
    flat = [page for table in PAGES.tables for page in table] + [0] * 9
    start = sum(len(table) for table in PAGES.tables[:n])
    return PAGES.keys(n, flat[start:], PAGES.lengths[n], page=2)


def one_more(n: int) -> tuple[Array, Array]:
    flat = [page for table in PAGES.tables for page in table]
    start, is_full = sum(len(table) for table in PAGES.tables[:n]), PAGES.lengths[n] % PAGES.page == 0
    return PAGES.keys(n, flat[start:], PAGES.lengths[n] + is_full * PAGES.page)


def shifted(n: int) -> tuple[Array, Array]:
    flat = [page for table in PAGES.tables for page in table]
    start = sum(len(table) for table in PAGES.tables[: (n - 1) % len(PAGES.tables)])
    return PAGES.keys(n, flat[start:], PAGES.lengths[n])


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("pages.last_full", last_full),
        ("pages.order", order),
        ("pages.size", half_pages),
        ("pages.one_more", one_more),
        ("pages.batch_shifted", shifted),
    ],
)
def test_mistakes_of_pages_are_named_first(name: str, read: Callable[[int], tuple[Array, Array]]) -> None:
    report = judged(DECODE, PAGES.arguments, *decoded(PAGES, read))
    assert report.verdict.status == "wrong"
    assert (report.hypotheses[0].name, report.hypotheses[0].certainty) == (name, "proof")
    assert report.hypotheses[0].message in report.verdict.message or "Wrong" in report.verdict.message


def test_the_right_pages_are_right() -> None:
    report = judged(
        DECODE, PAGES.arguments, *decoded(PAGES, lambda n: PAGES.keys(n, PAGES.tables[n], PAGES.lengths[n]))
    )
    assert report.verdict.status == "correct"
