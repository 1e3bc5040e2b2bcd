"""What assert_attention() does with a report."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from attention_service.schemas.compare import CompareReport

if TYPE_CHECKING:  # loaded with comparisons
    from attention_service.comparison.truth import Question


class _Reported(AssertionError):
    """An assertion that failed, with all that is known. report: that `print` shows as a whole"""

    def __init__(self, message: str, report: CompareReport) -> None:
        super().__init__(message)
        self.report = report


class WrongOutput(_Reported):
    """What a kernel returned is wrong or imprecise."""


class WeakInputs(_Reported):
    """Nothing wrong was seen, but the inputs cannot show whether an option of the request is applied."""


def checked(
    report: CompareReport,
    must_show: str | None,
    question: Callable[[], Question] | None = None,
    *,
    takes_tensors: bool = False,
) -> CompareReport:
    """The report of an output that is not known to be wrong. must_show: options or None, see assert_attention

    question: returns that which the report answers, None for a call; takes_tensors: as of next_command

    Errors: WrongOutput for one that is wrong or imprecise, WeakInputs.
    """
    __tracebackhide__ = True  # pytest then shows the line of the test
    # Where a report is, comparisons are loaded, which `attend` does without.
    from attention_service.comparison.next_command import next_command
    from attention_service.comparison.text import in_short

    def then() -> str | None:
        return next_command(report, None if question is None else question(), takes_tensors=takes_tensors)

    if report.verdict.status in ("imprecise", "wrong"):
        raise WrongOutput(in_short(report, then()), report)
    if must_show and report.power.options:
        unseen, command = ", ".join(report.power.options), then()
        more = "" if command is None else f"\n  next: {command}"
        raise WeakInputs(f"Nothing wrong was seen; these inputs cannot show: {unseen}{more}", report)
    return report
