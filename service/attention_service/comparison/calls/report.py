"""From the comparison of a call to its report."""

from __future__ import annotations

from typing import Any

from attention_service.comparison.calls.compare import CallComparison
from attention_service.comparison.report import make_report
from attention_service.pipeline.calls import sizes_of
from attention_service.schemas.compare import CompareReport, ReportedPower, Verdict
from attention_service.version import __version__

# Options of a padded batch, which no call has.
PADDING = frozenset({"query_lengths", "key_lengths"})


def make_call_report(found: CallComparison, request_id: str | None = None) -> CompareReport:
    """The report of a comparison of a call."""
    sizes = sizes_of(found.question.addressed)._asdict()
    about: dict[str, Any] = {"call": found.question.function, "ignored_rows": found.question.ignored, **sizes}
    if found.worst is None:
        return _of_nothing(found, about | ({} if request_id is None else {"request_id": request_id}))
    report = make_report(found.worst, request_id)
    power = report.power
    power.weak += found.unseen
    power.options = [name for name in power.options if name not in PADDING]
    verdict = report.verdict
    verdict.message = " ".join([verdict.message, *_sentences(found)])
    report.metadata.pop("fully_masked_rows", None)  # of the part
    of_call = {"where": found.places, "next_input": None, "reference": found.reference}
    return report.model_copy(update=of_call | {"metadata": report.metadata | about})


def _sentences(found: CallComparison) -> list[str]:
    """What is said of the whole call beside the verdict."""
    said = []
    if found.places:
        place = found.places[0].message
        said.append(f"{place[0].upper()}{place[1:]}.")
    if found.question.ignored:
        said.append(f"{found.question.ignored} rows that belong to no sequence were not judged.")
    return said


def _of_nothing(found: CallComparison, about: dict[str, Any]) -> CompareReport:
    """The report of a call whose sequences have no queries. An empty answer, whose shape is right, is right."""
    if found.question.actual is None or found.question.ignored:
        message = " ".join(["Not judged: no sequence has a query.", *_sentences(found)])
        verdict = Verdict(status="inconclusive", ratio=None, message=message)
    else:
        verdict = Verdict(status="correct", ratio=0.0, message="Right: no sequence has a query, and nothing came back.")
    return CompareReport(
        verdict=verdict,
        errors={},
        baseline={},
        tests=[],
        where=[],
        hypotheses=[],
        facts=[],
        power=ReportedPower(mutants=0, killed=0, survivors=[], indistinguishable=[], tiles={}, options=[]),
        next_input=None,
        reference=None if found.reference is None else dict(found.reference),
        metadata={"dtype": found.question.dtype.name, "version": __version__} | about,
    )
