"""Tokens that a kernel reads elsewhere, and parts that it merges otherwise: named, or told by a fact that is true.

The kernels are those of tests/helpers/planted_reads.py and planted_merges.py, which share no line with the product;
`python -m tests.deep_engines reads merges` draws thousands.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest

from attention_service.engines.places import Places, numbers_at
from attention_service.schemas.compare import CompareReport
from tests.helpers import planted_merges, planted_reads
from tests.test_compare_calls import DECODE, PAGES, decoded, judged

pytestmark = pytest.mark.usefixtures("without_suggestions")
# Some that are found quickly: of entries and of memory.
QUICK = ("entry.not_read", "stride.narrow", "slot.swizzled")
QUICK_MERGES = ("empty.weighs_in_output", "sums.of_next_head")


def slow_but(names: list[str], quick: tuple[str, ...]) -> list[object]:
    return [pytest.param(name, marks=[pytest.mark.slow] * (name not in quick)) for name in names]


def is_told(planter: ModuleType, name: str, seed: int) -> bool | None:
    """True if a planted mistake is named or told by a fact; None if it cannot be told. What is said is true."""
    planted = planter.plant(name, seed)
    if planted is None:
        return None
    call, output, sums = planted.call
    report = judged(call.function, call.arguments, output, sums, call.version)
    if report.verdict.status not in ("wrong", "imprecise"):
        return None
    best = report.hypotheses[0] if report.hypotheses else None
    if best is not None and best.certainty == "proof":
        names = (best.name, *best.also)
        assert any(one in planter.MISTAKES[name][1] or planter.says(one, planted) for one in names), (seed, names)
        return True
    assert all(planter.is_true(fact, planted) for fact in report.facts[:1]), (seed, report.facts)
    return bool(report.facts)


@pytest.mark.parametrize("name", slow_but(list(planted_reads.MISTAKES), QUICK))
def test_what_was_read_elsewhere_is_told(name: str) -> None:
    told = [is_told(planted_reads, name, seed) for seed in range(1)]
    assert False not in told


@pytest.mark.parametrize("name", slow_but(list(planted_merges.MISTAKES), QUICK_MERGES))
def test_how_parts_were_merged_is_told(name: str) -> None:
    told = [is_told(planted_merges, name, seed) for seed in range(1)]
    assert False not in told


def test_right_kernels_are_right() -> None:
    for planter in (planted_reads, planted_merges):
        for seed in range(12):
            call, output, sums = planter.right(seed)
            assert judged(call.function, call.arguments, output, sums, call.version).verdict.status == "correct"


def read(*order: int) -> CompareReport:
    """The report on a decode whose sequence n reads the pages of sequence order[n], with its own length."""
    tables = [PAGES.tables[n] + PAGES.tables[(n + 1) % 5] * 3 for n in order]
    return judged(DECODE, PAGES.arguments, *decoded(PAGES, lambda n: PAGES.keys(n, tables[n], PAGES.lengths[n])))


def test_a_sequence_that_reads_the_pages_of_another_is_told_with_the_pages() -> None:
    report = read(0, 1, 1, 3, 4)
    (fact,) = report.facts
    assert (fact.name, fact.numbers["sequences"]) == ("read_elsewhere", [2.0])
    assert "sequence 2 of 5 is right for other keys and values: they are those of the sequence before" in fact.message
    places = [fact.numbers[name][0] for name in ("token", "page", "slot")]
    assert places == [0.0, PAGES.tables[1][0], 0.0]
    assert f"where page {PAGES.tables[2][0]} slot 0 is right" in fact.message


def test_two_exchanged_lengths_are_no_mistake_of_thread_blocks() -> None:
    """Sequence 0 has half the keys of sequence 1: of the latter alone, the first half of its keys explains all."""
    call = planted_reads.Draw(np.random.default_rng(3))
    call.dtype, call.b, call.page, call.hk, call.group, call.h, call.d = np.dtype(np.float32), 2, 4, 2, 2, 4, 8
    call.lengths, call.tables, call.pages = [8, 16], [[0, 1], [5, 4, 3, 2]], 9
    right = planted_reads.infer_decode(call)
    wrong = planted_reads.copied(right)
    wrong.lengths = [16, 8]
    output, sums = planted_reads.typed(planted_reads.answer(wrong), call.dtype)
    report = judged(right.function, right.arguments, output, sums)
    assert [one.certainty for one in report.hypotheses if one.name.startswith("keys.")] == []
    assert report.facts[0].name == "read_elsewhere"
    assert "there are as many as" in report.facts[0].message


def test_a_mistake_is_listed_once() -> None:
    """`merge.base2` is one of calls and one of requests."""
    random = np.random.default_rng(0)
    v, s = random.normal(size=(5, 3, 2, 8)), random.normal(size=(5, 3, 2)) * 3
    output, sums = planted_merges.natural(v, s)
    report = judged("flashinfer.merge_states", {"v": v, "s": s}, output, sums)
    names = [one.name for one in report.hypotheses]
    assert names[0] == "merge.base2"
    assert len(names) == len({*names})
    shown = judged("flashinfer.merge_states", {"v": v, "s": s}, None).power
    assert "merge.base2" not in shown.survivors
    assert len({*shown.survivors}) == len(shown.survivors)


def test_places_outside_of_memory_are_refused() -> None:
    """Of three pages of two tokens, address by address: token 3 of page 0 is token 1 of page 1."""
    array = np.arange(12.0).reshape(3, 2, 2, 1)

    def at(page: int, token: int, bits: int = 0) -> list[float]:
        places = Places(np.array([1]), lambda n: (np.array([page]), np.array([token])), bits=bits)
        return [float(x) for x in numbers_at(array, places, 0).ravel()]

    assert at(0, 3) == at(1, 1) == [6.0, 7.0]
    assert at(2, 1, bits=3) == [2.0, 3.0]
    for outside in ((3, 0), (0, 6), (0, -1), (-1, 0)):
        with pytest.raises(IndexError):
            at(*outside)
