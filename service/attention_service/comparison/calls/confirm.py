"""Whether the mistake that the worst sequences of a call prove is one of all its sequences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final

import numpy as np

from attention_service.backends.base import Backend, Check
from attention_service.comparison.baseline import baselines
from attention_service.comparison.calls.parts import question_of
from attention_service.comparison.calls.question import CallQuestion
from attention_service.comparison.candidates import candidates
from attention_service.comparison.case import Case
from attention_service.comparison.engine.candidate import Candidate, ratio
from attention_service.comparison.engine.hypothesis import Hypothesis
from attention_service.comparison.engine.search import search
from attention_service.comparison.mutants import MUTANTS
from attention_service.comparison.outputs import Outputs, outputs_of
from attention_service.comparison.rules import CORRECT
from attention_service.comparison.truth import reference_and_baseline

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
        outputs = outputs_of(reference_and_baseline(question_of(asked, part), backend, check))
        mutants = list(candidates(outputs.case, outputs.sample, outputs.right, check, names))
        steps = search(outputs, mutants, check)
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
        outputs = outputs_of(reference_and_baseline(question_of(asked, part), backend, check))
        for name in names:
            made = list(candidates(outputs.case, outputs.sample, outputs.right, check, (name,)))
            if made and min(map(outputs.ratio, made)) > CORRECT:
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
        outputs = outputs_of(reference_and_baseline(question_of(asked, np.array([sequence])), backend, check))
        if not any(_agrees(outputs, made) for made in _forms(names, outputs)):
            return False
    return True


def _forms(names: tuple[str, ...], outputs: Outputs) -> Iterator[Candidate[Case]]:
    """All forms of mistakes, made one after the other; one that changes nothing is left out."""
    cases = [outputs.case]
    for name in names:
        cases = [made for case in cases for made in MUTANTS[name].edit(case)] or cases
    return (outputs.answer(names, case) for case in cases)


def _agrees(outputs: Outputs, made: Candidate[Case]) -> bool:
    """True if what was sent is what a mistake makes, within legal rounding of the right answer or of its own."""
    if outputs.ratio(made) <= CORRECT:
        return True
    own = baselines(made.case, outputs.sample, made.arrays, outputs.case.dtype)
    return ratio(outputs.actual, made.arrays, own) <= CORRECT
