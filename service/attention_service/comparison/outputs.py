"""Outputs as a subject: which mistakes of a forward pass explain them, and which a request can show."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from attention_service.attention.outputs import OUTPUT
from attention_service.attention.result import Metadata
from attention_service.backends.base import Check
from attention_service.comparison.actual import Actual, axes_of, canonical
from attention_service.comparison.case import Case
from attention_service.comparison.engine.candidate import Candidate
from attention_service.comparison.engine.hypothesis import ALMOST, LEAST, Hypothesis
from attention_service.comparison.engine.subject import Judgement
from attention_service.comparison.engine.suggestion import Suggestion
from attention_service.comparison.errors import distances
from attention_service.comparison.estimates import estimated
from attention_service.comparison.evidence import Evidence, holds
from attention_service.comparison.judged import Judged
from attention_service.comparison.pairs import JUDGED_PAIRS, PAIR_SCORES, best_pairs, with_logsumexps
from attention_service.comparison.places import places, worst
from attention_service.comparison.rules import CORRECT, Arrays
from attention_service.comparison.samples import choose_sample, most_scores, smaller
from attention_service.comparison.survivors import Known, survivors
from attention_service.comparison.tolerances import Tolerance
from attention_service.comparison.truth import Truth
from attention_service.comparison.wrong import Wrong
from attention_service.schemas.compare import Fact, Place

# Makes inputs that show some mistakes, as `Subject.suggestions` does.
Inputs = Callable[[Case, Collection[str], Collection[str], Check, bool], Iterable[Suggestion]]


def no_inputs(*_: object) -> Iterable[Suggestion]:
    """Returns no inputs, as the report of a call shows none."""
    return ()


@dataclass(frozen=True, eq=False)
class Outputs(Evidence):
    """Outputs, logsumexp and weights that were sent for a request.

    truth: of all rows, None for a made input, for which nothing was sent; inputs: makes inputs
    """

    truth: Truth | None = None
    inputs: Inputs = no_inputs

    @property
    def _whole(self) -> Arrays:
        """Canonical arrays of all rows, as they were sent."""
        return {} if self.truth is None else self.truth.actual.canonical

    @property
    def _limits(self) -> dict[str, float]:
        """The baselines of what was sent, on all rows."""
        return {} if self.truth is None else {name: self.truth.judged[name].limit for name in self._whole}

    def estimated(self, check: Check) -> Iterator[Candidate[Case]]:
        """Mistakes with a number or an order that is estimated from the output."""
        return (self.answer(names, case) for names, case in estimated(self._small, self._whole, check))

    def combined(
        self, singles: list[Hypothesis], candidates: list[Candidate[Case]], check: Check
    ) -> Iterator[Candidate[Case]]:
        """The pairs of mutants that explain the output best."""
        cases = defaultdict[str, list[Case]](list)
        for one in candidates:
            cases[one.names[0]].append(one.case)
        of_logsumexp = itertools.islice(with_logsumexps(self, singles), JUDGED_PAIRS)
        pairs = itertools.chain(of_logsumexp, best_pairs(self._small, singles, cases, check))
        return (self.answer(names, case) for names, case in pairs)

    @cached_property
    def _small(self) -> Evidence:
        """The evidence of a part of the sample, for what is tried hundreds of times."""
        return Evidence.of(self.case, smaller(self.sample, self.case, PAIR_SCORES), self._whole, wrong=self.wrong)

    def confirms(self, hypothesis: Hypothesis, check: Check) -> bool:
        """True if the output is within the baselines of the mutant on all rows."""
        return holds(hypothesis, self, self._whole, self._limits, check)

    def told(self, hypotheses: list[Hypothesis]) -> list[Hypothesis]:
        """The hypotheses; of errors that are too large in the mean of rows alone those that explain them."""
        if self.truth is None or any(self.truth.judged[name].largest > CORRECT for name in self.wrong):
            return hypotheses
        by_rows = map(self.by_rows, hypotheses)
        return [one for one in by_rows if one.explained >= (LEAST if one.candidate.rounds else ALMOST)]

    def facts(self) -> tuple[Fact, ...]:
        """The facts about all arrays that are wrong."""
        return () if self.truth is None else facts_of(self.truth)

    def alive(self, candidates: list[Candidate[Case]], check: Check) -> list[Candidate[Case]]:
        """The mutants that no row shows."""
        known = None
        if self.truth is not None and self.truth.right:
            rows = {name: one.rows.legal for name, one in self.truth.judged.items() if one.rows is not None}
            known = Known(self.truth.right, self._limits, rows)
        return survivors(self, candidates, check, known)

    def suggestions(self, names: Collection[str], check: Check, *, apart: bool) -> Iterable[Suggestion]:
        """Inputs that show some mutants."""
        return self.inputs(self.case, names, tuple(self.right), check, apart)


@dataclass(frozen=True, eq=False)
class JudgedOutputs(Judgement):
    """Outputs, logsumexp, weights and other arrays of a forward pass, judged. truth: of them; inputs: makes inputs"""

    truth: Truth
    inputs: Inputs = no_inputs

    @property
    def metadata(self) -> Metadata:
        """What the service says of the request."""
        return self.truth.reference.metadata

    @property
    def judged(self) -> Mapping[str, Judged]:
        """The errors of each array that was sent, by name."""
        return self.truth.judged

    @property
    def reference(self) -> dict[str, np.ndarray]:
        """What is right for the arrays that were sent; the output if none was."""
        reference = self.truth.reference
        return {name: reference[name] for name in self.truth.actual.as_sent or (OUTPUT,)}

    def passes(self, tolerance: Tolerance) -> bool:
        """True if what was sent passes a test with a tolerance."""
        return tolerance.passes_all(self.truth.actual.as_sent, self.truth.reference.arrays)

    def where(self) -> list[Place]:
        """Where the first array is wrong that is, those first that mutants change."""
        truth = self.truth
        for name in names_of_wrong(truth):
            both, judged = (truth.actual.as_sent[name], truth.reference[name]), truth.judged[name]
            sent, right = (canonical(array, name, truth.plan) for array in both)
            found = places(name, sent, right, judged.element_limits, axes_of(name, truth.plan))
            for whole in found[:1]:  # none where errors are too large in the mean only
                whole.axes = list(axes_of(name, truth.plan, as_sent=True))
                whole.worst = worst(*both)
            return found
        return []

    def subject(self, check: Check) -> Outputs:
        """A sample of the worst rows."""
        return outputs_of(replace(self.truth, case=replace(self.truth.case, check=check)), self.inputs)


def outputs_of(truth: Truth, inputs: Inputs = no_inputs) -> Outputs:
    """The outputs that were sent, with a sample of their worst rows."""
    case, judged, whole = truth.case, truth.judged, truth.actual.canonical
    names = tuple(whole) or (OUTPUT,)
    wrong = frozenset(name for name in whole if judged[name].ratio > CORRECT)
    sample = choose_sample(case, wrong_rows(truth.actual, truth.right, wrong) if wrong else None, most_scores(names))
    found = replace(Outputs.of(case, sample, whole or None, names, wrong), truth=truth, inputs=inputs)
    return found.of_seen(name for name in wrong if judged[name].largest > CORRECT)


def facts_of(truth: Truth) -> tuple[Fact, ...]:
    """The facts about all arrays that are wrong."""
    # Loaded for the first answer that is wrong, as an idle service has no use for them.
    from attention_service.comparison.facts import find_facts

    return tuple(find_facts([_wrong(truth, name) for name in names_of_wrong(truth)]))


def _wrong(truth: Truth, name: str) -> Wrong:
    """A wrong array; its rows are those of the case if mutants change it."""
    sent, right = (canonical(of[name], name, truth.plan) for of in (truth.actual.as_sent, truth.reference.arrays))
    case = truth.case
    has_rows = name in truth.right and right.shape[:3] == case.query.shape[:3] and not case.needs_all_heads
    shape = (*right.shape[:3], -1)
    limit = CORRECT * truth.judged[name].limit
    return Wrong(name, axes_of(name, truth.plan), sent.reshape(shape), right.reshape(shape), limit, case, has_rows)


def names_of_wrong(truth: Truth) -> list[str]:
    """The names of the arrays that are wrong, those first that mutants change."""
    return [name for name in {**truth.right, **truth.judged} if truth.judged[name].ratio > CORRECT]


def wrong_rows(actual: Actual, right: Mapping[str, np.ndarray], names: frozenset[str]) -> np.ndarray:
    """The largest error of each row (b, h, q), of the first array that is wrong."""
    name = next(name for name in right if name in names)
    apart = distances(actual.canonical[name], right[name])
    wrong: np.ndarray = apart if apart.ndim == 3 else apart.max(axis=-1)
    return wrong
