"""A report as text, for terminals and test failures."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from textwrap import shorten
from typing import Any, Final

from attention_service.comparison.case import TILES
from attention_service.comparison.places import in_words
from attention_service.comparison.rules import CORRECT
from attention_service.schemas.compare import AgainstReport, CompareReport

# Hypotheses, facts and lines of mistakes not shown that the short text has, at most: with them it has twelve lines.
HYPOTHESES: Final = 2
FACTS: Final = 3
SURVIVORS: Final = 8
# Characters of the change of a request, at most.
CHANGE: Final = 120


def as_text(report: CompareReport, next_command: str | None = None) -> str:
    """All of the report, a few lines for each part that has something to say, and the next command."""
    lines = [*_lines(report)]
    return "\n".join(lines if next_command is None else [*lines, "", f"next: {next_command}"])


def in_short(report: CompareReport, next_command: str | None = None) -> str:
    """What is wrong and where, in at most twelve lines with the next command: for failing tests and terminals."""
    lines = [_headline(report), *(f"  {line}" for line in _short_lines(report))]
    return "\n".join(lines if next_command is None else [*lines, f"  next: {next_command}"])


def _headline(report: CompareReport) -> str:
    """The status, and the message of the verdict without the word that says the same."""
    status, message = report.verdict.status, report.verdict.message
    for word in ("Wrong: ", "Imprecise: ", "Right: "):
        message = message.removeprefix(word)
    return f"{status}: {message[0].lower()}{message[1:]}"


def _short_lines(report: CompareReport) -> Iterator[str]:
    is_wrong = report.verdict.status in ("wrong", "imprecise")
    for one in report.hypotheses[:HYPOTHESES]:
        share = f"{math.floor(100 * one.explained)}% of the error: {one.message.removesuffix('.')}"
        more = [f"{one.name}, {share}" if one.certainty == "resembles" else one.name]
        same = f"the same here: {', '.join(one.also)}"
        more += [same] if one.also and same.lower() not in report.verdict.message.lower() else []
        change = shorten(str(_in_digits(one.change)), CHANGE, placeholder=" …")
        more += [f"the request would say: {change}"] if one.change else []
        yield f"{one.certainty}: {'; '.join(more)}"
    is_said = is_wrong and not any(one.certainty == "proof" for one in report.hypotheses)  # the first, in the verdict
    yield from (f"fact: {fact.message}" for fact in report.facts[is_said:][:FACTS])
    places = [place.message for place in report.where if place.message not in report.verdict.message]
    if places:
        yield f"where: {'; '.join(places)}"
    yield from (f"worst: {line}" for line in itertools.islice(_worst(report), 1))
    if is_wrong and (errors := [line for name in report.errors for line in _error(report, name)]):
        yield f"error: {'; '.join(errors)}"
    if report.against is not None:
        yield f"against: {report.against.message}"
    if report.power.mutants and report.verdict.status == "correct":
        yield from _shown(report)
    if not report.errors:  # what it can show is what was asked for
        yield from itertools.islice(_survivors(report), SURVIVORS)
    if report.power.weak:
        yield f"these inputs hide mistakes: {'; '.join(report.power.weak)}"


def _in_digits(value: Any) -> Any:
    """A value with eight digits of its numbers."""
    if isinstance(value, dict):
        return {name: _in_digits(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_in_digits(item) for item in value]
    return float(f"{value:.8g}") if isinstance(value, float) else value


def _error(report: CompareReport, name: str) -> Iterator[str]:
    """How large the error of an array is that is wrong."""
    errors, limit = report.errors[name], report.baseline[name].limit
    if errors.non_finite:
        yield f"{name} infinite or NaN where another number is right, or the reverse, in {errors.non_finite} elements"
    elif errors.max_abs is not None and errors.max_abs > CORRECT * limit:
        yield f"{name} {errors.max_abs:.3g}, {errors.max_abs / limit:.3g} times the baseline {limit:.3g}"


def _lines(report: CompareReport) -> Iterator[str]:
    yield _headline(report)
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
        count = "1 known mistake" if len(test.misses) == 1 else f"{len(test.misses)} known mistakes"
        missed = f"; with these inputs, {count} would pass it" if test.misses else ""
        yield f"{test.name}: {said}{missed}"


def _power(report: CompareReport) -> Iterator[str]:
    found = report.power
    if not found.mutants:
        return
    yield from _shown(report)
    yield from _survivors(report)
    yield from found.weak
    if report.next_input is not None:
        yield f"next input: seed {report.next_input.seed} shows {', '.join(report.next_input.kills)}"
        if report.next_input.note:
            yield f"  {report.next_input.note}"


def _shown(report: CompareReport) -> Iterator[str]:
    """How many of the known mistakes the request shows, and which tiles are too large for it."""
    yield f"this request shows {report.power.killed} of {report.power.mutants} known mistakes"
    lengths = [(report.metadata.get(f"{name}_length"), noun) for name, noun in (("query", "queries"), ("key", "keys"))]
    least = [(next((tile for tile in TILES if tile >= length), None), noun) for length, noun in lengths if length]
    if short := [f"{tile} {noun} or more" for tile, noun in least if tile is not None]:
        yield f"it is too short for mistakes between tiles of {', or of '.join(short)}"


def _survivors(report: CompareReport) -> Iterator[str]:
    """The known mistakes that the request does not show."""
    found = report.power
    partly = {name: tuple(found.tiles.get(name, ())) for name in found.survivors}
    for shown in sorted({*partly.values()}):
        names = ", ".join(name for name, tiles in partly.items() if tiles == shown)
        runs = [[tile] for tile in shown]
        said = f"shown only if the kernel's tiles have {in_words(runs, 'or')} keys" if runs else "not shown"
        yield f"{said}: {names}"
