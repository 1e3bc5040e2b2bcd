"""Pairs of mutants that explain an output which one of them does not."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import numpy as np

from attention_service.backends.base import Check
from attention_service.comparison.baseline import arrays_of
from attention_service.comparison.candidates import NOT_COMBINED
from attention_service.comparison.case import Case
from attention_service.comparison.engine.candidate import ratio
from attention_service.comparison.engine.hypothesis import Hypothesis
from attention_service.comparison.evidence import Evidence
from attention_service.comparison.mutants import MUTANTS
from attention_service.comparison.rules import CORRECT
from attention_service.comparison.solve import solve

# Scores of the sample for pairs and estimates, and pairs that are tried.
PAIR_SCORES: Final = 2**12
MAX_PAIRS: Final = 1200
# Pairs of each kind whose answers for the whole sample are judged.
JUDGED_PAIRS: Final = 20
# What a pair leaves unexplained of the sample, in squared baselines, at most, if it explains the output.
EXPLAINED: Final = 1.0
# Scores of all cases of pairs that are tried.
ALL_PAIR_SCORES: Final = 2**22
# The names of two mutants, and the case that they make.
Pair = tuple[tuple[str, ...], Case]


def with_logsumexps(evidence: Evidence, singles: list[Hypothesis]) -> Iterator[Pair]:
    """Mistakes that explain all wrong arrays but the logsumexp, each with one more that changes nothing else."""
    others = {name: evidence.actual[name] for name in evidence.wrong - {"logsumexp"}}
    if not others or "logsumexp" not in evidence.wrong:
        return
    for one in (one.candidate for one in singles):
        if not one.rounds and ratio(others, one.arrays, evidence.baselines) <= CORRECT:
            for row in (row for row in MUTANTS.values() if row.needs == "logsumexp" and row.name not in one.names):
                yield from (((*one.names, row.name), case) for case in row.edit(one.case))


def best_pairs(
    small: Evidence, singles: list[Hypothesis], cases: Mapping[str, list[Case]], check: Check
) -> Iterator[Pair]:
    """The pairs of mutants that explain the output of a small sample best, with their cases.

    singles: ranked; cases: of each single mutant, by name
    """
    best: dict[str, float] = {}
    for one in singles:
        name = one.candidate.names[0]
        if name in MUTANTS and not {name, MUTANTS[name].group} & NOT_COMBINED:
            best[name] = max(best.get(name, -np.inf), one.explained)
    names = sorted(best, key=lambda name: -best[name])
    places = {name: place for place, name in enumerate(names)}
    pairs = sorted(itertools.permutations(names, 2), key=lambda pair: places[pair[0]] + places[pair[1]])
    # Two mistakes of one group may change the same part of a case, so that their order matters.
    groups = {name: MUTANTS[name].group for name in names}
    pairs = [(one, two) for one, two in pairs if places[one] < places[two] or groups[one] == groups[two]]
    untried = iter(pairs[:MAX_PAIRS])
    best_pairs = heapq.nsmallest(JUDGED_PAIRS, _tried(small, untried, cases, check), key=lambda one: one[0])
    if best_pairs and best_pairs[0][0] <= EXPLAINED:
        # What gives the same output as the best pair may have been left out, as it explains little by itself.
        partners = (pair for pair in (*untried, *pairs[MAX_PAIRS:]) if {*pair} & {*best_pairs[0][1]})
        found = itertools.chain(best_pairs, _tried(small, partners, cases, check))
        best_pairs = heapq.nsmallest(JUDGED_PAIRS, found, key=lambda one: one[0])
    return ((pair, case) for _, pair, case in best_pairs)


def _tried(
    small: Evidence, pairs: Iterable[tuple[str, str]], cases: Mapping[str, list[Case]], check: Check
) -> Iterator[tuple[float, tuple[str, ...], Case]]:
    """What pairs of mutants leave unexplained of a small sample, with the pairs and their cases.

    cases: of each single mutant, by name: pairs share the arrays of the first
    """
    sample = small.sample
    scores = len(sample.batches) * len(sample.heads) * len(sample.rows) * small.case.plan.sizes.key_length
    tried = 0
    for pair in pairs:
        check()
        for once in cases[pair[0]]:
            for case in MUTANTS[pair[1]].edit(once):
                yield small.unexplained(arrays_of(solve(case, sample), small.right)), pair, case
                tried += 1
        if tried * scores > ALL_PAIR_SCORES:
            return
