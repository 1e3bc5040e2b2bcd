"""The engine of comparisons judges what it does not know: a norm of one array, with two mistakes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pytest

from attention_service.backends.base import Check, no_check
from attention_service.comparison.engine.candidate import Candidate
from attention_service.comparison.engine.comparison import Asked, judge
from attention_service.comparison.engine.power import power
from attention_service.comparison.engine.subject import Subject
from attention_service.comparison.engine.suggestion import Suggestion
from attention_service.comparison.report import make_report
from attention_service.comparison.rules import CORRECT
from attention_service.comparison.text import in_short
from attention_service.comparison.time_limit import limited
from attention_service.comparison.tolerances import Tolerance

EPS: Final = 1e-5
# Wrong root mean square norms (Zhang and Sennrich 2019), and what their kernels do.
MISTAKES: Final[dict[str, tuple[str, Callable[[np.ndarray], np.ndarray]]]] = {
    "norm.sum": ("Squares are added up, not averaged.", lambda x: x / np.sqrt(np.sum(x * x, -1, keepdims=True) + EPS)),
    "norm.no_eps": ("eps is left out.", lambda x: x / np.sqrt(np.mean(x * x, -1, keepdims=True))),
}


def norm(x: np.ndarray) -> np.ndarray:
    """What is right."""
    y: np.ndarray = x / np.sqrt(np.mean(x * x, -1, keepdims=True) + EPS)
    return y


@dataclass(frozen=True)
class Form:
    """A form of a mistake, which no field of a request says."""

    change: None = None
    detail: str = ""
    tile: None = None


@dataclass(frozen=True, eq=False)
class Norm(Subject[Form]):
    """What a norm returned. x: what it was asked for"""

    x: np.ndarray

    @classmethod
    def of(cls, x: np.ndarray, sent: np.ndarray | None) -> Norm:
        right, baseline = norm(x), 1e-7
        is_wrong = sent is not None and np.abs(sent - right).max() > CORRECT * baseline
        actual = {} if sent is None else {"output": sent}
        return cls(actual, {"output": right}, {"output": baseline}, frozenset({"output"} if is_wrong else ()), x)

    def candidates(self, check: Check) -> Iterator[Candidate[Form]]:
        for name, (message, mistake) in MISTAKES.items():
            check()
            yield Candidate((name,), Form(), {"output": mistake(self.x)}, message)

    def suggestions(self, names: Collection[str], check: Check, *, apart: bool) -> Iterator[Suggestion]:
        for seed in range(3):
            made = Norm.of(np.random.default_rng(seed).normal(size=(4, 8)) * 1e-3, None)
            shown = power(made, list(made.candidates(check)), check).killed
            yield Suggestion(seed, {"x": made.x}, tuple(name for name in names if name in shown))


def draw(scale: float) -> np.ndarray:
    return np.random.default_rng(5).normal(size=(6, 16)) * scale


def report_of(x: np.ndarray, sent: np.ndarray | None, check: Check = no_check) -> Any:
    subject = Norm.of(x, sent)
    asked = Asked(actual=subject.actual or None)
    return make_report(judge(asked, [subject], check, tolerances=[Tolerance("loose", 0.0, 1.0)]))


def test_a_right_answer_is_right_and_its_power_is_known() -> None:
    report = report_of(draw(1e-3), norm(draw(1e-3)))
    assert report.verdict.status == "correct"
    assert (report.power.mutants, report.power.killed, report.power.survivors) == (2, 2, [])
    assert report.tests[0].passes
    assert report.next_input is None


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_proved_and_placed(name: str) -> None:
    message, mistake = MISTAKES[name]
    report = report_of(draw(1e-3), mistake(draw(1e-3)))
    assert report.verdict.status == "wrong"
    assert [(one.name, one.certainty) for one in report.hypotheses] == [(name, "proof")]
    assert message.lower() in report.verdict.message.lower()
    assert report.where[0].message == "96 of 96 elements of the output (100.0%) are wrong"
    assert in_short(report).startswith("wrong: ")


def test_half_of_two_mistakes_resembles_one() -> None:
    """A hand calculation: of y = r + (w - r) · 0.8 the mistake w leaves 0.2² of the squared error 0.8²: 1/16."""
    x = draw(1e-3)
    report = report_of(x, norm(x) + 0.8 * (MISTAKES["norm.sum"][1](x) - norm(x)))
    (one,) = report.hypotheses
    assert (one.name, one.certainty) == ("norm.sum", "resembles")
    assert one.explained == pytest.approx(15 / 16)


def test_an_input_is_made_for_what_another_cannot_show() -> None:
    report = report_of(draw(100.0), None)
    assert report.verdict.status == "inconclusive"
    assert report.power.survivors == ["norm.no_eps"]
    assert report.next_input.kills == ["norm.no_eps"]


def test_the_end_of_the_time_leaves_what_was_judged() -> None:
    subject = Norm.of(draw(1.0), draw(1.0))
    found = judge(Asked(actual=subject.actual, time_limit=0.0), [subject], no_check, end=-1.0)
    assert (found.ended_early, found.status, found.hypotheses) == (True, "wrong", [])
    assert limited(no_check, None) is no_check
