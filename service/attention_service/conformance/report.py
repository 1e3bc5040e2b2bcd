"""What is printed of the result of a suite."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from attention_service.conformance.judge import STATUSES
from attention_service.conformance.law_checks import LAW_STATUSES, LawsResult
from attention_service.conformance.runner import CornerResult, SuiteResult


def as_text(result: SuiteResult) -> str:
    """A table by corner, then the first failure of each corner."""
    return "\n".join(_lines(result))


def as_json(result: SuiteResult) -> dict[str, Any]:
    """The same as JSON."""
    return {
        "status": result.exit_status,
        "counts": {status: result.count(status) for status in STATUSES},
        "corners": [_corner(corner) for corner in result.corners],
    }


def laws_as_text(result: LawsResult) -> str:
    """A line for each law, then the input of each that does not hold."""
    lines = [f"{law.name:24}{law.status:12} {law.message or ''}".rstrip() for law in result.laws]
    failed = [law for law in result.laws if law.input is not None]
    return "\n".join([*lines, *(f"\n{law.name}: the smallest input that shows it: {law.input}" for law in failed)])


def laws_as_json(result: LawsResult) -> dict[str, Any]:
    """The same as JSON."""
    return {
        "status": result.exit_status,
        "counts": {status: result.count(status) for status in LAW_STATUSES},
        "laws": [asdict(law) for law in result.laws],
    }


def _lines(result: SuiteResult) -> Iterator[str]:
    yield f"{'corner':24} {''.join(f'{status:>12}' for status in STATUSES)}"
    for corner in sorted(result.corners, key=lambda corner: corner.name == "combined"):
        yield f"{corner.name:24} {''.join(f'{corner.count(status) or chr(45):>12}' for status in STATUSES)}"
    yield f"{'all':24} {''.join(f'{result.count(status):>12}' for status in STATUSES)}"
    for corner in result.corners:
        if (failure := corner.first_failure) is not None:
            yield ""
            yield failure.sentence
            if corner.diagnosis is not None:
                yield f"  {corner.diagnosis.sentence}"


def _corner(corner: CornerResult) -> dict[str, Any]:
    failure, found = corner.first_failure, corner.diagnosis
    answer: dict[str, Any] = {"corner": corner.name} | {status: corner.count(status) for status in STATUSES}
    answer["first_failure"] = None
    if failure is not None:
        answer["first_failure"] = {
            "case": failure.case.name,
            "dtype": failure.case.dtype,
            "options": failure.case.options,
            "status": failure.status,
            "ratio": failure.ratio,
            "message": failure.message,
            "hypothesis": None if found is None else found.hypothesis,
            "certainty": None if found is None else found.certainty,
            "also": [] if found is None else list(found.also),
        }
    return answer
