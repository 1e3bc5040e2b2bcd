"""From a comparison to its report."""

from __future__ import annotations

import math
import sys
from typing import Any, Final

import numpy as np

from attention_service.comparison.engine.comparison import Comparison
from attention_service.comparison.engine.hypothesis import Hypothesis
from attention_service.comparison.rules import CORRECT
from attention_service.comparison.wrong import NOUNS, is_open
from attention_service.pipeline.json_fields import json_fields
from attention_service.schemas.compare import (
    AgainstReport,
    Baseline,
    Certainty,
    CompareReport,
    NextInput,
    ReportedHypothesis,
    ReportedPower,
    ToleranceResult,
    Verdict,
)
from attention_service.version import __version__

# Numbers of a request that is shown in a report.
SHOWN: Final = 20_000


def make_report(comparison: Comparison[Any], request_id: str | None = None) -> CompareReport:
    """The report of a comparison."""
    found = comparison.power
    metadata: dict[str, Any] = {} if comparison.rows is None else {"rows": comparison.rows}
    if comparison.metadata is not None:
        metadata |= comparison.metadata.present
        metadata["warnings"] = [{"code": one.code, "message": one.message} for one in comparison.metadata.warnings]
    metadata["dtype"] = comparison.question.type_name
    if request_id is not None:
        metadata["request_id"] = request_id
    return CompareReport(
        verdict=_verdict(comparison),
        errors={name: one.errors for name, one in comparison.judged.items()},
        baseline={name: Baseline(limit=one.limit, **dict(one.baseline)) for name, one in comparison.judged.items()},
        tests=[
            ToleranceResult(
                name=one.name,
                passes=comparison.passes.get(one.name),
                tolerance={"rtol": one.rtol, "atol": one.atol, "mismatches": one.mismatches},
                misses=list(found.missed[one.name]),
            )
            for one in comparison.tolerances
        ],
        where=comparison.where,
        hypotheses=[_hypothesis(one) for one in comparison.hypotheses],
        facts=list(comparison.facts),
        power=ReportedPower(
            mutants=len(found.killed) + len(found.survivors),
            killed=len(found.killed),
            survivors=list(found.survivors),
            indistinguishable=[list(group) for group in found.indistinguishable],
            tiles={name: list(shown) for name, shown in found.tiles.items()},
            weak=list(comparison.question.weak),
            options=list(comparison.question.unseen_options(comparison.power)),
        ),
        next_input=_next_input(comparison),
        against=None if comparison.against is None else _against(comparison, comparison.against),
        reference=_reference(comparison) if comparison.question.reference else None,
        ended_early=comparison.ended_early or (comparison.against is not None and comparison.against.ended_early),
        metadata=metadata | {"version": __version__},
    )


def _against(comparison: Comparison[Any], other: Comparison[Any]) -> AgainstReport:
    """What there is to say of the other answer, and of the difference of the two."""
    verdict, differences = _verdict(other), comparison.differences
    most = max(differences.values(), default=0.0)
    if {comparison.status, other.status} <= {"correct", "inconclusive"}:
        message = f"Neither is wrong. They differ by {most:.2g} baselines, and right answers by up to {2 * CORRECT:g}."
    else:
        message = f"The answer in actual: {_verdict(comparison).message} The answer in against: {verdict.message}"
    return AgainstReport(
        message=message,
        verdict=verdict,
        errors={name: one.errors for name, one in other.judged.items()},
        hypotheses=[_hypothesis(one) for one in other.hypotheses],
        differences={name: _number(ratio) for name, ratio in differences.items()},
    )


def _verdict(comparison: Comparison[Any]) -> Verdict:
    status, ratio = comparison.status, comparison.ratio
    if comparison.unknown:
        message = f"Not judged: the comparison does not know {', '.join(comparison.unknown)} of the request's plan."
        return Verdict(status="inconclusive", ratio=None, message=message)
    if comparison.question.actual is None:
        words = _power_in_words(comparison)
        return Verdict(
            status="inconclusive", ratio=None, message=words[0].upper() + words[1:] if comparison.ended_early else words
        )
    shown = _times(max((one.largest for one in comparison.judged.values()), default=0.0))
    if status == "correct":
        unseen = ", ".join(comparison.question.unseen_options(comparison.power))
        weak = f"; a kernel that ignores {unseen} would be as right for these inputs" if unseen else ""
        of = "" if comparison.rows is None else f" in the {comparison.rows} rows of each head that were judged"
        message = f"Right{of}: the largest error is {shown}{weak}."
    elif status == "inconclusive":
        message = f"Right for this request, with an error of {shown}; but {_power_in_words(comparison)}"
    else:
        non_finite = [name for name, one in comparison.judged.items() if one.errors.non_finite]
        error = _of_non_finite(comparison, non_finite[0]) if non_finite else _error_in_words(comparison)
        message = _in_words(comparison, error)
    if comparison.ended_early:
        message += f" The search for mistakes ended after {comparison.question.time_limit:g} s, the time_limit."
    return Verdict(status=status, ratio=_number(ratio), message=message)


def _power_in_words(comparison: Comparison[Any]) -> str:
    found = comparison.power
    if comparison.ended_early:
        return "what this request can show was not looked at to the end."
    question = comparison.question
    if comparison.judged and not any(map(question.shows, comparison.judged)):
        return f"only {', '.join(question.showing)} show mistakes."
    return f"this request can show {len(found.killed)} of {len(found.killed) + len(found.survivors)} known mistakes."


def _times(largest: float) -> str:
    return f"{min(largest, sys.float_info.max):.2g} times what legal rounding explains"


def _error_in_words(comparison: Comparison[Any]) -> str:
    """How large the error of the worst array is: its largest one, or that of rows where it says more."""
    worst = comparison.place or max(comparison.judged.values(), key=lambda one: one.ratio)
    if worst.rows is None or (worst.place is None and worst.largest >= worst.ratio):
        return f"the largest error is {_times(worst.largest)}"
    most, mean = worst.rows.in_words
    of_rows = f"up to {most:.2g} times as far off as legal rounding makes them"
    return (
        f"the worst rows are {of_rows}"
        if worst.place is not None
        else f"rows are {of_rows}, {mean:.2g} times in the mean"
    )


def _of_non_finite(comparison: Comparison[Any], name: str) -> str:
    """What is said of an array that is infinite or NaN where another number is right, or the reverse."""
    sent, right = (comparison.question.actual or {})[name], comparison.reference[name]
    if not np.isfinite(sent.astype(np.float64)[~np.isfinite(right)]).any():
        return "some elements are infinite or NaN"
    return f"some elements are finite, where {'minus infinity' if np.isneginf(right).any() else 'no number'} is right"


def _in_words(comparison: Comparison[Any], error: str) -> str:
    """The verdict on an output that is imprecise or wrong. error: how large it is, in words"""
    start = comparison.status.capitalize()
    right = [NOUNS.get(name, name) for name, one in comparison.judged.items() if one.ratio <= CORRECT]
    wrong = [NOUNS.get(name, name) for name, one in comparison.judged.items() if one.ratio > CORRECT]
    start += f": {_are(right)} right; {_are(wrong)} {start.lower()}:" if right else ":"
    best = comparison.hypotheses[0] if comparison.hypotheses else None
    if best is not None and best.is_proof:
        same = f" The same here: {', '.join(best.also)}." if best.also else ""
        return f"{start} {_lowered(best.candidate.message)}{same}"
    if comparison.facts:
        error = _lowered(comparison.facts[0].message).removesuffix(".")
    # A mistake that leaves much of the error, or stands beside a fact that says what was sent, was likely not made.
    if best is not None and best.is_close and is_open(comparison.facts):
        of = f" of {' and '.join(NOUNS.get(name, name) for name in best.part)}" if best.part else ""
        share = f"{math.floor(100 * best.explained)}% of the error{of}"
        return f"{start} {error}. It resembles this, which explains {share}: {_lowered(best.candidate.message)}"
    is_said = bool(comparison.facts) or comparison.ended_early
    return f"{start} {error}{'.' if is_said else ', and no known mistake explains it.'}"


def _are(names: list[str]) -> str:
    """Names of arrays and the verb that follows: "the output is", "key and value are"."""
    return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'}"


def _lowered(sentence: str) -> str:
    return sentence[0].lower() + sentence[1:]


def _hypothesis(one: Hypothesis) -> ReportedHypothesis:
    certainty: Certainty = "proof" if one.is_proof else "resembles"
    change = one.candidate.case.change
    return ReportedHypothesis(
        name=" and ".join(one.candidate.names),
        also=list(one.also),
        message=one.candidate.message,
        change=None if change is None else dict(change),
        explained=one.explained,
        ratio=_number(one.ratio),
        certainty=certainty,
    )


def _next_input(comparison: Comparison[Any]) -> NextInput | None:
    suggestion = comparison.suggestion
    if suggestion is None:
        return None
    numbers = sum(_size(value) for value in suggestion.fields.values())
    request = None if numbers > SHOWN else json_fields(suggestion.fields)
    return NextInput(kills=list(suggestion.kills), seed=suggestion.seed, request=request, note=comparison.question.note)


def _reference(comparison: Comparison[Any]) -> dict[str, np.ndarray]:
    """What is right, in the units that were sent."""
    units = comparison.question.units
    return {name: array / units[name] if name in units else array for name, array in comparison.reference.items()}


def _size(value: Any) -> int:
    if isinstance(value, dict):
        return sum(map(_size, value.values()))
    return int(value.size) if isinstance(value, np.ndarray) else 1


def _number(number: float) -> float | None:
    return number if math.isfinite(number) else None
