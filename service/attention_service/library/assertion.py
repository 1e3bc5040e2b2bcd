"""What assert_attention() does with a report."""

from __future__ import annotations

from attention_service.schemas.compare import CompareReport


class WeakInputs(AssertionError):
    """Nothing wrong was seen, but the inputs cannot show whether an option of the request is applied."""


def checked(report: CompareReport, must_show: str | None) -> CompareReport:
    """The report of an output that is not known to be wrong. must_show: options or None, see assert_attention

    Errors: AssertionError for one that is wrong or imprecise, WeakInputs.
    """
    __tracebackhide__ = True  # pytest then shows the line of the test
    if report.verdict.status in ("imprecise", "wrong"):
        raise AssertionError(str(report))
    if must_show and report.power.options:
        better = report.next_input
        seed = "" if better is None else f"; inputs of seed {better.seed} show {', '.join(better.kills)}"
        unseen = ", ".join(report.power.options)
        raise WeakInputs(f"Nothing wrong was seen; these inputs cannot show: {unseen}{seed} (see report.next_input)")
    return report
