"""The comparison of what a kernel returned with the reference."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import numpy as np

from attention_service.attention.operands import as_cast
from attention_service.attention.outputs import OUTPUT
from attention_service.attention.plan import Plan
from attention_service.attention.planning import make_plan
from attention_service.attention.result import Metadata, Result
from attention_service.attention.spec import AttentionSpec
from attention_service.backends.base import Backend, Check, no_check
from attention_service.backends.threads import TilePool
from attention_service.comparison.actual import Actual, axes_of, canonical, read_actual
from attention_service.comparison.baseline import (
    CORRECT,
    FIELDS,
    IMPRECISE,
    arrays_of,
    limit,
    rounded_cases,
    stored_dtype,
)
from attention_service.comparison.candidates import candidates
from attention_service.comparison.case import Case, make_case, unknown_options
from attention_service.comparison.errors import distance, distances, epsilon, largest, measure
from attention_service.comparison.evidence import Evidence, Hypothesis
from attention_service.comparison.facts import find_facts
from attention_service.comparison.floors import floors, floors_of_others
from attention_service.comparison.inputs import Suggestion, suggest
from attention_service.comparison.legal import LIBERTIES
from attention_service.comparison.places import places, worst
from attention_service.comparison.power import Known, Power, no_power, power
from attention_service.comparison.recipes import recipe_of
from attention_service.comparison.sample import MAX_THREADS, Sample, blocks, everything
from attention_service.comparison.samples import choose_sample, most_scores
from attention_service.comparison.search import search
from attention_service.comparison.solve import solve
from attention_service.comparison.time_limit import TimeIsUp, limited
from attention_service.comparison.tolerances import Tolerance, usual_tolerances
from attention_service.comparison.wrong import Wrong
from attention_service.schemas.compare import ArrayErrors, Fact, Place

HEAD_OUTPUTS: Final = "head_outputs"


@dataclass(frozen=True)
class Question:
    """A request, and what a kernel returned for it.

    actual: arrays by name; None to ask for the power of the request only
    base2:  True if the logsumexp has base 2; tolerance: of the caller's own test
    liberties: what right kernels of half types may do, see `legal`
    against: what another kernel returned for the same request; None for no other
    field: that `actual` came in
    reference: True if the report shall have the reference
    time_limit: seconds after which the search for mistakes ends; None for no limit
    """

    spec: AttentionSpec
    plan: Plan
    actual: Mapping[str, np.ndarray] | None = None
    base2: bool = False
    tolerance: Tolerance | None = None
    liberties: frozenset[str] = LIBERTIES
    reference: bool = False
    against: Mapping[str, np.ndarray] | None = None
    time_limit: float | None = None
    field: str = "actual"


@dataclass(frozen=True)
class Judged:
    """One array that was sent: its errors, those of the worst legal rounding, and the baseline of its largest error."""

    errors: ArrayErrors
    baseline: ArrayErrors
    limit: float

    @property
    def ratio(self) -> float:
        """The largest error, in baselines; inf if the array is infinite or NaN where it should not be."""
        if self.errors.non_finite:
            return math.inf
        return (self.errors.max_abs or 0.0) / self.limit


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
    def status(self) -> str:
        """correct, imprecise, wrong or inconclusive."""
        if self.question.actual is None or self.unknown:
            return "inconclusive"
        shows = any(name in FIELDS for name in self.judged)
        return status_of(self.ratio, is_weak=self.power.is_weak or self.ended_early or not shows)


def status_of(ratio: float, *, is_weak: bool) -> str:
    """The status of an output by its ratio, and by whether too little of it could have been wrong to tell."""
    if ratio > IMPRECISE:
        return "wrong"
    if ratio > CORRECT:
        return "imprecise"
    return "inconclusive" if is_weak else "correct"


@dataclass(frozen=True)
class Truth:
    """What is right for a question: the reference, and what was sent beside it.

    plan: of the reference; right: the arrays that mutants change, canonical; judged: each array that was sent, by its
    name
    """

    plan: Plan
    reference: Result
    case: Case
    actual: Actual
    right: Mapping[str, np.ndarray]
    judged: Mapping[str, Judged]


@np.errstate(all="ignore")
def reference_and_baseline(question: Question, backend: Backend, check: Check = no_check) -> Truth:
    """The reference of a question, and the baselines of all that was sent. Arguments: as of compare_question"""
    dtype, backend = question.plan.dtype, backend.cut_for(MAX_THREADS)
    spec = as_cast(question.spec, dtype)
    include = tuple({name: None for name in question.actual or () if name != OUTPUT} | {HEAD_OUTPUTS: None})
    exact = spec._replace(dtype="float64", backend="numpy", device="cpu", include=include, top_k=None)  # type: ignore[arg-type]  # names of arrays
    exact = exact._replace(allow_non_finite=True)
    plan = make_plan(exact)
    actual = Actual({}, {})
    if question.actual is not None:
        actual = read_actual(question.actual, plan, base2=question.base2, field=question.field)
    reference = backend.run(plan, exact, exact.sources, check)
    case = replace(make_case(spec, dtype, check, question.liberties), pool=pool_of(backend))
    if HEAD_OUTPUTS in reference.arrays:
        case = replace(case, head_outputs=canonical(reference[HEAD_OUTPUTS], HEAD_OUTPUTS, plan))
    right = {name: canonical(reference[name], name, plan) for name in actual.canonical}
    judged = _judged_by_rounding(case, actual, right, check)
    others = [name for name in actual.as_sent if name not in actual.canonical]
    judged |= _judged_by_service(case, exact, others, actual, reference.arrays, backend, check)
    return Truth(plan, reference, case, actual, right, {name: judged[name] for name in actual.as_sent})


def pool_of(backend: Backend) -> TilePool | None:
    """The threads of a backend that a comparison uses: what each computes takes memory."""
    return None if backend.pool is None else backend.pool.at_most(MAX_THREADS)


def compare_question(question: Question, backend: Backend, check: Check = no_check) -> Comparison:
    """Judge what a kernel returned, and what another did. backend: computes the reference; check: raises to end it all

    Errors: InvalidRequest of every kind, and what `check` raises.
    """
    end = None if question.time_limit is None else time.monotonic() + question.time_limit
    found = _compared(question, backend, check, end)
    if question.against is None:
        return found
    other = replace(question, actual=question.against, against=None, field="against")
    return replace(found, against=_compared(other, backend, check, end))


@np.errstate(all="ignore")
def _compared(question: Question, backend: Backend, check: Check, end: float | None) -> Comparison:
    """The comparison of one answer. end: of its time, see `limited`; other arguments: as of compare_question"""
    if unknown := unknown_options(question.plan):
        spec = question.spec._replace(backend="numpy", device="cpu", include=(), top_k=None, average_heads=False)
        metadata = backend.run(make_plan(spec), spec, spec.sources, check).metadata
        tolerances = usual_tolerances(question.plan.dtype)
        return Comparison(question, metadata, {}, {}, tolerances, [], [], no_power(tolerances), None, unknown)
    truth = reference_and_baseline(question, backend, check)
    actual, judged, reference = truth.actual, truth.judged, truth.reference
    tolerances = usual_tolerances(truth.case.dtype) + (() if question.tolerance is None else (question.tolerance,))
    learned = Learned(no_power(tolerances))
    with suppress(TimeIsUp):
        learn(learned, truth, tolerances, limited(check, end))
    return Comparison(
        question=question,
        metadata=reference.metadata,
        judged=judged,
        passes={
            one.name: all(one.passes(array, reference[name]) for name, array in actual.as_sent.items())
            for one in tolerances
            if actual.as_sent
        },
        tolerances=tolerances,
        where=_where(truth),
        hypotheses=learned.hypotheses,
        power=learned.power,
        suggestion=learned.suggestion,
        reference={name: reference[name] for name in actual.as_sent or (OUTPUT,)},
        facts=learned.facts,
        ended_early=not learned.is_complete,
    )


@dataclass
class Learned:
    """What the search for mistakes has found so far."""

    power: Power
    hypotheses: list[Hypothesis] = field(default_factory=list)
    facts: tuple[Fact, ...] = ()
    suggestion: Suggestion | None = None
    is_complete: bool = False


def learn(learned: Learned, truth: Truth, tolerances: tuple[Tolerance, ...], check: Check) -> None:
    """Search for the mistakes that explain what is wrong, then for those that the request can show, step by step."""
    truth = replace(truth, case=replace(truth.case, check=check))
    case, actual, right = truth.case, truth.actual, truth.right
    compared = tuple(actual.canonical) or (OUTPUT,)
    wrong = frozenset(name for name in actual.canonical if truth.judged[name].ratio > CORRECT)
    sample = choose_sample(case, _wrong_rows(actual, right, wrong) if wrong else None, most_scores(compared))
    evidence = Evidence.of(case, sample, actual.canonical or None, compared, wrong)
    mutants = list(candidates(case, sample, evidence.right, check))
    limits = {name: truth.judged[name].limit for name in actual.canonical}
    if wrong:
        for hypotheses in search(evidence, mutants, actual.canonical, limits, check):
            learned.hypotheses = hypotheses
    if not any(one.is_proof for one in learned.hypotheses):
        learned.facts = facts_of(truth)
    learned.power = power(evidence, mutants, check, tolerances, Known(right, limits) if right else None)
    mutants.clear()  # the next input takes as much memory as they do
    sample.forget()
    learned.suggestion = _suggestion(case, learned.hypotheses, learned.power, compared, check)
    learned.is_complete = True


def facts_of(truth: Truth) -> tuple[Fact, ...]:
    """The facts about all arrays that are wrong."""
    return tuple(find_facts([_wrong(truth, name) for name in _names_of_wrong(truth)]))


def _wrong(truth: Truth, name: str) -> Wrong:
    """A wrong array; its rows are those of the case if mutants change it."""
    sent, right = (canonical(of[name], name, truth.plan) for of in (truth.actual.as_sent, truth.reference.arrays))
    case = truth.case
    has_rows = name in truth.right and right.shape[:3] == case.query.shape[:3] and not case.needs_all_heads
    shape = (*right.shape[:3], -1)
    limit = CORRECT * truth.judged[name].limit
    return Wrong(name, axes_of(name, truth.plan), sent.reshape(shape), right.reshape(shape), limit, case, has_rows)


def _names_of_wrong(truth: Truth) -> list[str]:
    """The names of the arrays that are wrong, those first that mutants change."""
    return [name for name in {**truth.right, **truth.judged} if truth.judged[name].ratio > CORRECT]


def _judged_by_rounding(case: Case, actual: Actual, right: Mapping[str, np.ndarray], check: Check) -> dict[str, Judged]:
    """Output, logsumexp and weights, beside the worst of the legal roundings of a kernel."""
    if not right:
        return {}
    kept = {name: stored_dtype(name, case.dtype) for name in right}
    variants = rounded_cases(case, case.dtype)
    results = [{name: np.empty(array.shape, kept[name]) for name, array in right.items()} for _ in variants]
    least = dict.fromkeys(right, 0.0)

    def rounded_block(block: Sample) -> dict[str, float]:
        check()
        here = {name: block.of(array) for name, array in right.items()}
        for variant, arrays in zip(variants, results, strict=True):
            for name, array in arrays_of(solve(variant, block), right).items():
                block.put(arrays[name], array)
        found = floors(case, variants[0], block, here)
        block.forget()
        return found

    for found in case.each(rounded_block, blocks(case, everything(case), right)):
        least.update({name: max(least[name], floor) for name, floor in found.items()})
    judged = {}
    for name, array in right.items():
        stored = kept[name]
        check()
        rounded = [arrays.pop(name) for arrays in results]
        apart = list(case.each(partial(_distance, array), rounded))
        worst = rounded[apart.index(max(apart))]
        del rounded
        both = (worst, actual.canonical[name])
        baseline, errors = case.each(partial(measure, reference=array, dtype=stored), both)
        judged[name] = Judged(errors, baseline, limit(baseline.max_abs or 0.0, least[name], array, stored))
    return judged


def _distance(one: np.ndarray, other: np.ndarray) -> float:
    """The largest difference of two arrays; -1 if it is not finite."""
    found = distance(one, other)
    return found if math.isfinite(found) else -1.0


def _judged_by_service(
    case: Case,
    exact: AttentionSpec,
    names: list[str],
    actual: Actual,
    reference: Mapping[str, np.ndarray],
    backend: Backend,
    check: Check,
) -> dict[str, Judged]:
    """Other arrays, beside those that the service computes in the type of the request."""
    if not names:
        return {}
    same = exact._replace(dtype=case.dtype.name, include=tuple(names))  # type: ignore[arg-type]  # names of arrays
    plain = backend.run(make_plan(same), same, same.sources, check)
    judged, least = {}, floors_of_others(case, reference, names)
    for name in names:
        array = reference[name]
        stored = plain[name].dtype
        baseline = measure(plain[name], array, stored)
        floor = max(least[name], epsilon(stored) / 4 * (1 + largest(array)))
        most = limit(baseline.max_abs or 0.0, floor, array, stored)
        judged[name] = Judged(measure(actual.as_sent[name], array, stored), baseline, most)
    return judged


def _wrong_rows(actual: Actual, right: Mapping[str, np.ndarray], names: frozenset[str]) -> np.ndarray:
    """The largest error of each row (b, h, q), of the first array that is wrong."""
    name = next(name for name in right if name in names)
    apart = distances(actual.canonical[name], right[name])
    wrong: np.ndarray = apart if apart.ndim == 3 else apart.max(axis=-1)
    return wrong


def _where(truth: Truth) -> list[Place]:
    """The places of the first array that is wrong."""
    for name in _names_of_wrong(truth):
        both = truth.actual.as_sent[name], truth.reference[name]
        sent, right = (canonical(array, name, truth.plan) for array in both)
        found = places(name, sent, right, CORRECT * truth.judged[name].limit, axes_of(name, truth.plan))
        found[0].axes = list(axes_of(name, truth.plan, as_sent=True))
        found[0].worst = worst(*both)
        return found
    return []


def _suggestion(
    case: Case, hypotheses: list[Hypothesis], found: Power, names: tuple[str, ...], check: Check
) -> Suggestion | None:
    """A request that shows the mistakes that are still possible."""
    is_known = bool(hypotheses) and hypotheses[0].is_proof
    if is_known and not hypotheses[0].also:
        return None
    wanted = (*hypotheses[0].candidate.names, *hypotheses[0].also) if is_known else found.survivors
    wanted = tuple(name for name in wanted if not name.startswith("precision."))
    return suggest(recipe_of(case, wanted), wanted, names, 0, check, case.pool, apart=is_known) if wanted else None
