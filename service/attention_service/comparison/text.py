"""A report as text, for terminals and test failures."""

from __future__ import annotations

from collections.abc import Iterator

from attention_service.comparison.places import in_words
from attention_service.schemas.compare import AgainstReport, CompareReport


def as_text(report: CompareReport) -> str:
    """The report, a few lines for each part that has something to say."""
    return "\n".join(_lines(report))


def _lines(report: CompareReport) -> Iterator[str]:
    verdict = report.verdict
    ratio = "" if verdict.ratio is None else f" (ratio {verdict.ratio:.3g})"
    yield f"{verdict.status}{ratio}: {verdict.message}"
    if report.errors:
        yield ""
        yield f"{'':20} {'max_abs':>10} {'baseline':>10} {'rmse':>10} {'max ulp':>10} {'non-finite':>10}"
    for name, errors in report.errors.items():
        baseline = report.baseline[name]
        ulps = None if errors.ulp is None else errors.ulp.max
        numbers = (errors.max_abs, baseline.limit, errors.rmse, ulps)
        yield f"{name:20} {' '.join(map(_number, numbers))} {errors.non_finite:10}"
    yield from _part("where", (place.message for place in report.where))
    yield from _part("worst", _worst(report))
    yield from _part("facts", (fact.message for fact in report.facts))
    yield from _part("hypotheses", _hypotheses(report))
    yield from _part("tests", _tests(report))
    if report.against is not None:
        yield from _part("against", iter([report.against.message, *_hypotheses(report.against)]))
    yield from _part("power", _power(report))


def _part(title: str, lines: Iterator[str]) -> Iterator[str]:
    found = list(lines)
    if found:
        yield ""
        yield f"{title}:"
        yield from (f"  {line}" for line in found)


def _number(number: float | None) -> str:
    return f"{'-' if number is None else format(number, '.3g'):>10}"


def _worst(report: CompareReport) -> Iterator[str]:
    for place in report.where:
        for one in place.worst or ():
            at = ", ".join(f"{axis} {index}" for axis, index in zip(place.axes or (), one.index, strict=True))
            yield f"{place.array} at {at}: {_value(one.actual)} where {_value(one.reference)} is right"


def _value(number: float | None) -> str:
    return "not a finite number" if number is None else f"{number:.8g}"


def _hypotheses(report: CompareReport | AgainstReport) -> Iterator[str]:
    for one in report.hypotheses:
        but = "" if one.certainty == "proof" else ", but is not proved"
        yield f"{one.certainty}: {one.name}, which explains {one.explained:.2%} of the error{but}"
        yield f"  {one.message}"
        if one.also:
            yield f"  the same here: {', '.join(one.also)}"
        if one.change:
            yield f"  the request would say: {one.change}"


def _tests(report: CompareReport) -> Iterator[str]:
    for test in report.tests:
        said = {True: "passes", False: "fails", None: "-"}[test.passes]
        missed = f"; it would accept {len(test.misses)} known mistakes here" if test.misses else ""
        yield f"{test.name}: {said}{missed}"


def _power(report: CompareReport) -> Iterator[str]:
    found = report.power
    if not found.mutants:
        return
    yield f"this request shows {found.killed} of {found.mutants} known mistakes"
    partly = {name: tuple(found.tiles.get(name, ())) for name in found.survivors}
    for shown in sorted({*partly.values()}):
        names = ", ".join(name for name, tiles in partly.items() if tiles == shown)
        runs = [[tile] for tile in shown]
        said = f"shown only if the kernel's tiles have {in_words(runs, 'or')} keys" if runs else "not shown"
        yield f"{said}: {names}"
    yield from found.weak
    if report.next_input is not None:
        yield f"next input: seed {report.next_input.seed} shows {', '.join(report.next_input.kills)}"
        if report.next_input.note:
            yield f"  {report.next_input.note}"
