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

pytestmark = pytest.mark.usefixtures("without_suggestions")
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
    query = drawn.query
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
        query = drawn.query
        dtype = BF16 if query.dtype.itemsize == 1 else query.dtype
        report = judged(drawn.function, drawn.arguments, *in_axes(drawn, dtype), drawn.version)
        rows = sum(len(one.query) for one in drawn.sequences)
        is_judged = rows > 0 or report.metadata["ignored_rows"] == 0
        assert report.verdict.status == ("correct" if is_judged else "inconclusive"), (name, seed, report.verdict)
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


def first(report: CompareReport) -> tuple[str, str, str]:
    """The verdict, and the hypothesis that stands first."""
    return report.verdict.status, report.hypotheses[0].name, report.hypotheses[0].certainty


def test_nan_in_slots_that_no_token_fills() -> None:
    """It is not read. A kernel that multiplies it by 0 returns NaN in sequences whose last page is not full."""
    call = Paged.drawn([5, 8, 11, 16, 14], poison=True)
    output, sums = decoded(call, lambda n: call.keys(n, call.tables[n], call.lengths[n]))
    assert judged(DECODE, call.arguments, output, sums).verdict.status == "correct"
    output[[0, 2, 4]] = np.nan
    report = judged(DECODE, call.arguments, output, sums)
    assert first(report) == ("wrong", "pages.stale_slot", "proof")
    assert report.where[0].worst is not None
    assert [place.indices for place in report.where if place.what == "sequences"] == [None]
    assert "sequences whose index mod 2 is 0" in " ".join(place.message for place in report.where)


RANDOM = np.random.default_rng(1)
QUERIES, KEYS = [3, 5, 2, 4], [9, 5, 12, 7]
Q_ENDS, K_ENDS = np.cumsum([0, *QUERIES]), np.cumsum([0, *KEYS])
RAGGED: dict[str, Any] = {
    "q": RANDOM.normal(size=(14, 4, 8)).astype(np.float32),
    "k": RANDOM.normal(size=(33, 2, 8)).astype(np.float32),
    "v": RANDOM.normal(size=(33, 2, 8)).astype(np.float32),
    "cu_seqlens_q": Q_ENDS.astype(np.int32),
    "cu_seqlens_k": K_ENDS.astype(np.int32),
    "causal": True,
}


def varlen(
    offset: Callable[[int], int],
    length: Callable[[int], int] = lambda n: KEYS[n],
    scales: tuple[Array, ...] | None = None,
) -> tuple[Array, Array]:
    """What a kernel returns that believes in these offsets and lengths of sequences. scales: (4, 2) of q, k, v"""
    found = []
    for n in range(4):
        q = RAGGED["q"][Q_ENDS[n] : Q_ENDS[n + 1]]
        k, v = (RAGGED[name][K_ENDS[n] : K_ENDS[n] + length(n)] for name in "kv")
        if scales is not None:
            q, k, v = q * np.repeat(scales[0][n], 2)[:, None], k * scales[1][n][:, None], v * scales[2][n][:, None]
        found.append(attended(q, k, v, offset=offset(n)))
    output, sums = (np.concatenate([one[i] for one in found]) for i in (0, 1))
    return output.astype(np.float32), sums.T.astype(np.float32)


def bottom_right(n: int) -> int:
    return KEYS[n] - QUERIES[n]


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("ragged.top_left", lambda: varlen(lambda n: 0)),
        ("ragged.previous_offset", lambda: varlen(lambda n: bottom_right(max(n - 1, 0)))),
        ("ragged.previous_offset", lambda: varlen(lambda n: bottom_right(n - 1))),
        ("ragged.lengths_of_first", lambda: varlen(lambda n: KEYS[0] - QUERIES[n], lambda n: KEYS[0])),
    ],
)
def test_mistakes_of_ragged_batches_are_named_first(name: str, answer: Callable[[], tuple[Array, Array]]) -> None:
    """The last sequence has fewer keys after it than the first has: of it nothing is known."""
    output, sums = answer()
    report = judged(VARLEN, RAGGED, output, sums)
    assert first(report) == ("wrong", name, "proof")
    assert judged(VARLEN, RAGGED, output).hypotheses[0].name == name
    assert judged(VARLEN, RAGGED, *varlen(bottom_right)).verdict.status == "correct"


@pytest.mark.parametrize("offset", [max(KEYS) - max(QUERIES), KEYS[2] - QUERIES[2]], ids=["of the longest", "of one"])
def test_a_mistake_of_the_padded_batch_is_said_in_words_of_the_call(offset: int) -> None:
    """Beside padding the last key is not that of a sequence, and the first entry is the shortest sequence, 2 of 4."""
    report = judged(VARLEN, RAGGED, *varlen(lambda n: int(offset)))
    assert first(report) == ("wrong", "causal.other_offset", "proof")
    said = f"the causal mask has another offset. ({', '.join([str(offset)] * 4)} in sequences 0, 1, 2, 3)"
    assert said in report.verdict.message
    assert report.hypotheses[0].change is None  # a call has no such field


def test_all_keys_of_a_slot_count() -> None:
    used = np.array([4, 5, 9, 6], np.int32)
    arguments = RAGGED | {"seqused_k": used}
    right = varlen(lambda n: used[n] - QUERIES[n], lambda n: used[n])
    assert judged(VARLEN, arguments, *right).verdict.status == "correct"
    assert first(judged(VARLEN, arguments, *varlen(bottom_right))) == ("wrong", "ragged.padded_length", "proof")


SCALES = tuple(RANDOM.uniform(0.5, 2, size=(4, 2)) for _ in range(3))


def scaled(*roles: tuple[int, Callable[[Array], Array]]) -> tuple[Array, ...]:
    found = list(SCALES)
    for role, change in roles:
        found[role] = change(found[role])
    return tuple(found)


@pytest.mark.parametrize(
    ("name", "scales"),
    [
        ("descale.absent", scaled((1, np.ones_like))),
        pytest.param("descale.absent", scaled((0, np.ones_like), (2, np.ones_like)), marks=pytest.mark.slow),
        ("descale.twice", scaled((2, np.square))),
        ("descale.first_head", scaled((0, lambda x: x[:, [0, 0]]))),
        pytest.param("descale.scalar", scaled((1, lambda x: np.full_like(x, x[0, 0]))), marks=pytest.mark.slow),
        ("descale.swapped", (SCALES[0], SCALES[2], SCALES[1])),
    ],
)
def test_mistakes_of_factors_are_named_first(name: str, scales: tuple[Array, ...]) -> None:
    arguments = RAGGED | dict(zip(("q_descale", "k_descale", "v_descale"), SCALES, strict=True))
    assert judged(VARLEN, arguments, *varlen(bottom_right, scales=SCALES)).verdict.status == "correct"
    assert first(judged(VARLEN, arguments, *varlen(bottom_right, scales=scales))) == ("wrong", name, "proof")


V, S = RANDOM.normal(size=(5, 3, 2, 4)), RANDOM.normal(size=(5, 3, 2)) * 3
S[1, 2], S[2, :, 1], V[1, 2] = -np.inf, np.inf, np.nan
MERGES = "flashinfer.merge_states"


def merged(weigh: Callable[[Array], Array], empty: Callable[[Array], Array] = lambda x: x) -> tuple[Array, Array]:
    """The output of parts by weights of their logsumexps (n, parts, h), and the logsumexp of base 2."""
    is_empty = np.isinf(S)
    weights = empty(np.where(is_empty, 0.0, weigh(np.where(is_empty, 0.0, S))))
    total = weights.sum(axis=1)
    output = np.einsum("nph,nphe->nhe", weights, np.where(weights[..., None] > 0, V, 0.0))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(total[..., None] > 0, output / total[..., None], 0.0), np.log2(total)


def test_merged_states_are_judged() -> None:
    output, sums = merged(np.exp2)
    assert judged(MERGES, {"v": V, "s": S}, output, sums).verdict.status == "correct"
    assert (
        judged(MERGES, {"v": V, "s": S}, output.astype(np.float16), sums.astype(np.float32)).verdict.status == "correct"
    )
    for wrong in (merged(np.exp), (merged(np.exp)[0], merged(np.exp)[1] * math.log(2))):
        assert first(judged(MERGES, {"v": V, "s": S}, *wrong)) == ("wrong", "merge.base2", "proof")


def test_mistakes_of_empty_and_averaged_parts() -> None:
    """Parts without keys hold 0 here, as a mean of NaN says nothing."""
    numbers = {"v": np.where(np.isinf(S)[..., None], 0.0, V), "s": S}
    mean = numbers["v"].mean(axis=1)
    mean[2, 1] = 0.0  # no part has a key
    assert first(judged(MERGES, numbers, mean, merged(np.exp2)[1])) == ("wrong", "merge.equal_weights", "proof")
    weighed = np.where(np.isinf(S), 1.0, np.exp2(np.where(np.isinf(S), 0.0, S)))
    total = weighed.sum(axis=1)
    output = np.einsum("nph,nphe->nhe", weighed, numbers["v"]) / total[..., None]
    assert first(judged(MERGES, numbers, output, np.log2(total))) == ("wrong", "merge.empty_weighs", "proof")


def test_a_sink_of_each_part() -> None:
    """Four parts of the keys add the exponential of the sink four times."""
    sinks = np.array([0.5, -0.3, 1.0, 0.1])
    answers = []
    for times in (1, 4):
        output, sums = decoded(PAGES, lambda n: PAGES.keys(n, PAGES.tables[n], PAGES.lengths[n]))
        keys = np.exp2(sums.astype(np.float64))
        total = keys + times * np.exp(sinks)
        answers.append(((output * (keys / total)[..., None]).astype(np.float32), np.log2(total).astype(np.float32)))
    arguments = PAGES.arguments | {"sinks": sinks}
    assert judged(DECODE, arguments, *answers[0]).verdict.status == "correct"
    assert first(judged(DECODE, arguments, *answers[1])) == ("wrong", "merge.sink_each", "proof")


def test_where_counts_all_parts() -> None:
    """Two sequences of very different lengths are judged apart; one array is wrong in each."""
    call = Paged.drawn([2, 3000, 5])
    output, sums = decoded(call, lambda n: call.keys(n, call.tables[n], call.lengths[n]))
    sums[0, 3] += 1
    output[1, 2, 5] += 1
    report = judged(DECODE, call.arguments, output, sums)
    assert {place.array for place in report.where} == {"output"}
    elements, sequences, heads = report.where
    assert elements.worst is not None
    assert elements.worst[0].index == [1, 2, 0, 5]
    assert (
        "1 of 96 elements of the output (1.0%) are wrong, worst in sequence 1 of 3, head 2, query 0" in elements.message
    )
    assert (sequences.what, sequences.indices, heads.what, heads.indices) == ("sequences", [1], "heads", [2])
    report = judged(DECODE, call.arguments, None, sums)
    assert [place.message for place in report.where[1:]] == ["sequence 0 only", "head 3 only"]


def test_a_wrong_answer_that_no_addressing_explains_is_searched_for_other_mistakes() -> None:
    output, sums = varlen(lambda n: KEYS[n])  # every key is seen
    report = judged(VARLEN, RAGGED, output, sums)
    assert first(report) == ("wrong", "causal.absent", "proof")
    assert not {one.name for one in report.hypotheses} & {"ragged.top_left", "ragged.previous_offset"}
    assert report.power.killed


def test_rows_of_no_sequence_are_counted() -> None:
    output, _ = varlen(bottom_right)
    spare = {"q": np.concatenate([RAGGED["q"], np.full((3, 4, 8), np.nan, np.float32)])}
    output = np.concatenate([output, np.full((3, 4, 8), 7.0, np.float32)])
    report = judged(VARLEN, RAGGED | spare, output)
    assert (report.verdict.status, report.metadata["ignored_rows"]) == ("correct", 3)
    assert report.verdict.message.endswith("3 rows that belong to no sequence were not judged.")
    empty = {"cu_seqlens_q": np.zeros(5, np.int32)}
    report = judged(VARLEN, RAGGED | spare | empty, output)
    assert (report.verdict.status, report.metadata["ignored_rows"]) == ("inconclusive", 17)
    assert "no sequence has a query" in report.verdict.message
    assert judged(VARLEN, RAGGED | spare | empty, None).metadata["ignored_rows"] == 0


def test_plus_infinity_is_a_convention_of_some_libraries() -> None:
    """A query before all keys sees none; of FlashInfer its logsumexp is minus infinity."""
    q, kv = np.ones((2, 1, 1)), np.ones((1, 1, 1))
    output, sums = np.array([[[0.0]], [[1.0]]]), np.array([[np.inf], [1.0]])
    arguments = {"q": q, "k": kv, "v": kv, "cu_seqlens_q": [0, 2], "cu_seqlens_k": [0, 1], "causal": True}
    assert judged(VARLEN, arguments, output, sums.T).verdict.status == "correct"
    assert judged(VARLEN, arguments, output, -sums.T).verdict.status == "wrong"
    single = "flashinfer.single_prefill_with_kv_cache"
    arguments = {"q": q, "k": kv, "v": kv, "causal": True}
    assert judged(single, arguments, output, sums / math.log(2)).verdict.status == "wrong"
    sums[0] = -np.inf
    assert judged(single, arguments, output, sums / math.log(2)).verdict.status == "correct"
