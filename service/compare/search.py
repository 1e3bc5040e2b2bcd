"""The search for the mistakes that explain an output: single mutants, estimated ones, then pairs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np

from service.compare.baseline import arrays_of
from service.compare.candidates import NOT_COMBINED, Arrays, Check, candidates
from service.compare.case import Case
from service.compare.estimates import estimated
from service.compare.evidence import Evidence, Hypothesis, holds, joined
from service.compare.mutants import MUTANTS
from service.compare.samples import choose_sample
from service.compare.solve import solve

# Hypotheses below this share of the error explained are not told.
LEAST: Final = 0.5
# Hypotheses that are told, and proofs that are confirmed on all rows.
TOLD: Final = 5
CONFIRMED: Final = 3
# Scores of the sample for pairs, and pairs that are tried.
PAIR_SCORES: Final = 2**14
MAX_PAIRS: Final = 3000


def search(case: Case, actual: Arrays, wrong: np.ndarray | None, check: Check) -> list[Hypothesis]:
    """The hypotheses that explain an output, best first.

    actual: canonical arrays; wrong: (b, h, q) errors of the output, see choose_sample
    """
    evidence = Evidence.of(case, choose_sample(case, wrong), actual)
    singles = [evidence.judge(one) for one in candidates(case, evidence.sample, evidence.right, check)]
    if not any(one.is_proof for one in singles):
        singles += [evidence.judge(one) for one in estimated(evidence, actual, check)]
    ranked = sorted(singles, key=lambda one: one.rank)
    found = _confirmed(joined(ranked, evidence, TOLD), actual, check)
    if not any(one.is_proof for one in found):
        small = Evidence.of(case, choose_sample(case, wrong, PAIR_SCORES), actual)
        pairs = [evidence.judge(evidence.answer(*pair)) for pair in _pairs(small, ranked, check)]
        pairs = _confirmed(joined(sorted(pairs, key=lambda one: one.rank), evidence, TOLD), actual, check)
        best = max((one.explained for one in found), default=0.0)
        # Two mistakes explain more than one of them by chance, too.
        found += [one for one in pairs if one.is_proof or 1 - one.explained < (1 - best) / 4]
        found.sort(key=lambda one: one.rank)
    return [one for one in found if one.explained >= LEAST][:TOLD]


def _confirmed(found: list[Hypothesis], actual: Arrays, check: Check) -> list[Hypothesis]:
    """The hypotheses in order, after the first proofs among them were checked on all rows, until one holds."""
    checked, tried, is_proved = [], 0, False
    for one in found:
        if one.is_proof and not is_proved:
            tried += 1
            is_proved = tried <= CONFIRMED and holds(one.candidate, actual, check)
            checked.append(replace(one, is_proof=is_proved))
        else:
            checked.append(replace(one, is_proof=False))
    return sorted(checked, key=lambda one: one.rank)


def _pairs(small: Evidence, singles: list[Hypothesis], check: Check) -> Iterator[tuple[tuple[str, ...], Case]]:
    """The pairs of mutants that explain the output of a small sample best, with their cases. singles: ranked"""
    best: dict[str, float] = {}
    for one in singles:
        [name] = one.candidate.names
        if name in MUTANTS and MUTANTS[name].group not in NOT_COMBINED:
            best[name] = max(best.get(name, -np.inf), one.explained)
    names = sorted(best, key=lambda name: -best[name])
    places = {name: place for place, name in enumerate(names)}
    pairs = sorted(itertools.permutations(names, 2), key=lambda pair: places[pair[0]] + places[pair[1]])
    found: list[tuple[float, tuple[str, ...], Case]] = []
    for pair in pairs[:MAX_PAIRS]:
        groups = {MUTANTS[name].group for name in pair}
        if len(groups) == 2 and places[pair[0]] > places[pair[1]]:
            continue  # mistakes of different groups make the same case in either order
        check()
        for case in _both(small.case, *pair):
            left = small.unexplained(arrays_of(solve(case, small.sample), small.right))
            found.append((left, pair, case))
    found.sort(key=lambda one: one[0])
    return ((pair, case) for _, pair, case in found[: 4 * TOLD])


def _both(case: Case, first: str, second: str) -> Iterator[Case]:
    for once in MUTANTS[first].edit(case):
        yield from MUTANTS[second].edit(once)
