"""Gradients as a subject: which mistakes of a backward pass explain them, and which a request can show."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Final

import numpy as np

from attention_service.attention.planning import make_plan
from attention_service.attention.result import Metadata
from attention_service.attention.spec import AttentionSpec
from attention_service.attention.terms import FIELDS as TERM_FIELDS
from attention_service.backends.base import Backend, Check
from attention_service.comparison.case import INEXPRESSIBLE, Case
from attention_service.comparison.engine.candidate import Candidate
from attention_service.comparison.engine.subject import Judgement, S, Subject, T
from attention_service.comparison.engine.suggestion import Suggestion
from attention_service.comparison.errors import distances
from attention_service.comparison.gradients.case import GradientCase, Gradients, changed_spec, make_case, names_in
from attention_service.comparison.gradients.judge import GradientTruth, judge_gradients, where_gradients
from attention_service.comparison.gradients.mutants import GRADIENT_MUTANTS
from attention_service.comparison.gradients.mutants.table import Recomputed, Variant, is_softmax
from attention_service.comparison.gradients.suggestion import gradients_of, suggestions
from attention_service.comparison.judged import Judged
from attention_service.comparison.mutants import MUTANTS
from attention_service.comparison.rules import CORRECT, is_ten_times_closer
from attention_service.comparison.tolerances import Tolerance
from attention_service.comparison.wrong import BITS, LISTED, bits_of
from attention_service.errors import InvalidRequest
from attention_service.schemas.compare import Fact, Place

# Numbers of each gradient that mistakes are held against to say how much they explain, and which are the same.
SAMPLED: Final = 2**14
# The share of rows whose relative limits are smaller than that of a wrong row.
TYPICAL: Final = 0.9
# Errors count in units of their limits, but not of limits that are smaller than this part of the largest of the array:
# where 0 is right, the limit is next to 0, and one such error would hide all others.
LEAST_UNIT: Final = 1e-3
# Fields that change scores alone: operands, heads and what is done to outputs stay as they are.
OF_SCORES: Final = TERM_FIELDS | {"query_offset", "scale", "softcap"}
# A mistake by name, its gradients, and the wrong case that its message and change are those of.
Named = tuple[str, Variant, Case]


@dataclass(frozen=True, eq=False)
class GradientCandidate(Candidate[Case]):
    """A mistake and its gradients, at sampled places in units of their limits.

    Of all numbers: apart, the distance of what was sent, in baselines of the mistake; is_closer: True if a wrong
    gradient is ten times closer to that of the mistake than to the right one; is_killed: True if it is not right
    """

    apart: float = 0.0
    is_closer: bool = False
    is_killed: bool = False


@dataclass(frozen=True, eq=False)
class GradientSubject(Subject[Case]):
    """Gradients that a kernel returned, at sampled places in units of their limits.

    truth: of all numbers; forward: the case of the forward pass; backend: computes the references of made inputs
    outputs: what was sent beside the gradients, judged
    places, units: of the sample, by gradient: indices, and the limit of each number
    growth: by gradient that was sent, the limits of most rows in parts of their largest number; 0 if there is none
    """

    truth: GradientTruth
    forward: Case
    backend: Backend
    outputs: Collection[Judged]
    places: Mapping[str, np.ndarray]
    units: Gradients
    growth: Mapping[str, float]

    @classmethod
    def of(
        cls,
        truth: GradientTruth,
        judged: Mapping[str, Judged],
        forward: Case,
        backend: Backend,
        outputs: Collection[Judged],
    ) -> GradientSubject:
        """The gradients that were sent, at some places. judged: each of them"""
        places = {name: _sampled(truth, name) for name in truth.case.names}
        limits = {name: truth.limits.limits[name] for name in places}
        units = {
            name: np.maximum(limits[name].ravel()[at], LEAST_UNIT * limits[name].max(initial=0.0))
            for name, at in places.items()
        }

        def sample(arrays: Gradients) -> dict[str, np.ndarray]:
            return {name: arrays[name].ravel()[at] / units[name] for name, at in places.items() if name in arrays}

        return cls(
            sample(truth.sent),
            sample(truth.case.right),
            dict.fromkeys(places, 1.0),
            frozenset(name for name, one in judged.items() if one.ratio > CORRECT),
            truth,
            forward,
            backend,
            outputs,
            places,
            units,
            {name: _growth(truth, name) for name in truth.sent},
        )

    def each(self, function: Callable[[S], T], parts: Iterable[S]) -> Iterator[T]:
        """The results of a function for each part, in order, by the threads of the forward case."""
        return self.forward.each(function, parts)

    def candidates(self, check: Check) -> Iterator[Candidate[Case]]:
        """Mistakes of the backward pass, then those of the forward pass that may explain what is wrong.

        An output that is wrong explains more. One that is right was computed without a mistake.
        """
        known = list(self.each(self._answer, _named(self.forward, _variants(self.truth))))
        yield from known
        is_output_wrong = any(one.ratio > CORRECT for one in self.outputs)
        is_proved = self.outputs and any(self.judge(one).is_proof for one in known)
        if self.wrong and not (is_output_wrong or is_proved):
            yield from self.each(self._answer, _of_forward(self.truth, self.forward))

    def estimated(self, check: Check) -> Iterator[Candidate[Case]]:
        """Mistakes of scores that a backward pass makes alone, and of masks that some tokens estimate.

        None if facts say all that is wrong.
        """
        if all(self._facts.values()):
            return
        yield from self.each(self._answer, _recomputed(self.truth, self.forward))
        from attention_service.comparison.gradients.estimates import estimated  # when needed, as in facts_of

        yield from self.each(self._answer, _named(self.forward, estimated(self.truth, self._arrays)))

    def facts(self) -> tuple[Fact, ...]:
        """What is true of the wrong gradients."""
        return tuple(itertools.chain(*self._facts.values()))[:LISTED]

    @cached_property
    def _arrays(self) -> list[Any]:
        from attention_service.comparison.gradients.facts import wrong_gradients

        return wrong_gradients(self.truth, self.wrong_names, self.forward)

    @cached_property
    def _facts(self) -> Mapping[str, list[Fact]]:
        """What is true of each wrong gradient."""
        from attention_service.comparison.gradients.facts import facts_of_gradients

        return facts_of_gradients(self.truth, self._arrays)

    def suggestions(self, names: Collection[str], check: Check, *, apart: bool) -> Iterator[Suggestion]:
        """Inputs with random cotangents that show some mistakes of the backward pass."""
        wanted = [name for name in names if name in GRADIENT_MUTANTS]
        return suggestions(self.truth, self.forward, wanted, self.backend, check)

    def contradicts(self, candidate: Candidate[Case]) -> bool:
        """False: a mistake that would change a gradient that is right was made for the wrong ones alone."""
        return False

    def misses(self, candidate: Candidate[Case], tolerance: Tolerance) -> bool:
        """False: tests with a tolerance take numbers, not units of their limits."""
        return False

    def alive(self, candidates: list[Candidate[Case]], check: Check) -> list[Candidate[Case]]:
        """The mistakes that no gradient shows."""
        return [one for one in candidates if isinstance(one, GradientCandidate) and not one.is_killed]

    def ratio(self, candidate: Candidate[Case]) -> float:
        """The largest distance of what was sent to the gradients of a mistake, in baselines of the mistake."""
        assert isinstance(candidate, GradientCandidate)
        return candidate.apart

    def is_closer(self, candidate: Candidate[Case]) -> bool:
        """True if a wrong gradient is ten times closer to that of the mistake than to the right one."""
        return isinstance(candidate, GradientCandidate) and candidate.is_closer

    def can_prove(self, candidate: Candidate[Case], apart: float) -> bool:
        """False for one query and one key, or numbers so few, or so little wrong, that a mistake fits them by chance.

        What is 0 everywhere is seen, not fitted.
        """
        sizes = self.truth.case.plan.sizes
        return self._is_telling and (sizes.key_length > 1 or sizes.query_length > 1)

    @cached_property
    def _is_telling(self) -> bool:
        sent = {name: self.actual[name] for name in self.wrong_names}
        if not any(array.any() for array in sent.values()):
            return True
        limits = {name: self.truth.limits.limits[name].ravel()[self.places[name]] for name in sent}
        errors = (distances(array, self.right[name]) * self.units[name] / limits[name] for name, array in sent.items())
        return sum(float(bits_of(one).sum()) for one in errors) >= BITS

    def restricted(self, candidate: Candidate[Case], part: tuple[str, ...]) -> Candidate[Case]:
        """A mistake that was made for some of the wrong gradients alone."""
        all_wrong = f"{_in_words(self.wrong_names)} only"
        detail = candidate.case.detail.removesuffix(all_wrong).removesuffix(", ")
        case = replace(candidate.case, detail=detail).changed(INEXPRESSIBLE, detail=f"{_in_words(part)} only")
        return super().restricted(replace(candidate, case=case), part)

    def _answer(self, named: Named) -> Candidate[Case]:
        """A mistake beside what was sent, and beside what is right.

        A kernel computes the gradient of the query, and another one those of key and value: if a mistake explains the
        wrong gradients, but not those that are right, it was made for the wrong ones alone.
        """
        truth = self.truth
        truth.case.check()
        name, variant, case = named
        right, row = truth.case.right, GRADIENT_MUTANTS.get(name)
        wrong = self.wrong_names
        with np.errstate(all="ignore"):
            made = gradients_of(truth, variant)
            is_killed = truth.apart(made, right) > CORRECT
            apart = {sent: self._own_ratio(sent, made[sent]) for sent in truth.sent}
            is_part = any(apart[sent] > CORRECT for sent in truth.sent if sent not in self.wrong)
            is_part |= row is None and bool(self.outputs)
            if is_part and row is not None and row.of_all:
                made, apart = dict(right), dict.fromkeys(apart, math.inf)
            elif is_part:
                made = {**made, **{sent: right[sent] for sent in truth.sent if sent not in self.wrong}}
                case = case.changed(INEXPRESSIBLE, detail=f"{_in_words(wrong)} only")
            return GradientCandidate(
                (name,),
                case,
                {one: made[one].ravel()[at] / self.units[one] for one, at in self.places.items()},
                MUTANTS[name].message if row is None else row.message,
                is_restricted=is_part,
                in_power=row is not None and row.in_power,
                apart=max((apart[sent] for sent in wrong), default=0.0),
                is_closer=any(_is_closer(truth, sent, made[sent]) for sent in wrong),
                is_killed=is_killed,
            )

    def _own_ratio(self, name: str, made: np.ndarray) -> float:
        """The distance of a gradient that was sent to that of a mistake, in baselines of the mistake.

        These are larger in rows that are larger, as those of most right rows are.
        """
        limits, growth = self.truth.limits.limits[name], self.growth[name]
        limits = np.maximum(limits, growth * _largest_of_rows(made)) if growth else limits
        apart = distances(self.truth.sent[name], made)
        apart /= limits
        return float(apart.max(initial=0.0))


@dataclass(frozen=True, eq=False)
class JudgedGradients(Judgement):
    """Gradients, judged. truth, forward, backend, outputs: see GradientSubject"""

    truth: GradientTruth
    forward: Case
    backend: Backend
    outputs: Collection[Judged]

    @property
    def metadata(self) -> Metadata:
        """What the service says of the request."""
        return self.truth.metadata

    @cached_property
    def judged(self) -> Mapping[str, Judged]:
        """The errors of each gradient that was sent, by name."""
        return judge_gradients(self.truth)

    @property
    def reference(self) -> dict[str, np.ndarray]:
        """What is right for the gradients that were sent."""
        return {name: self.truth.case.right[name] for name in self.truth.sent}

    def passes(self, tolerance: Tolerance) -> bool:
        """True if what was sent passes a test with a tolerance."""
        return tolerance.passes_all(self.truth.sent, self.truth.case.right)

    def where(self) -> list[Place]:
        """Where the first gradient is wrong that is."""
        return where_gradients(self.truth, self.judged)

    def subject(self, check: Check) -> GradientSubject:
        """A sample of the numbers that are most wrong, and of others."""
        truth = replace(self.truth, case=replace(self.truth.case, check=check))
        return GradientSubject.of(truth, self.judged, self.forward, self.backend, self.outputs)


def _sampled(truth: GradientTruth, name: str) -> np.ndarray:
    """The places of a gradient that mistakes are held against: all, or some at random and those that are most wrong."""
    size = truth.case.right[name].size
    if size <= SAMPLED:
        return np.arange(size)
    chosen = np.random.default_rng(0).choice(size, SAMPLED, replace=False)
    if name in truth.sent:
        apart = distances(truth.sent[name], truth.case.right[name]) / truth.limits.limits[name]
        chosen[: SAMPLED // 2] = np.argpartition(apart.ravel(), -(SAMPLED // 2))[-(SAMPLED // 2) :]
    return np.unique(chosen)


def _variants(truth: GradientTruth) -> Iterator[tuple[str, Variant]]:
    """All forms of the mistakes of backward passes that power counts, by name."""
    for row in (row for row in GRADIENT_MUTANTS.values() if row.in_power):
        yield from ((row.name, variant) for variant in row.edit(truth.case))


def _named(forward: Case, variants: Iterable[tuple[str, Variant]]) -> Iterator[Named]:
    """Forms of mistakes of backward passes, which no field of a request can say."""
    return ((name, variant, forward.changed(INEXPRESSIBLE, detail=variant.detail)) for name, variant in variants)


def _of_forward(truth: GradientTruth, forward: Case) -> Iterator[Named]:
    """The mistakes of the forward pass that another request says, differentiated as that request is."""
    for name, spec, wrong in _changed(truth, forward):
        yield name, Variant(partial(_differentiated, truth.case, spec), wrong.detail), wrong


def _recomputed(truth: GradientTruth, forward: Case) -> Iterator[Named]:
    """The mistakes of scores that a backward pass makes when it computes weights again, from the right logsumexp."""
    case = truth.case
    for name, spec, wrong in _changed(truth, forward) if is_softmax(case) else ():
        change = wrong.change or {}
        if change.keys() <= OF_SCORES and names_in(case.names, spec):
            only = wrong.changed(INEXPRESSIBLE, detail="in the backward pass only")
            yield name, Variant(partial(_run_again, case, spec), only.detail), only


def _run_again(case: GradientCase, spec: AttentionSpec) -> Gradients:
    """The gradients of a backward pass of another request, from the right logsumexp; none if it is no valid one."""
    try:
        other = replace(case, spec=spec, plan=make_plan(spec), names=names_in(case.names, spec))
        return other.run(partial(Recomputed, case=case))
    except InvalidRequest:
        return {}


def _changed(truth: GradientTruth, forward: Case) -> Iterator[tuple[str, AttentionSpec, Case]]:
    """The mistakes of the forward pass that another request says: their names, requests and cases."""
    done = set()
    for row in MUTANTS.values():
        for wrong in row.edit(forward):
            spec = changed_spec(truth.case.spec, wrong.change)
            if spec is not None and repr(wrong.change) not in done:
                done.add(repr(wrong.change))
                yield row.name, spec, wrong


def _differentiated(case: GradientCase, spec: AttentionSpec) -> Gradients:
    """The gradients of another request; none if it is no valid one."""
    try:
        return make_case(spec, np.dtype(np.float64), names_in(case.names, spec), case.check).right
    except InvalidRequest:
        return {}


def _is_closer(truth: GradientTruth, name: str, made: np.ndarray) -> bool:
    """True if a gradient that was sent is ten times closer to that of a mistake than to the right one.

    One that is 0 everywhere must be exactly 0.
    """
    sent = truth.sent[name]
    if not np.isfinite(sent).any() or (sent.any() and not made.any()):
        return False
    return is_ten_times_closer(truth.ratio(name, sent, made), truth.ratio(name, sent, truth.case.right[name]))


def _in_words(names: Collection[str]) -> str:
    """Gradients in words: "dk and dv" """
    known = {"grad_query": "dq", "grad_key": "dk", "grad_value": "dv"}
    words = [known.get(name, name) for name in names]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _growth(truth: GradientTruth, name: str) -> float:
    """The limits of most rows of a gradient in parts of their largest right number; 0 if there is none."""
    right, limits = truth.case.right[name], truth.limits.limits[name]
    if not right.ndim:
        return 0.0
    least, most = (_largest_of_rows(array) for array in (right, limits))
    relative = most[least > most] / least[least > most]  # of what is more than rounding leaves
    return float(np.quantile(relative, TYPICAL)) if relative.size else 0.0


def _largest_of_rows(array: np.ndarray) -> np.ndarray:
    sizes = np.abs(array)
    found: np.ndarray = np.max(sizes, axis=-1, keepdims=True, initial=0.0)
    is_whole = math.isfinite(found.max(initial=0.0))
    return found if is_whole else np.max(sizes, axis=-1, keepdims=True, where=np.isfinite(sizes), initial=0.0)
