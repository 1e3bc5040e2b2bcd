"""Results in the formats of continuous integration: JUnit XML, and annotations of GitHub's workflows."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from attention_service.commands.terminal import CommandError
from attention_service.printable import printable

if TYPE_CHECKING:  # commands import what they need when they run
    from attention_service.conformance.law_checks import LawsResult
    from attention_service.conformance.runner import SuiteResult
    from attention_service.schemas.compare import CompareReport

Outcome = Literal["passed", "failure", "error", "skipped"]
# What XML cannot hold (section 2.2 of XML 1.0), and what controls a terminal.
ILLEGAL: Final = re.compile("[^\t\n\r\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True)
class Check:
    """One thing that was judged. details: more than its message says, in several lines"""

    name: str
    outcome: Outcome
    message: str = ""
    details: str = ""


def add_format(command: argparse.ArgumentParser) -> None:
    """Add the option that says in which format the result is printed."""
    command.add_argument(
        "--format",
        choices=("text", "json", *FORMATS),
        default="text",
        help="text (default), json, junit (an XML file for continuous integration) or github (annotations of a "
        "workflow)",
    )


def checks_of_report(report: CompareReport) -> list[Check]:
    """A check for each array that was compared, and one for the other answer."""
    from attention_service.comparison.rules import CORRECT
    from attention_service.comparison.text import as_text

    message, text = report.verdict.message, as_text(report)
    found = []
    for name, errors in report.errors.items():
        is_wrong = errors.non_finite > 0 or (errors.max_abs or 0.0) > CORRECT * report.baseline[name].limit
        is_weak = report.verdict.status == "inconclusive"
        outcome: Outcome = "failure" if is_wrong else "skipped" if is_weak else "passed"
        found.append(Check(name, outcome, message, text) if is_wrong or is_weak else Check(name, outcome))
    if report.against is not None:
        is_wrong = report.against.verdict.status in ("imprecise", "wrong")
        said = report.against.message
        found.append(Check("against", "failure", said) if is_wrong else Check("against", "passed"))
    if report.verdict.status == "correct":  # an empty answer has no errors
        return found or [Check("actual", "passed")]
    return found or [Check("actual", "skipped", message, text)]


def checks_of_suite(result: SuiteResult) -> list[Check]:
    """A check for each corner."""
    found = []
    outcome: Outcome
    for corner in result.corners:
        failure = corner.first_failure
        if failure is not None:
            message, outcome = failure.sentence, "error" if failure.status == "error" else "failure"
            mistake = "" if corner.diagnosis is None else corner.diagnosis.sentence
            found.append(Check(corner.name, outcome, message, f"{message}\n{mistake}".rstrip()))
        elif corner.status == "unsupported":
            found.append(Check(corner.name, "skipped", corner.outcomes[0].message))
        else:
            found.append(Check(corner.name, "passed"))
    return found


def checks_of_laws(result: LawsResult) -> list[Check]:
    """A check for each law."""
    outcomes: dict[str, Outcome] = {"holds": "passed", "broken": "failure", "error": "error", "unsupported": "skipped"}
    return [
        Check(law.name, outcomes[law.status], law.message or "", f"{law.message}\n{law.input}" if law.input else "")
        for law in result.laws
    ]


@contextmanager
def errors_as_checks(suite: str, format_name: str) -> Iterator[None]:
    """Print an error that ends a command as a check, too, in the formats that have checks."""
    try:
        yield
    except CommandError as error:
        if format_name in FORMATS:
            print(FORMATS[format_name](suite, [Check("error", "error", str(error))]))
        raise


def as_junit(suite: str, checks: Sequence[Check]) -> str:
    """A test suite in JUnit's format, as pytest writes it."""
    from xml.etree import ElementTree  # it writes only, and never reads what a stranger wrote

    counts = {name: str(_count(checks, outcome)) for name, outcome in (("failures", "failure"), ("errors", "error"))}
    counts |= {"skipped": str(_count(checks, "skipped")), "tests": str(len(checks))}
    root = ElementTree.Element("testsuites", {"name": "attention-service", **counts})
    top = ElementTree.SubElement(root, "testsuite", {"name": _legal(suite), **counts, "time": "0"})
    for check in checks:
        attributes = {"classname": _legal(suite), "name": _legal(check.name), "time": "0"}
        case = ElementTree.SubElement(top, "testcase", attributes)
        if check.outcome != "passed":
            inner = ElementTree.SubElement(case, check.outcome, {"message": _legal(check.message)})
            inner.text = _legal(check.details or check.message)
    ElementTree.indent(root)
    text: bytes = ElementTree.tostring(root, encoding="us-ascii", xml_declaration=True)
    return text.decode()


def as_github(suite: str, checks: Sequence[Check]) -> str:
    """An annotation for each check that failed, one for all that were skipped if nothing was judged, and the counts."""
    wrong = [check for check in checks if check.outcome in ("failure", "error")]
    lines = [_command("error", f"{suite}: {check.name}", check.details or check.message) for check in wrong]
    passed = _count(checks, "passed")
    if not wrong and not passed:
        lines = [_command("warning", suite, checks[0].message if checks else "there is nothing to judge")]
    skipped = len(checks) - passed - len(wrong)
    lines.append(printable(f"{suite}: {passed} passed, {len(wrong)} failed, {skipped} skipped"))
    return "\n".join(lines)


def _command(name: str, title: str, message: str) -> str:
    """A workflow command, escaped as `escapeProperty` and `escapeData` of @actions/core do (command.ts)."""
    return f"::{name} title={_escaped(title).replace(':', '%3A').replace(',', '%2C')}::{_escaped(message)}"


def _escaped(text: str) -> str:
    return _legal(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _legal(text: str) -> str:
    return ILLEGAL.sub("\ufffd", text)


def _count(checks: Sequence[Check], outcome: str) -> int:
    return sum(check.outcome == outcome for check in checks)


# What writes checks, by the name of the format.
FORMATS: Final[dict[str, Callable[[str, Sequence[Check]], str]]] = {"junit": as_junit, "github": as_github}
