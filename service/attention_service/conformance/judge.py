"""The judgement of the answer to one case."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from attention_service.comparison.errors import distances
from attention_service.comparison.rules import CORRECT, IMPRECISE
from attention_service.conformance.gradients import call_gradients, is_differentiated
from attention_service.conformance.suite import SuiteCase
from attention_service.conformance.target import Target, Unsupported, call, described
from attention_service.errors import InvalidRequest
from attention_service.library import compare

Status = Literal["correct", "imprecise", "wrong", "error", "unsupported"]
STATUSES: Final[tuple[Status, ...]] = ("correct", "imprecise", "wrong", "error", "unsupported")


@dataclass(frozen=True)
class Outcome:
    """What an implementation did with a case.

    ratio:   the largest error in baselines, None if nothing could be compared
    message: what is wrong, what was raised and where, or why the case is not supported
    """

    case: SuiteCase
    status: Status
    ratio: float | None = None
    message: str = ""

    @property
    def sentence(self) -> str:
        """The case and what was found of it, as text."""
        found = "raised" if self.status == "error" else f"is {self.status}:"
        return f"{self.case.name} ({self.case.dtype}) {found} {self.message}"


@dataclass(frozen=True)
class Diagnosis:
    """The mistake that a wrong answer shows: the name of a hypothesis, None if no known mistake explains it.

    also: the names of other mistakes that have the same answer to the case
    fact: what is true of the answer, which says more than a mistake that is not proved; None if nothing is known
    """

    hypothesis: str | None
    certainty: str | None
    message: str
    also: tuple[str, ...] = ()
    fact: str | None = None

    @property
    def sentence(self) -> str:
        """The fact, or the mistake and how sure it is, as text."""
        if self.fact is not None and self.certainty != "proof":
            return f"fact: {self.fact}"
        if self.hypothesis is None:
            return self.message
        same = f" (the same here: {', '.join(self.also)})" if self.also else ""
        return f"{self.certainty}: {self.hypothesis}: {self.message}{same}"


def judge(case: SuiteCase, target: Target) -> Outcome:
    """The outcome of a case. Whatever an implementation raises, except Unsupported, is an error."""
    try:
        with np.errstate(all="ignore"):
            actual = _answer(case, target)
    except Unsupported as error:
        return Outcome(case, "unsupported", message=str(error))
    except (Exception, SystemExit) as error:  # of somebody else's code: anything, but no exit status of its choice
        return Outcome(case, "error", message=described(error, target))
    return judge_arrays(case, actual)


def _answer(case: SuiteCase, target: Target) -> dict[str, np.ndarray]:
    """What an implementation returns for a case, by name. Errors: as of `call`."""
    if is_differentiated(case.fields):
        return call_gradients(target, case.fields, case.expected)
    return call(target, case.fields)


def judge_arrays(case: SuiteCase, actual: Mapping[str, np.ndarray]) -> Outcome:
    """The outcome of a case for these arrays. Arrays that the case has no answer for do not count."""
    worst, where = 0.0, ""
    for name, expected in case.expected.items():
        if name not in actual:
            continue
        if actual[name].shape != expected.shape:
            shapes = f"{name} of shape {actual[name].shape}, expected {expected.shape}"
            return Outcome(case, "wrong", message=shapes)
        apart = distances(actual[name].astype(np.float64), expected)
        if not np.isfinite(apart).all():
            return Outcome(case, "wrong", message=_non_finite(name, actual[name].astype(np.float64), expected))
        ratio = float(np.divide(CORRECT * apart, case.tolerance[name], where=apart > 0, out=apart).max(initial=0.0))
        if ratio > worst:
            worst, where = ratio, "" if name == "output" else f" in {name}"
    if worst <= CORRECT:
        return Outcome(case, "correct", worst)
    message = f"an error of {worst:.3g} baselines{where}, where {CORRECT:g} are right"
    return Outcome(case, "imprecise" if worst <= IMPRECISE else "wrong", worst, message)


def diagnose(case: SuiteCase, target: Target) -> Diagnosis | None:
    """The mistake that explains a wrong answer; None if the implementation raises, or returns other shapes."""
    try:
        with np.errstate(all="ignore"):
            actual = _answer(case, target)
        if not any(np.isfinite(actual[name].astype(np.float64)).any() for name in case.expected if name in actual):
            return Diagnosis(None, None, "nothing finite to compare")
        report = compare({name: actual[name] for name in case.expected if name in actual}, **case.fields)
    except InvalidRequest:
        return None
    except (Exception, SystemExit):  # of somebody else's code: anything
        return None
    fact = report.facts[0].message if report.facts else None
    if not report.hypotheses:
        return Diagnosis(None, None, "no known mistake", fact=fact)
    best = report.hypotheses[0]
    return Diagnosis(best.name, best.certainty, best.message, tuple(best.also), fact)


def _non_finite(name: str, actual: np.ndarray, expected: np.ndarray) -> str:
    """Which numbers an array has in the place of others."""
    bad = ~(
        (actual == expected) | (np.isfinite(actual) & np.isfinite(expected)) | (np.isnan(actual) & np.isnan(expected))
    )
    index = tuple(int(place) for place in np.argwhere(bad)[0])
    return f"{name}{list(index)} is {actual[index]:g}, expected {expected[index]:g}"
