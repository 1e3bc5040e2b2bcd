"""Verdicts on the calls of recordings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from attention_service.backends.base import Backend, Check, no_check
from attention_service.comparison.calls.compare import compare_call
from attention_service.comparison.calls.question import make_call_question
from attention_service.engines.table import decode
from attention_service.errors import ServiceError
from attention_service.library.calls import all_processors
from attention_service.library.recordings import RecordedCall
from attention_service.library.report import Report
from attention_service.printable import printable
from attention_service.render.drawing import counted
from attention_service.schemas.compare import Judging

UNREADABLE: Final = "unreadable"
# What the name of a mistake that is not proved begins with.
RESEMBLES: Final = "resembles "


@dataclass(frozen=True, slots=True)
class CallVerdict:
    """What is said of a recorded call.

    number: as --call has it; name: its folder; function: as `call` names it
    status: of its verdict, or unreadable; sequences, ratio: None for an unreadable call
    mistake: that it shows; message: where it is wrong, or why nothing can be said
    report: as of compare_call; None for an unreadable call
    """

    number: int
    name: str
    function: str
    status: str
    sequences: int | None = None
    ratio: float | None = None
    mistake: str | None = None
    message: str = ""
    report: Report | None = None

    def __str__(self) -> str:
        sequences = "" if self.sequences is None else f", {counted(self.sequences, 'sequence')}"
        said = [f"{self.function}{sequences}", *filter(None, [self.mistake, self.message])]
        return printable(f"{self.number:>4} {self.status:12} {self.name}: {'; '.join(said)}")

    @property
    def is_open(self) -> bool:
        """True if more can be said of the call: no mistake is proved, or the call is too weak to tell."""
        is_proved = self.mistake is not None and not self.mistake.startswith(RESEMBLES)
        return self.status == "inconclusive" or (self.status in ("wrong", "imprecise") and not is_proved)


def verdicts_on(calls: Iterable[RecordedCall], judging: Judging) -> Iterator[CallVerdict]:
    """The verdicts on calls in their order, each read and judged when it is asked for, by all processors."""
    for number, call in enumerate(calls):
        with all_processors() as backend:
            verdict = verdict_on(number, call, backend, judging)
        yield verdict


def verdict_on(
    number: int, call: RecordedCall, backend: Backend, judging: Judging | None = None, *, is_brief: bool = False
) -> CallVerdict:
    """The verdict on a recorded call. Arguments: as of recorded_report"""
    about = CallVerdict(number, call.name, call.function, UNREADABLE)
    try:
        report = recorded_report(call, backend, judging=judging, is_brief=is_brief)
    except ServiceError as error:
        return replace(about, message=str(error))
    except OSError as error:
        return replace(about, message=f"{error.filename}: {error.strerror}")
    except MemoryError:
        return replace(about, message="the machine has too little memory for this call")
    verdict, sequences = report.verdict, report.metadata["batch_size"]
    about = replace(about, status=verdict.status, sequences=sequences, ratio=verdict.ratio, report=report)
    if verdict.status == "correct":
        return about
    place = report.where[0].message if report.where else verdict.message
    return replace(about, mistake=_mistake(report), message=place)


def recorded_report(
    call: RecordedCall,
    backend: Backend,
    check: Check = no_check,
    *,
    judging: Judging | None = None,
    is_brief: bool = False,
) -> Report:
    """The report on a recorded call. Arguments: as of compare_call, make_call_question and CallQuestion

    Errors: InvalidRequest of every kind, OSError, and what `check` raises.
    """
    decoded = decode(call.function, call.arguments())
    question = make_call_question(call.function, decoded, call.results(), judging=judging)
    return Report.of_call(compare_call(replace(question, is_brief=is_brief), backend, check))


def _mistake(report: Report) -> str | None:
    """The first mistake that a report names, and others that have the same answer."""
    if not report.hypotheses:
        return None
    first = report.hypotheses[0]
    names = " or ".join([first.name, *first.also])
    return names if first.certainty == "proof" else f"{RESEMBLES}{names}"


def lost_lines(count: int) -> str:
    """What is said of lines that cannot be read."""
    return f"{counted(count, 'line')} of the recording cut off or unreadable"
