"""What assert_attention() does with a report."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # loaded with comparisons
    from attention_service.library.report import Report
    from attention_service.schemas.compare import CompareReport


class _Reported(AssertionError):
    """An assertion that failed, with all that is known. report: that `print` shows as a whole"""

    def __init__(self, message: str, report: CompareReport) -> None:
        super().__init__(message)
        self.report = report


class WrongOutput(_Reported):
    """What a kernel returned is wrong or imprecise."""


class WeakInputs(_Reported):
    """Nothing wrong was seen, but the inputs cannot show whether an option of the request is applied."""


def checked(report: Report, must_show: str | None) -> Report:
    """The report of an output that is not known to be wrong. must_show: options or None, see assert_attention

    Errors: WrongOutput for one that is wrong or imprecise, WeakInputs.
    """
    __tracebackhide__ = True  # pytest then shows the line of the test
    # Where a report is, comparisons are loaded, which `attend` does without.
    from attention_service.comparison.text import in_short

    if report.verdict.status in ("imprecise", "wrong"):
        raise WrongOutput(in_short(report, report.next_command), report)
    if must_show and report.power.options:
        unseen = ", ".join(report.power.options)
        more = "" if report.next_command is None else f"\n  next: {report.next_command}"
        raise WeakInputs(f"Nothing wrong was seen; these inputs cannot show: {unseen}{more}", report)
    return report
