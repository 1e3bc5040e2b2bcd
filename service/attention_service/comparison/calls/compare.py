"""The comparison of what a function of another library returned with the exact answer of its call."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from attention_service.attention.result import Metadata
from attention_service.backends.base import Backend, Check, no_check
from attention_service.comparison.calls.explain import Explanation, explanations, shown
from attention_service.comparison.calls.judge import is_wrong, judge, largest_errors
from attention_service.comparison.calls.parts import parts, question_of
from attention_service.comparison.calls.places import WrongPlaces
from attention_service.comparison.calls.question import CallQuestion
from attention_service.comparison.candidates import make_candidate
from attention_service.comparison.case import make_case
from attention_service.comparison.compare import compare_question
from attention_service.comparison.engine.candidate import Candidate
from attention_service.comparison.engine.comparison import Comparison
from attention_service.comparison.engine.hypothesis import Hypothesis
from attention_service.comparison.outputs import facts_of
from attention_service.comparison.rules import CORRECT
from attention_service.comparison.time_limit import TimeIsUp, limited
from attention_service.comparison.truth import Question, Truth, reference_and_baseline
from attention_service.comparison.wrong import LISTED
from attention_service.engines.call import Call
from attention_service.errors import InvalidRequest, Overflow
from attention_service.pipeline.calls import exact_answer, keyless_rows, sizes_of
from attention_service.schemas.compare import Fact, Place

# Groups of mistakes that say which tokens are read: of a call, where they were read says it better.
OF_TOKENS: Final = frozenset({"cache", "keys", "kv", "query", "value", "values"})


@dataclass(frozen=True)
class CallComparison:
    """All that a report of a call tells.

    worst: the comparison of the part that is worst, with the mistakes of addressing among those that it names; of one
    that asks for power, that of the largest part; None if no sequence has queries
    places: where the answer is wrong; unseen: mistakes that the call cannot show because of its lengths, in sentences
    reference: what is right, by the names of what was sent, as the function returns it; None if it was not asked for
    """

    question: CallQuestion
    worst: Comparison[Question] | None
    places: list[Place] = field(default_factory=list)
    unseen: tuple[str, ...] = ()
    reference: Mapping[str, np.ndarray] | None = None

    @property
    def metadata(self) -> Metadata:
        """The sizes of the whole call, as metrics and log count them."""
        call = self.question.addressed
        scale = call.options.get("scale", 1 / math.sqrt(call.query.features))
        about = ("numpy", "cpu", self.question.dtype.name, "none")
        return Metadata(*about, *sizes_of(call), scale, keyless_rows(call), ())


@np.errstate(all="ignore")
def compare_call(asked: CallQuestion, backend: Backend, check: Check = no_check) -> CallComparison:
    """Judge what a function returned for a call.

    Mistakes are looked for only if it is wrong, and what the call can show also if nothing was returned.
    backend: computes the reference; check: raises to end it all

    Errors: InvalidRequest of every kind, with pointers to arguments and into /actual, and what `check` raises.
    """
    found = _compared(asked, backend, check)
    if not asked.reference:
        return found
    answer = exact_answer(asked.addressed, backend, check)
    right = {"output": answer.output, "logsumexp": answer.logsumexp}
    return replace(found, reference={name: right[name] for name in asked.actual or ("output",)})


def _compared(asked: CallQuestion, backend: Backend, check: Check) -> CallComparison:
    """The comparison without what is right. Arguments: as of compare_call"""
    end = None if asked.time_limit is None else time.monotonic() + asked.time_limit
    if asked.actual is None:
        return _power(asked, backend, check, end)
    judged = _Judged({name: WrongPlaces(asked.addressed, name) for name in asked.actual})
    for part in parts(asked.addressed):
        check()
        judged.forget()
        with _renamed(asked.addressed, part):
            judged.add(part, *judge(question_of(asked, part), backend, check, asked.rows))
    worst = judged.worst
    if worst is None or not is_wrong(worst):
        return CallComparison(asked, worst)
    return _searched(asked, judged, backend, check, end)


@dataclass
class _Judged:
    """What all parts together are.

    arrays: where each array is wrong; errors: the largest of each; part: the sequences of the worst comparison
    parts: the sequences of each comparison, and True if it is wrong
    """

    arrays: dict[str, WrongPlaces]
    errors: dict[str, float] = field(default_factory=dict)
    worst: Comparison[Question] | None = None
    truth: Truth | None = None
    part: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    parts: list[tuple[np.ndarray, bool]] = field(default_factory=list)
    passes: dict[str, bool] = field(default_factory=dict)

    def forget(self) -> None:
        """Drop what is right for the worst part: it takes as much memory as the comparison of the next one."""
        self.truth = None

    def add(self, part: np.ndarray, found: Comparison[Question], truth: Truth | None) -> None:
        """Add a part, its comparison, and what is right for it."""
        self.parts.append((part, is_wrong(found)))
        for name, error in largest_errors(found).items():
            self.errors[name] = max(self.errors.get(name, 0.0), error)
            if found.judged[name].ratio > CORRECT:
                self.arrays[name].add(part, found)
        for name, passes in found.passes.items():
            self.passes[name] = self.passes.get(name, True) and passes
        if self.worst is None or found.rank > self.worst.rank:
            self.worst, self.part, self.truth = found, part, truth
        self.worst = replace(self.worst, passes=dict(self.passes))

    @property
    def others(self) -> list[tuple[np.ndarray, bool]]:
        """The parts beside the worst one."""
        return [(part, is_wrong) for part, is_wrong in self.parts if part is not self.part]

    @property
    def wrong_sequences(self) -> list[int]:
        """The sequences of which an array is wrong, the worst first."""
        worst = self.places.worst_sequence
        wrong = np.any([one.sequences for one in self.arrays.values()], axis=0)
        return [worst, *(n for n in np.flatnonzero(wrong).tolist() if n != worst)]

    @property
    def places(self) -> WrongPlaces:
        """Where the first array that is wrong is wrong."""
        return next(one for one in self.arrays.values() if one.elements)


def _searched(
    asked: CallQuestion, judged: _Judged, backend: Backend, check: Check, end: float | None
) -> CallComparison:
    """The comparison of an answer that is wrong: mistakes of addressing first, then others of the worst part."""
    found: list[Explanation] = []
    ended_early = True
    with suppress(TimeIsUp):
        # What was found before the time is up stays.
        errors = {name: judged.errors[name] for name, one in judged.arrays.items() if one.count}
        found.extend(explanations(asked, errors, judged.wrong_sequences, backend, limited(check, end)))
        ended_early = False
    if found and asked.is_brief:
        end = time.monotonic()
    question = _in_time(question_of(asked, judged.part), end)
    assert judged.worst is not None
    worst = compare_question(question, backend, check, judged.truth)
    worst = replace(worst, passes=judged.passes, ended_early=worst.ended_early or ended_early)
    if found:
        first = _hypothesis(found, question, check)
        others = [] if first.is_proof else worst.hypotheses
        worst = replace(worst, hypotheses=[first, *others], facts=())
    else:
        unproved = [replace(one, is_proof=one.is_proof and not judged.others) for one in worst.hypotheses]
        found_in_part = worst
        worst = replace(worst, hypotheses=unproved)  # unless there is time to look at other parts
        with suppress(TimeIsUp):
            worst = _of_all(asked, judged, found_in_part, backend, limited(check, end))
    worst = replace(worst, hypotheses=_each_once(worst.hypotheses))
    return _with_power(CallComparison(asked, worst, judged.places.places()), backend, check, end)


def _of_all(
    asked: CallQuestion, judged: _Judged, worst: Comparison[Question], backend: Backend, check: Check
) -> Comparison[Question]:
    """The comparison of the worst part with what holds of the whole call. Errors: what `check` raises."""
    # Loaded for the first call that is wrong, as an idle service has no use for them.
    from attention_service.comparison.calls.confirm import is_in_all, is_in_none, is_of_each
    from attention_service.comparison.calls.merge_facts import merge_fact
    from attention_service.comparison.calls.readings import Search

    proof = next((one for one in worst.hypotheses if one.is_proof), None)
    if proof is not None and not is_of_each(proof, judged.part, asked, backend, check):
        moved = _as_offsets(proof, judged)
        facts = () if moved else facts_of(judged.truth or reference_and_baseline(worst.question, backend, check))
        worst, proof = replace(worst, hypotheses=moved, facts=facts), None
    wrong, right = ([part for part, is_bad in judged.others if is_bad == kind] for kind in (True, False))
    is_known = proof is not None and is_in_all(proof, wrong, asked, backend, check)
    holds = proof is not None and is_known and not is_in_none(proof, right, asked, backend, check)
    is_of_tokens = proof is not None and proof.candidate.names[0].partition(".")[0] in OF_TOKENS
    if holds and isinstance(asked.call, Call) and not is_of_tokens:
        return worst
    limits = {name: one.limit for name, one in worst.judged.items()}
    if isinstance(asked.call, Call):
        fact = Search(asked, judged.wrong_sequences, limits, backend, check).fact()
    else:
        fact = merge_fact(asked, judged.wrong_sequences, limits, backend, check)
    if fact is not None:
        return replace(worst, facts=(fact,), hypotheses=[])
    if proof is None or holds:
        return worst
    facts = (
        (_known_in_part(proof, judged),)
        if is_known
        else facts_of(judged.truth or reference_and_baseline(worst.question, backend, check))
    )
    return replace(worst, hypotheses=[replace(one, is_proof=False) for one in worst.hypotheses], facts=facts)


def _as_offsets(proof: Hypothesis, judged: _Judged) -> list[Hypothesis]:
    """A mistake of a padded batch in words of the call: its sequences have other causal offsets. None if it is another.

    It is proved of one part only.
    """
    change = proof.candidate.case.change or {}
    if change.keys() != {"query_offset"}:
        return []
    offsets = np.broadcast_to(change["query_offset"], judged.part.shape)
    order = np.argsort(judged.part)
    listed = [", ".join(map(str, of[order][:LISTED].tolist())) for of in (offsets, judged.part)]
    more = ", …" if len(order) > LISTED else ""
    detail = f"{listed[0]}{more} in sequences {listed[1]}{more}"
    case = replace(proof.candidate.case, change=None, detail=detail)
    candidate = make_candidate(("causal.other_offset",), case, proof.candidate.arrays)
    return [replace(proof, candidate=candidate, also=(), is_proof=not judged.others)]


def _each_once(hypotheses: list[Hypothesis]) -> list[Hypothesis]:
    """The hypotheses without those whose mistake stands before, in another form or found in another way."""
    first: dict[tuple[str, ...], Hypothesis] = {}
    for one in hypotheses:
        first.setdefault(one.candidate.names, one)
    return list(first.values())


def _known_in_part(one: Hypothesis, judged: _Judged) -> Fact:
    """The fact that sequences that are wrong have a known mistake, which the others do not have."""
    message = "The wrong sequences that were looked at have a known mistake, which a right one has not: "
    message += one.candidate.message
    numbers = {"sequences": [float(n) for n in judged.wrong_sequences[:LISTED]]}
    return Fact(name="known_in_part", array=judged.places.array, message=message, numbers=numbers)


def _power(asked: CallQuestion, backend: Backend, check: Check, end: float | None) -> CallComparison:
    """What a call can show: its largest part, and mistakes of addressing."""
    found = list(parts(asked.addressed))
    if not found:
        return CallComparison(asked, None)
    largest = max(found, key=len)
    with _renamed(asked.addressed, largest):
        worst = compare_question(_in_time(question_of(asked, largest), end), backend, check)
    return _with_power(CallComparison(asked, worst), backend, check, end)


def _with_power(found: CallComparison, backend: Backend, check: Check, end: float | None) -> CallComparison:
    """The comparison with the mistakes of addressing that the call can show."""
    worst = found.worst
    assert worst is not None
    killed: list[str] = []
    survivors: list[str] = []
    unseen: list[str] = []
    ended_early = True
    with suppress(TimeIsUp):
        for mistake, is_shown, why in shown(found.question, backend, limited(check, end)):
            (killed if is_shown else survivors).append(mistake.name)
            if why:
                unseen.append(f"{why}: {mistake.name} cannot be seen")
        ended_early = False
    power = worst.power
    killed = [*dict.fromkeys([*(name for name in power.killed if name not in survivors), *killed])]
    survivors = [*dict.fromkeys([*(name for name in power.survivors if name not in killed), *survivors])]
    power = replace(power, killed=tuple(killed), survivors=tuple(survivors))
    worst = replace(worst, power=power, ended_early=worst.ended_early or ended_early)
    return replace(found, worst=worst, unseen=tuple(unseen))


def _in_time(question: Question, end: float | None) -> Question:
    """The question with the time that is left."""
    return question if end is None else replace(question, time_limit=max(0.0, end - time.monotonic()))


def _hypothesis(found: list[Explanation], question: Question, check: Check) -> Hypothesis:
    """The first mistake of addressing, with the others that have the same answer."""
    first = found[0]
    case = replace(make_case(question.spec, question.plan.dtype, check), change=None, detail=first.detail)
    candidate = Candidate((first.mistake.name,), case, {}, did=first.mistake.message)
    also = tuple(one.mistake.name for one in found[1:])
    return Hypothesis(candidate, first.explained, first.ratio, first.proves, also)


@contextmanager
def _renamed(call: Call, part: np.ndarray) -> Iterator[None]:
    """Gives the errors of the request of a part the names of the library. Errors: InvalidRequest of every kind."""
    try:
        yield
    except InvalidRequest as error:
        is_number = isinstance(error, Overflow) or any("finite" in fault.expected for fault in error.faults)
        raise (call.fault(part.tolist()) if is_number else None) or call.renamed(error) from None
