"""The search for the mistakes that explain an output: single mutants, estimated ones, then pairs."""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from attention_service.backends.base import Check
from attention_service.comparison.baseline import CORRECT, Arrays, arrays_of
from attention_service.comparison.candidates import NOT_COMBINED, Candidate, ratio
from attention_service.comparison.case import Case
from attention_service.comparison.estimates import estimated
from attention_service.comparison.evidence import Evidence, Hypothesis, holds, joined
from attention_service.comparison.mutants import MUTANTS
from attention_service.comparison.samples import smaller
from attention_service.comparison.solve import solve

# Hypotheses that are told, and proofs that are confirmed on all rows.
TOLD: Final = 5
CONFIRMED: Final = 3
# Hypotheses whose own baselines are computed.
REFINED: Final = 8
# Scores of the sample for pairs and estimates, and pairs that are tried.
PAIR_SCORES: Final = 2**12
MAX_PAIRS: Final = 1200
# Pairs of each kind whose answers for the whole sample are judged.
JUDGED_PAIRS: Final = 20
# What a pair leaves unexplained of the sample, in squared baselines, at most, if it explains the output.
EXPLAINED: Final = 1.0
# Scores of all cases of pairs that are tried.
ALL_PAIR_SCORES: Final = 2**22


def search(
    evidence: Evidence, found: list[Candidate], actual: Arrays, limits: Mapping[str, float], check: Check
) -> Iterator[list[Hypothesis]]:
    """The hypotheses that explain an output, best first, after each step of the search; a proof stands alone.

    found: the mutants' answers for the sample; actual: canonical arrays of all rows; limits: baselines of all rows
    """
    case, cases = evidence.case, defaultdict[str, list[Case]](list)
    for candidate in found:
        cases[candidate.names[0]].append(candidate.case)
    small = Evidence.of(case, smaller(evidence.sample, case, PAIR_SCORES), actual, wrong=evidence.wrong)
    found = [one for one in found if not evidence.contradicts(one)]
    singles = _ranked([evidence.judge(one) for one in found], evidence)
    told = _confirmed(joined(singles, evidence, TOLD), evidence, actual, limits, check)
    yield _told(told)
    if not _is_proved(told):
        guesses = [evidence.answer(names, wrong) for names, wrong in estimated(small, actual, check)]
        guesses = [one for one in guesses if not evidence.contradicts(one)]
        singles = _ranked([*singles, *map(evidence.judge, guesses)], evidence)
        told = _confirmed(joined(singles, evidence, TOLD), evidence, actual, limits, check)
        yield _told(told)
    if not _is_proved(told):
        pairs = [
            *itertools.islice(_with_logsumexps(evidence, singles), JUDGED_PAIRS),
            *_pairs(small, singles, cases, check),
        ]
        both = [evidence.answer(names, wrong) for names, wrong in pairs]
        both = [one for one in both if not any(_adds_nothing(one, other, evidence) for other in found)]
        both = [one for one in both if not evidence.contradicts(one)]
        judged = joined(_ranked(list(map(evidence.judge, both)), evidence), evidence, TOLD)
        judged = _confirmed(judged, evidence, actual, limits, check)
        best = max((one.explained for one in told if not one.part), default=0.0)
        # Two mistakes explain more than one of them by chance, too.
        told += [one for one in judged if one.is_proof or not (one.part or 1 - one.explained >= (1 - best) / 4)]
        told.sort(key=lambda one: one.rank)
        yield _told(told)


def _told(found: list[Hypothesis]) -> list[Hypothesis]:
    proofs = [one for one in found if one.is_proof]
    by_names = {one.candidate.names: one for one in reversed(found) if one.is_told}
    return proofs or sorted(by_names.values(), key=lambda one: one.rank)[:TOLD]


def _adds_nothing(pair: Candidate, one: Candidate, evidence: Evidence) -> bool:
    """True if the answer of two mistakes is that of one of them."""
    return one.names[0] in pair.names and ratio(pair.arrays, one.arrays, evidence.baselines) <= CORRECT


def _is_proved(hypotheses: list[Hypothesis]) -> bool:
    return any(one.is_proof for one in hypotheses)


def _ranked(hypotheses: list[Hypothesis], evidence: Evidence) -> list[Hypothesis]:
    """Hypotheses, best first; the best of them by their own baselines."""
    ranked = sorted(hypotheses, key=lambda one: one.rank)
    if not _is_proved(ranked):
        ranked = [evidence.refined(one) for one in ranked[:REFINED]] + ranked[REFINED:]
    return sorted(ranked, key=lambda one: one.rank)


def _confirmed(
    found: list[Hypothesis], evidence: Evidence, actual: Arrays, limits: Mapping[str, float], check: Check
) -> list[Hypothesis]:
    """The hypotheses in order, after the first proofs among them were checked on all rows, until one holds."""
    checked, tried, is_proved = [], 0, False
    for one in found:
        if one.is_proof and not is_proved:
            tried += 1
            is_proved = tried <= CONFIRMED and holds(one, evidence, actual, limits, check)
            checked.append(replace(one, is_proof=is_proved))
        else:
            checked.append(replace(one, is_proof=False))
    return sorted(checked, key=lambda one: one.rank)


def _with_logsumexps(evidence: Evidence, singles: list[Hypothesis]) -> Iterator[tuple[tuple[str, ...], Case]]:
    """Mistakes that explain all wrong arrays but the logsumexp, each with one more that changes nothing else."""
    others = {name: evidence.actual[name] for name in evidence.wrong - {"logsumexp"}}
    if not others or "logsumexp" not in evidence.wrong:
        return
    for one in (one.candidate for one in singles):
        if not one.rounds and ratio(others, one.arrays, evidence.baselines) <= CORRECT:
            for row in (row for row in MUTANTS.values() if row.needs == "logsumexp" and row.name not in one.names):
                yield from (((*one.names, row.name), case) for case in row.edit(one.case))


def _pairs(
    small: Evidence, singles: list[Hypothesis], cases: Mapping[str, list[Case]], check: Check
) -> Iterator[tuple[tuple[str, ...], Case]]:
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
