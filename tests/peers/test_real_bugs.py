"""Real bugs of kernels are judged: each is seen, none is proved to be another mistake, no right kernel is accused.

`python -m tests.peers.test_real_bugs [WORD …]` prints what is said of each, or of those whose thread has a word.
"""

from __future__ import annotations

import sys
import zlib
from collections import Counter
from functools import cache

import numpy as np
import pytest

from attention_service.library import compare
from attention_service.schemas.compare import CompareReport
from tests.peers.real_bugs import BUGS, Bug

EACH = pytest.mark.parametrize("place", range(len(BUGS)), ids=[f"{bug.thread} {bug.kernel.__name__}" for bug in BUGS])
# How many of them have their true name as the first hypothesis, and how many others a fact explains.
NAMED = 69
EXPLAINED = 46


@cache
def judged(place: int, wrong: bool) -> CompareReport:
    """What is said of a kernel with its bug, or without it: then the verdict only, as there is no mistake to search."""
    bug = BUGS[place]
    fields = bug.request(np.random.default_rng(zlib.crc32(f"{bug.thread} {bug.kernel.__name__}".encode())))
    with np.errstate(all="ignore"):  # as on a GPU
        arrays = bug.kernel(fields, wrong)
    return compare(arrays, **fields, time_limit=None if wrong else 0)


def first_names(report: CompareReport) -> set[str]:
    """The names of the first hypothesis, and of those that give the same output."""
    return {report.hypotheses[0].name, *report.hypotheses[0].also} if report.hypotheses else set()


def outcome(bug: Bug, report: CompareReport) -> str:
    """How well a wrong output is explained."""
    if first_names(report) & bug.names:
        return "named"
    if report.hypotheses and report.hypotheses[0].certainty == "proof":
        return "false proof"
    if any(fact.name != "rows_by_keys" for fact in report.facts):
        return "explained"
    return "resembles another mistake" if report.hypotheses else "unexplained"


@EACH
def test_the_right_kernel_is_correct(place: int) -> None:
    report = judged(place, wrong=False)
    assert report.verdict.status in ("correct", "inconclusive"), report.verdict


@EACH
def test_the_bug_is_seen(place: int) -> None:
    report = judged(place, wrong=True)
    assert (report.verdict.status in ("imprecise", "wrong")) == BUGS[place].is_visible, report.verdict


@EACH
def test_no_other_mistake_is_proved(place: int) -> None:
    report = judged(place, wrong=True)
    assert outcome(BUGS[place], report) != "false proof", report.hypotheses


def test_so_many_are_named() -> None:
    counts = Counter(outcome(bug, judged(place, wrong=True)) for place, bug in enumerate(BUGS) if bug.is_visible)
    assert (counts["named"], counts["explained"]) == (NAMED, EXPLAINED), counts


def main(words: list[str]) -> None:
    """Print what is said of each bug, and how many are named."""
    counts: Counter[str] = Counter()
    for place, bug in enumerate(BUGS):
        if words and not any(word in bug.thread for word in words):
            continue
        right, report = judged(place, wrong=False).verdict, judged(place, wrong=True)
        found = outcome(bug, report) if bug.is_visible else "not visible"
        counts[found] += 1
        print(f"{bug.thread}: {bug.what}")
        print(f"  {found}; {report.verdict.status} ({report.verdict.ratio})")
        print(f"  without the bug {right.status} ({right.ratio})")
        for one in report.hypotheses[:3]:
            print(f"  {one.certainty} {one.name} {one.also}: {one.explained:.3f}, ratio {one.ratio}")
        print(f"  where: {'; '.join(where.message for where in report.where)}", flush=True)
    print(dict(counts))


if __name__ == "__main__":
    main(sys.argv[1:])
