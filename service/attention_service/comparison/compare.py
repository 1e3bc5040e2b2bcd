"""The comparison of what a kernel returned with the reference."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np

from attention_service.attention.outputs import OUTPUT
from attention_service.attention.planning import make_plan
from attention_service.attention.result import Metadata
from attention_service.backends.base import Backend, Check, no_check
from attention_service.comparison.actual import axes_of, canonical, is_gradient
from attention_service.comparison.baseline import FIELDS
from attention_service.comparison.case import Case, make_case, unknown_options
from attention_service.comparison.engine.hypothesis import Hypothesis
from attention_service.comparison.engine.learn import Learned, learn
from attention_service.comparison.engine.power import Power, no_power
from attention_service.comparison.engine.rules import CORRECT, status_of
from attention_service.comparison.engine.suggestion import Suggestion
from attention_service.comparison.errors import distance
from attention_service.comparison.gradients.judge import (
    GradientTruth,
    gradient_truth,
    judge_gradients,
    read_gradients,
    where_gradients,
)
from attention_service.comparison.gradients.subject import GradientSubject
from attention_service.comparison.inputs import suggestions
from attention_service.comparison.judged import Judged
from attention_service.comparison.outputs import names_of_wrong, outputs_of
from attention_service.comparison.places import places, worst
from attention_service.comparison.recipes import recipe_of
from attention_service.comparison.time_limit import TimeIsUp, limited
from attention_service.comparison.tolerances import Tolerance, usual_tolerances
from attention_service.comparison.truth import Question, Truth, pool_of, reference_and_baseline
from attention_service.schemas.compare import Fact, Place


@dataclass(frozen=True)
class Comparison:
    """All that a report tells.

    judged: by the name of the array; passes: what each test says, None without arrays
    unknown: options of the request that the comparison does not compute, so that nothing was judged
    metadata: of the reference; None if only some rows were computed
    reference: what is right, float64 arrays by the names of those that were sent; the output if none was
    against: that of the other answer
    rows: how many rows of each head were judged; None for all, and for the mistakes that they can show
    ended_early: True if the time limit ended the search
    truth: what is right, where it was given; it takes as much memory as the comparison
    """

    question: Question
    metadata: Metadata | None
    judged: Mapping[str, Judged]
    passes: Mapping[str, bool]
    tolerances: tuple[Tolerance, ...]
    where: list[Place]
    hypotheses: list[Hypothesis]
    power: Power
    suggestion: Suggestion | None
    unknown: tuple[str, ...] = ()
    reference: Mapping[str, np.ndarray] = field(default_factory=dict)
    facts: tuple[Fact, ...] = ()
    against: Comparison | None = None
    rows: int | None = None
    ended_early: bool = False
    truth: Truth | None = None

    @property
    def differences(self) -> dict[str, float]:
        """The largest difference to the other answer of each array that both have, in baselines."""
        one, other = self.question.actual or {}, self.question.against or {}
        units = {"logsumexp": math.log(2)} if self.question.base2 else {}
        return {
            name: distance(one[name].astype(np.float64), other[name].astype(np.float64)) * units.get(name, 1) / it.limit
            for name, it in self.judged.items()
            if name in other
        }

    @property
    def ratio(self) -> float:
        """The ratio of the worst array."""
        return max((one.ratio for one in self.judged.values()), default=0.0)

    @property
    def rank(self) -> tuple[bool, float]:
        """Larger for a worse answer: a local error is wrong whatever its ratio."""
        return self.place is not None, self.ratio

    @property
    def place(self) -> Judged | None:
        """The first array with a local error, whatever its size; None if there is none."""
        return next((one for one in self.judged.values() if one.place is not None), None)

    @property
    def status(self) -> str:
        """correct, imprecise, wrong or inconclusive."""
        if self.question.actual is None or self.unknown:
            return "inconclusive"
        if self.place is not None:
            return "wrong"
        shows = any(name in FIELDS or is_gradient(name) for name in self.judged)
        return status_of(self.ratio, is_weak=self.power.is_weak or self.ended_early or not shows)


def compare_question(
    question: Question, backend: Backend, check: Check = no_check, truth: Truth | None = None
) -> Comparison:
    """Judge what a kernel returned, and what another did. backend: computes the reference; check: raises to end it all

    truth: of the question, None to compute it

    Errors: InvalidRequest of every kind, and what `check` raises.
    """
    end = None if question.time_limit is None else time.monotonic() + question.time_limit
    found = _compared(question, backend, check, end, truth)
    if question.against is None:
        return found
    other = replace(question, actual=question.against, against=None, field="against")
    return replace(found, against=_compared(other, backend, check, end))


@np.errstate(all="ignore")
def _compared(
    question: Question, backend: Backend, check: Check, end: float | None, given: Truth | None = None
) -> Comparison:
    """The comparison of one answer. end: of its time, see `limited`; given: its truth; others: of compare_question"""
    if unknown := unknown_options(question.plan):
        spec = question.spec._replace(backend="numpy", device="cpu", include=(), top_k=None, average_heads=False)
        metadata = backend.run(make_plan(spec), spec, spec.sources, check).metadata
        tolerances = usual_tolerances(question.plan.dtype)
        return Comparison(question, metadata, {}, {}, tolerances, [], [], no_power(tolerances), None, unknown)
    tolerances = usual_tolerances(question.plan.dtype) + (() if question.tolerance is None else (question.tolerance,))
    truth = given
    if truth is None and not question.has_gradients_alone:
        truth = reference_and_baseline(question.forward, backend, check)
    gradients = None
    if question.gradients is not None:
        sent = read_gradients(question.actual or {}, question.gradients, question.field)
        gradients = gradient_truth(question.gradients, sent, backend, check)
    found = Comparison(question, None, {}, {}, tolerances, [], [], no_power(tolerances), None)
    learned, of_gradients = Learned(no_power(tolerances)), Learned(no_power(()))
    judged = {} if gradients is None else judge_gradients(gradients)
    is_complete, in_time = False, limited(check, end)
    with suppress(TimeIsUp):
        if truth is not None:
            timed = replace(truth, case=replace(truth.case, check=in_time))
            learn(learned, outputs_of(timed, _inputs), in_time, tolerances, suggests=question.suggests)
        if gradients is not None:
            forward = make_case(question.spec, question.plan.dtype, check) if truth is None else truth.case
            forward, timed_case = replace(forward, pool=pool_of(backend)), replace(gradients.case, check=in_time)
            outputs = () if truth is None else tuple(truth.judged.values())
            of = replace(gradients, case=timed_case)
            learn(of_gradients, GradientSubject.of(of, judged, forward, backend, outputs), in_time)
        is_complete = True
    if truth is not None:
        found = _with_outputs(found, truth, learned)
    if gradients is not None:
        found = _with_gradients(found, gradients, judged, of_gradients)
    return replace(found, ended_early=not is_complete, truth=given)


def _with_outputs(found: Comparison, truth: Truth, learned: Learned) -> Comparison:
    """A comparison with what there is to say of outputs."""
    actual, reference = truth.actual, truth.reference
    return replace(
        found,
        metadata=reference.metadata,
        judged=truth.judged,
        passes={
            one.name: all(one.passes(array, reference[name]) for name, array in actual.as_sent.items())
            for one in found.tolerances
            if actual.as_sent
        },
        where=_where(truth),
        hypotheses=learned.hypotheses,
        power=learned.power,
        suggestion=learned.suggestion,
        reference={name: reference[name] for name in actual.as_sent or (OUTPUT,)},
        facts=learned.facts,
    )


def _with_gradients(
    found: Comparison, truth: GradientTruth, judged: Mapping[str, Judged], learned: Learned
) -> Comparison:
    """A comparison with what there is to say of gradients, too. Mistakes of an output that is wrong stand first."""
    right = truth.case.right
    is_wrong = any(one.ratio > CORRECT for one in found.judged.values())
    passes = {
        one.name: found.passes.get(one.name, True)
        and all(one.passes(sent, right[name]) for name, sent in truth.sent.items())
        for one in found.tolerances
        if truth.sent
    }
    power, more = found.power, learned.power
    return replace(
        found,
        metadata=found.metadata or truth.metadata,
        judged={**found.judged, **judged},
        passes=passes or found.passes,
        where=found.where or where_gradients(truth, judged),
        hypotheses=found.hypotheses if is_wrong else learned.hypotheses,
        power=replace(
            power,
            killed=power.killed + more.killed,
            survivors=power.survivors + more.survivors,
            indistinguishable=power.indistinguishable + more.indistinguishable,
        ),
        suggestion=found.suggestion if is_wrong else learned.suggestion or found.suggestion,
        reference={**found.reference, **{name: right[name] for name in truth.sent}},
        facts=found.facts + (() if is_wrong else learned.facts),
    )


def _where(truth: Truth) -> list[Place]:
    """The places of the first array that is wrong."""
    for name in names_of_wrong(truth):
        both, judged = (truth.actual.as_sent[name], truth.reference[name]), truth.judged[name]
        sent, right = (canonical(array, name, truth.plan) for array in both)
        found = places(name, sent, right, judged.element_limits, axes_of(name, truth.plan))
        for whole in found[:1]:  # none where errors are too large in the mean only
            whole.axes = list(axes_of(name, truth.plan, as_sent=True))
            whole.worst = worst(*both)
        return found
    return []


def _inputs(
    case: Case, wanted: Collection[str], names: Collection[str], check: Check, apart: bool
) -> Iterator[Suggestion]:
    """Inputs that show some mistakes of outputs. Arguments: as of `suggestions`"""
    return suggestions(recipe_of(case, wanted), wanted, names, 0, check, case.pool, apart=apart)
