"""Whether the mistake that the worst sequences of a call prove is one of all its sequences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final

import numpy as np

from attention_service.backends.base import Backend, Check
from attention_service.comparison.baseline import CORRECT, Arrays, baselines
from attention_service.comparison.calls.parts import question_of
from attention_service.comparison.calls.question import CallQuestion
from attention_service.comparison.candidates import Candidate, candidates, ratio
from attention_service.comparison.compare import wrong_rows
from attention_service.comparison.evidence import Evidence, Hypothesis
from attention_service.comparison.mutants import MUTANTS
from attention_service.comparison.samples import choose_sample, most_scores
from attention_service.comparison.search import search
from attention_service.comparison.truth import Truth, reference_and_baseline

# Parts that are looked at, of those that are wrong and of those that are right.
MOST: Final = 8
# Sequences of a part that are looked at by themselves.
ALONE: Final = 4


def is_in_all(
    proof: Hypothesis, wrong: Iterable[np.ndarray], asked: CallQuestion, backend: Backend, check: Check
) -> bool:
    """True if other parts that are wrong prove the same mistake. wrong: their sequences"""
    names = {*proof.candidate.names}
    for part in islice(wrong, MOST):
        truth, evidence = _evidence(asked, part, backend, check)
        case, sent = evidence.case, truth.actual.canonical
        mutants = list(candidates(case, evidence.sample, evidence.right, check, names))
        limits = {name: truth.judged[name].limit for name in sent}
        steps = search(evidence, mutants, sent, limits, check)
        if not any(one.is_proof and names == {*one.candidate.names} for found in steps for one in found):
            return False
    return True


def is_in_none(
    one: Hypothesis, right: Iterable[np.ndarray], asked: CallQuestion, backend: Backend, check: Check
) -> bool:
    """True if a mistake would change a part that is right, so that the kernel did not make it of all sequences."""
    names = one.candidate.names
    if not MUTANTS.keys() >= {*names}:  # a fitted number has no answer where it changes nothing
        return any(int(asked.addressed.keys[part].max()) > 1 for part in right)
    for part in islice(right, MOST):
        truth, evidence = _evidence(asked, part, backend, check)
        sent = {name: evidence.sample.of(array) for name, array in truth.actual.canonical.items()}
        for name in names:
            found = list(candidates(evidence.case, evidence.sample, evidence.right, check, (name,)))
            if found and min(ratio(sent, other.arrays, evidence.baselines) for other in found) > CORRECT:
                return True
    return False


def is_of_each(one: Hypothesis, part: np.ndarray, asked: CallQuestion, backend: Backend, check: Check) -> bool:
    """True if a mistake is that of the sequences of a part by themselves, not only of the batch that pads them.

    "The last key" of a padded batch is no key of a shorter sequence, and its first entry is any sequence of the call.
    """
    names = one.candidate.names
    if len(part) == 1 or not MUTANTS.keys() >= {*names}:
        return True
    call = asked.addressed
    lengths = np.stack([call.query.lengths[part], call.keys[part]], axis=1)
    _, first = np.unique(lengths, axis=0, return_index=True)
    chosen = np.unique(np.linspace(0, len(first) - 1, ALONE).astype(int))  # from the shortest to the longest
    for sequence in part[first[chosen]]:
        truth, evidence = _evidence(asked, np.array([sequence]), backend, check)
        sent = {name: evidence.sample.of(array) for name, array in truth.actual.canonical.items()}
        if not any(_agrees(evidence, sent, made) for made in _forms(names, evidence)):
            return False
    return True


def _forms(names: tuple[str, ...], evidence: Evidence) -> Iterator[Candidate]:
    """All forms of mistakes, made one after the other; one that changes nothing is left out."""
    cases = [evidence.case]
    for name in names:
        cases = [made for case in cases for made in MUTANTS[name].edit(case)] or cases
    return (evidence.answer(names, case) for case in cases)


def _agrees(evidence: Evidence, sent: Arrays, made: Candidate) -> bool:
    """True if what was sent is what a mistake makes, within legal rounding of the right answer or of its own."""
    if ratio(sent, made.arrays, evidence.baselines) <= CORRECT:
        return True
    return ratio(sent, made.arrays, baselines(made.case, evidence.sample, made.arrays, evidence.case.dtype)) <= CORRECT


def _evidence(asked: CallQuestion, part: np.ndarray, backend: Backend, check: Check) -> tuple[Truth, Evidence]:
    """What is right for a part, and the evidence of its worst rows."""
    truth = reference_and_baseline(question_of(asked, part), backend, check)
    actual, right, names = truth.actual, truth.right, tuple(truth.actual.canonical)
    wrong = frozenset(name for name in actual.canonical if truth.judged[name].ratio > CORRECT)
    rows = wrong_rows(actual, right, wrong) if wrong else None
    sample = choose_sample(truth.case, rows, most_scores(names))
    return truth, Evidence.of(truth.case, sample, actual.canonical, names, wrong)
