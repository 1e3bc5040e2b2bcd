"""What is printed of the result of a suite."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Final

from attention_service.conformance.judge import STATUSES
from attention_service.conformance.law_checks import LAW_STATUSES, LawsResult
from attention_service.conformance.runner import CornerResult, SuiteResult

# A name in quotes, as in "got an unexpected keyword argument 'mask'".
QUOTED: Final = re.compile(r"'(\w+)'")


def as_text(result: SuiteResult) -> str:
    """A table by corner, a line for each reason why others are not supported, then the first failure of each corner."""
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
    supported = [corner for corner in result.corners if corner.status != "unsupported"]
    for corner in sorted(supported, key=lambda corner: corner.name == "combined"):
        yield f"{corner.name:24} {''.join(f'{corner.count(status) or chr(45):>12}' for status in STATUSES)}"
    yield f"{'all':24} {''.join(f'{result.count(status):>12}' for status in STATUSES)}"
    yield from _unsupported(result)
    for corner in result.corners:
        if (failure := corner.first_failure) is not None:
            yield ""
            yield failure.sentence
            if corner.diagnosis is not None:
                yield f"  {corner.diagnosis.sentence}"


def _unsupported(result: SuiteResult) -> Iterator[str]:
    """Why corners are not supported, in a line for each reason; reasons that differ in what they quote are one."""
    quoted = defaultdict[str, list[str]](list)
    for corner in result.corners:
        if corner.status == "unsupported":
            quoted[QUOTED.sub("", corner.reason or "").strip()].extend(QUOTED.findall(corner.reason or "") or [""])
    for reason, names in quoted.items():
        of = f"{len(names)} of {len(result.corners)} corners not supported: {reason}"
        yield " ".join([of, ", ".join(sorted({*names}))]).rstrip()


def _corner(corner: CornerResult) -> dict[str, Any]:
    failure, found = corner.first_failure, corner.diagnosis
    answer: dict[str, Any] = {"corner": corner.name} | {status: corner.count(status) for status in STATUSES}
    answer["reason"] = corner.reason
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
            "fact": None if found is None else found.fact,
        }
    return answer
