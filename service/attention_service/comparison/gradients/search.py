"""The search for the mistakes of a backward pass that explain gradients, and for those that a request can show."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Final

import numpy as np

from attention_service.attention.spec import AttentionSpec
from attention_service.backends.base import Backend, Check
from attention_service.comparison.baseline import CORRECT
from attention_service.comparison.candidates import Candidate
from attention_service.comparison.candidates import ratio as apart
from attention_service.comparison.case import INEXPRESSIBLE, Case
from attention_service.comparison.errors import distances
from attention_service.comparison.evidence import PROOF, Hypothesis, explained_part
from attention_service.comparison.gradients.case import GradientCase, Gradients, changed_spec, make_case, names_in
from attention_service.comparison.gradients.judge import GradientTruth
from attention_service.comparison.gradients.mutants import GRADIENT_MUTANTS
from attention_service.comparison.gradients.mutants.table import Variant
from attention_service.comparison.gradients.suggestion import gradients_of, suggested
from attention_service.comparison.inputs import Suggestion
from attention_service.comparison.judged import Judged
from attention_service.comparison.mutants import MUTANTS
from attention_service.comparison.power import Power, groups
from attention_service.comparison.search import TOLD
from attention_service.comparison.wrong import BITS, LISTED, bits_of
from attention_service.errors import InvalidRequest
from attention_service.schemas.compare import Fact

# Numbers of each gradient that mistakes are held against to say how much they explain, and which are the same.
SAMPLED: Final = 2**14
# The share of rows whose relative limits are smaller than that of a wrong row.
TYPICAL: Final = 0.9
# Errors count in units of their limits, but not of limits that are smaller than this part of the largest of the array:
# where 0 is right, the limit is next to 0, and one such error would hide all others.
LEAST_UNIT: Final = 1e-3
# A number that is infinite or NaN in one of two arrays only counts as so many times the largest error.
NON_FINITE: Final = 10.0


@dataclass(frozen=True, eq=False)
class Evidence:
    """Gradients that a kernel returned, at sampled places, in units of their limits.

    places: by gradient, of the sample; wrong: the names of the gradients that are wrong, whose numbers are in `sent`
    right: all gradients; units: of the wrong ones, by how much an error counts, 1 or less
    growth: by gradient that was sent, the limits of most rows in parts of their largest number; 0 if there is none
    is_output_right: True if an output, a logsumexp or weights were sent, and all of these are right
    """

    places: Mapping[str, np.ndarray]
    wrong: tuple[str, ...]
    sent: Gradients
    right: Gradients
    units: Gradients
    growth: Mapping[str, float]
    is_output_right: bool

    @cached_property
    def most(self) -> Mapping[str, float]:
        """By wrong gradient, for how much an error counts that is no number."""
        errors = {name: distances(sent, self.right[name]) * self.units[name] for name, sent in self.sent.items()}
        return {name: NON_FINITE * float(np.max(of, where=np.isfinite(of), initial=1.0)) for name, of in errors.items()}

    @cached_property
    def can_prove(self) -> bool:
        """False if the wrong numbers are so few, or so little wrong, that one of many mistakes may fit them by chance.

        What is 0 everywhere is seen, not fitted.
        """
        if not any(array.any() for array in self.sent.values()):
            return True
        errors = (distances(array, self.right[name]) for name, array in self.sent.items())
        return sum(float(bits_of(one).sum()) for one in errors) >= BITS


@dataclass(frozen=True, eq=False)
class Answer:
    """A mistake and its gradients. arrays: of a sample, in baselines; killed: True if they differ from the right ones

    ratio: the distance of what was sent, in baselines of the mistake; is_proof: see Hypothesis
    is_part: True if the mistake was made for the wrong arrays alone: it would change others that are right
    """

    candidate: Candidate
    killed: bool
    ratio: float
    is_proof: bool
    is_part: bool


@dataclass
class Learned:
    """What the search for mistakes of a backward pass has found so far."""

    hypotheses: list[Hypothesis] = field(default_factory=list)
    facts: tuple[Fact, ...] = ()
    power: Power = field(default_factory=lambda: Power((), (), (), {}))
    suggestion: Suggestion | None = None


def learn_gradients(
    found: Learned,
    truth: GradientTruth,
    judged: Mapping[str, Judged],
    forward: Case,
    backend: Backend,
    check: Check,
    outputs: Collection[Judged],
) -> None:
    """Search for mistakes of the backward pass that explain what is wrong, and for those that the request can show.

    forward: the case of the forward pass; outputs: what was sent beside the gradients. Mistakes of the forward pass may
    explain the gradients, unless an output is wrong: then it explains more
    """
    truth = replace(truth, case=replace(truth.case, check=check))
    evidence = _evidence(truth, judged, is_output_right=bool(outputs))
    answer = partial(_answer, truth, evidence)
    answers = list(forward.each(answer, _named(forward, _variants(truth))))
    found.power = _power(answers)
    if evidence.wrong:
        is_output_wrong = any(one.ratio > CORRECT for one in outputs)
        if not is_output_wrong and not (outputs and any(one.is_proof for one in answers)):
            answers += forward.each(answer, _of_forward(truth, forward))
        facts: Mapping[str, list[Fact]] = {}
        if not any(one.is_proof for one in answers):
            from attention_service.comparison.gradients.estimates import estimated  # when needed, as in facts_of
            from attention_service.comparison.gradients.facts import facts_of_gradients, wrong_gradients

            arrays = wrong_gradients(truth, evidence.wrong, forward)
            facts = facts_of_gradients(truth, arrays)
            if not all(facts.values()):
                answers += forward.each(answer, _named(forward, estimated(truth, arrays)))
        found.hypotheses = _hypotheses(answers, evidence)
        if not any(one.is_proof for one in found.hypotheses):
            found.facts = tuple(itertools.chain(*facts.values()))[:LISTED]
    proofs = [one for one in found.hypotheses if one.is_proof]
    found.suggestion = suggested(truth, forward, proofs, found.power, backend, check)


def _evidence(truth: GradientTruth, judged: Mapping[str, Judged], *, is_output_right: bool) -> Evidence:
    """What was sent at sampled places. is_output_right: see Evidence"""
    wrong = tuple(name for name, one in judged.items() if one.ratio > CORRECT)
    places = {name: _sampled(truth, name) for name in truth.case.names}
    right = {name: truth.scaled(truth.case.right, name).ravel()[at] for name, at in places.items()}
    sent = {name: truth.scaled(truth.sent, name).ravel()[places[name]] for name in wrong}
    limits = {name: truth.limits.limits[name].ravel() for name in wrong}
    units = {
        name: of[places[name]] / np.maximum(of[places[name]], LEAST_UNIT * of.max()) for name, of in limits.items()
    }
    growth = {name: _growth(truth, name) for name in truth.sent}
    return Evidence(places, wrong, sent, right, units, growth, is_output_right)


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


# A mistake by name, its gradients, and the wrong case that its message and change are those of.
Named = tuple[str, Variant, Case]


def _variants(truth: GradientTruth) -> Iterator[tuple[str, Variant]]:
    """All forms of the mistakes of backward passes that power counts, by name."""
    for row in (row for row in GRADIENT_MUTANTS.values() if row.in_power):
        yield from ((row.name, variant) for variant in row.edit(truth.case))


def _named(forward: Case, variants: Iterable[tuple[str, Variant]]) -> Iterator[Named]:
    """Forms of mistakes of backward passes, which no field of a request can say."""
    return ((name, variant, forward.changed(INEXPRESSIBLE, detail=variant.detail)) for name, variant in variants)


def _of_forward(truth: GradientTruth, forward: Case) -> Iterator[Named]:
    """The mistakes of the forward pass that another request says, differentiated as that request is."""
    done = set()
    for row in MUTANTS.values():
        for wrong in row.edit(forward):
            spec = changed_spec(truth.case.spec, wrong.change)
            if spec is None or repr(wrong.change) in done:
                continue
            done.add(repr(wrong.change))
            yield row.name, Variant(partial(_differentiated, truth.case, spec), wrong.detail), wrong


def _differentiated(case: GradientCase, spec: AttentionSpec) -> Gradients:
    """The gradients of another request; none if it is no valid one."""
    try:
        return make_case(spec, np.dtype(np.float64), names_in(case.names, spec), case.check).right
    except InvalidRequest:
        return {}


def _answer(truth: GradientTruth, evidence: Evidence, named: Named) -> Answer:
    """A mistake beside what was sent, and beside what is right.

    A kernel computes the gradient of the query, and another one those of key and value: if a mistake explains the wrong
    gradients, but not those that are right, it was made for the wrong ones alone.
    """
    truth.case.check()
    name, variant, case = named
    right, is_of_forward = truth.case.right, name not in GRADIENT_MUTANTS
    with np.errstate(all="ignore"):
        made = gradients_of(truth, variant)
        killed = truth.apart(made, right) > CORRECT
        apart = {one: _own_ratio(truth, evidence.growth[one], one, made[one]) for one in truth.sent}
        is_part = any(apart[one] > CORRECT for one in truth.sent if one not in evidence.wrong)
        is_part |= is_of_forward and evidence.is_output_right
        if is_part:
            made = {**made, **{one: right[one] for one in truth.sent if one not in evidence.wrong}}
            case = case.changed(INEXPRESSIBLE, detail=f"{_in_words(evidence.wrong)} only")
        ratio = max((apart[one] for one in evidence.wrong), default=0.0)
        arrays = {one: truth.scaled(made, one).ravel()[at] for one, at in evidence.places.items()}
        is_closer = any(_is_closer(truth, one, made[one]) for one in evidence.wrong)
    sizes, row = truth.case.plan.sizes, GRADIENT_MUTANTS.get(name)
    did = None if row is None else row.message
    is_proof = ratio <= CORRECT and is_closer and evidence.can_prove
    is_proof &= sizes.key_length > 1 or sizes.query_length > 1
    return Answer(Candidate((name,), case, arrays, did), killed, ratio, is_proof, is_part)


def _own_ratio(truth: GradientTruth, growth: float, name: str, made: np.ndarray) -> float:
    """The distance of a gradient that was sent to that of a mistake, in baselines of the mistake.

    These are larger in rows that are larger, as those of most right rows are. growth: see Evidence
    """
    limits = truth.limits.limits[name]
    limits = np.maximum(limits, growth * _largest_of_rows(made)) if growth else limits
    apart = distances(truth.sent[name], made)
    apart /= limits
    return float(apart.max(initial=0.0))


def _is_closer(truth: GradientTruth, name: str, made: np.ndarray) -> bool:
    """True if a gradient that was sent is ten times closer to that of a mistake than to the right one.

    One that is 0 everywhere must be exactly 0.
    """
    sent = truth.sent[name]
    if not np.isfinite(sent).any() or (sent.any() and not made.any()):
        return False
    return truth.ratio(name, sent, made) * PROOF < truth.ratio(name, sent, truth.case.right[name])


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
    relative = most[least > 0] / least[least > 0]
    return float(np.quantile(relative, TYPICAL)) if relative.size else 0.0


def _largest_of_rows(array: np.ndarray) -> np.ndarray:
    sizes = np.abs(array)
    found: np.ndarray = np.max(sizes, axis=-1, keepdims=True, initial=0.0)
    is_whole = math.isfinite(found.max(initial=0.0))
    return found if is_whole else np.max(sizes, axis=-1, keepdims=True, where=np.isfinite(sizes), initial=0.0)


def _hypotheses(answers: list[Answer], evidence: Evidence) -> list[Hypothesis]:
    """The mistakes that explain what is wrong, best first; a proof stands alone.

    Those of all arrays come before those of the wrong ones alone, which must explain almost all.
    """
    ones = dict.fromkeys(evidence.right, 1.0)
    judged: list[tuple[bool, Hypothesis]] = []
    with np.errstate(all="ignore"):
        # What makes all numbers small explains the error of small ones, but not what was sent.
        zeros = {name: np.zeros(array.shape) for name, array in evidence.sent.items()}
        of_right, of_sent = _unexplained(evidence, evidence.right), _unexplained(evidence, zeros)
        of_right = {name: min(error, max(of_sent[name], CORRECT)) for name, error in of_right.items()}
        for answer in answers:
            left = _unexplained(evidence, answer.candidate.arrays)
            shares = {name: 1 - left[name] / error if error else 0.0 for name, error in of_right.items()}
            part = explained_part(shares)
            candidate = _of_part(answer.candidate, part, evidence) if part else answer.candidate
            explained = min((shares[name] for name in part or shares), default=0.0)
            one = Hypothesis(candidate, explained, answer.ratio, answer.is_proof and not part, part=part)
            if one.is_close or not answer.is_part:
                judged.append((answer.is_part, one))
        kept: list[Hypothesis] = []
        for _, one in sorted(judged, key=lambda pair: (not pair[1].is_proof, pair[0], pair[1].rank)):
            arrays = one.candidate.arrays
            same = next((other for other in kept if apart(arrays, other.candidate.arrays, ones) <= CORRECT), None)
            if same is None:
                kept.append(one)
            elif one.candidate.names != same.candidate.names and one.candidate.names[0] not in same.also:
                kept[kept.index(same)] = replace(same, also=(*same.also, one.candidate.names[0]))
    proofs = [one for one in kept if one.is_proof]
    return proofs[:1] or [one for one in kept if one.is_told][:TOLD]


def _of_part(candidate: Candidate, part: tuple[str, ...], evidence: Evidence) -> Candidate:
    """The candidate of a mistake that was made for some of the wrong gradients alone."""
    arrays = {name: array if name in part else evidence.right[name] for name, array in candidate.arrays.items()}
    detail = candidate.case.detail.removesuffix(f"{_in_words(evidence.wrong)} only").removesuffix(", ")
    case = replace(candidate.case, detail=detail).changed(INEXPRESSIBLE, detail=f"{_in_words(part)} only")
    return replace(candidate, case=case, arrays=arrays)


def _unexplained(evidence: Evidence, arrays: Gradients) -> dict[str, float]:
    """The mean of the squared errors of each wrong gradient that is left beside those of a mistake."""
    left = {}
    for name, sent in evidence.sent.items():
        errors = distances(sent, arrays[name]) * evidence.units[name]
        left[name] = float(np.mean(np.square(np.where(np.isfinite(errors), errors, evidence.most[name]))))
    return left


def _power(answers: list[Answer]) -> Power:
    """Which mistakes of the backward pass the request can show."""
    survive = {one.candidate.names[0] for one in answers if not one.killed}
    names = dict.fromkeys(one.candidate.names[0] for one in answers)
    killed = [one.candidate for one in answers if one.candidate.names[0] not in survive]
    with np.errstate(all="ignore"):
        same = groups(killed, dict.fromkeys(killed[0].arrays, 1.0)) if killed else ()
    return Power(
        tuple(name for name in names if name not in survive), tuple(name for name in names if name in survive), same, {}
    )
