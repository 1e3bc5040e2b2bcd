"""The report that `compare` returns: `print` shows it as text, notebooks also where an array is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from pydantic import PrivateAttr

from attention_service.comparison.actual import axes_of, canonical, is_gradient, read_actual
from attention_service.comparison.calls.compare import CallComparison
from attention_service.comparison.calls.report import make_call_report
from attention_service.comparison.engine.comparison import Comparison
from attention_service.comparison.errors import distances
from attention_service.comparison.next_command import next_command
from attention_service.comparison.places import plural_of
from attention_service.comparison.report import make_report
from attention_service.comparison.rules import CORRECT, IMPRECISE
from attention_service.comparison.text import as_text
from attention_service.comparison.truth import Question
from attention_service.schemas.compare import CompareReport

if TYPE_CHECKING:  # drawing is imported when it is asked for
    from attention_service.render.drawing import Drawing

# Hypotheses that `repr` names, at most.
NAMED: Final = 3
# Cells on each side of the picture, at most, and the pixels of its longer side, about.
MOST: Final = 64
SIDE: Final = 256
# What is right, imprecise and wrong: grey, amber, red.
COLOURS: Final = np.array([(209, 217, 224, 255), (230, 159, 0, 255), (178, 24, 43, 255)], np.uint8)


class Wrong(NamedTuple):
    """Where an array is wrong. grid: the largest errors in its last two axes, in baselines, at most MOST by MOST"""

    title: str
    grid: np.ndarray


class Report(CompareReport):
    """The report of a comparison in this process."""

    _wrong: Wrong | None = PrivateAttr(None)
    _next: str | None = PrivateAttr(None)

    @classmethod
    def of(cls, comparison: Comparison[Question], *, takes_tensors: bool = False) -> Report:
        """The report of a comparison. takes_tensors: as of next_command"""
        report = make_report(comparison)
        found = cls.model_construct(report.model_fields_set, **report.__dict__)
        found._wrong = _wrong(comparison)
        found._next = next_command(report, comparison.question, takes_tensors=takes_tensors)
        return found

    @classmethod
    def of_call(cls, comparison: CallComparison) -> Report:
        """The report of a comparison of a call."""
        report = make_call_report(comparison)
        found = cls.model_construct(report.model_fields_set, **report.__dict__)
        found._next = next_command(report)
        return found

    @property
    def next_command(self) -> str | None:
        """The command that goes on from the report, or why there is none; None if nothing is left open."""
        return self._next

    def __str__(self) -> str:
        return as_text(self, self._next)

    def __repr__(self) -> str:
        """The verdict: a line with the status and the first hypotheses by name, and a line with the message."""
        ratio = "" if self.verdict.ratio is None else f", ratio {self.verdict.ratio:.3g}"
        array = f" in {self.where[0].array}" if self.where else ""
        names = self._first_names()
        best = f", {self.hypotheses[0].certainty}: {', '.join(names)}" if names else ""
        return f"CompareReport({self.verdict.status}{array}{ratio}{best})\n  {self.verdict.message}"

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """What rich shows of a report, which never calls `repr`: no more than that says, in place of all fields."""
        yield "verdict", self.verdict
        yield "hypotheses", self._first_names()

    def _first_names(self) -> list[str]:
        """The names of the first hypotheses, as far as they are as certain as the very first."""
        first = self.hypotheses[:NAMED]
        return [hypothesis.name for hypothesis in first if hypothesis.certainty == first[0].certainty]

    def _repr_html_(self) -> str:
        """What Jupyter, VS Code and Colab show."""
        from attention_service.render.svg import to_svg

        picture = "" if self._wrong is None else f"<div>{to_svg(_picture(self._wrong))}</div>"
        return f"{picture}<pre>{escape(str(self))}</pre>"

    def _repr_png_(self) -> bytes | None:
        """What notebooks show as LaTeX and PDF, which take no HTML."""
        from attention_service.render.png import to_png

        return None if self._wrong is None else to_png(_picture(self._wrong))


@np.errstate(all="ignore")
def _wrong(comparison: Comparison[Question]) -> Wrong | None:
    """Where the first array is wrong that is; None if none is."""
    plan, sent = comparison.question.plan, comparison.question.actual or {}
    if not comparison.where:
        return None
    name, limit = comparison.where[0].array, comparison.judged[comparison.where[0].array].limit
    if is_gradient(name):
        errors = distances(sent[name].astype(np.float64), comparison.reference[name]) / limit
        axes = ["row", "number"][: max(0, 2 - errors.ndim)] + (comparison.where[0].axes or [])
        *others, down, across = axes
        errors = errors.reshape((1,) * (2 - errors.ndim) + errors.shape)
    else:
        actual = read_actual({name: sent[name]}, plan, base2=comparison.question.base2).as_sent[name]
        errors = canonical(distances(actual, comparison.reference[name]), name, plan) / limit
        *others, down, across = axes_of(name, plan)
    grid = errors.reshape(-1, *errors.shape[-2:]).max(axis=0)
    title = f"{name}: {plural_of(down)} down, {plural_of(across)} across, {grid.shape[0]} × {grid.shape[1]}"
    for axis, length in enumerate(grid.shape):
        if length > MOST:
            grid = np.maximum.reduceat(grid, np.arange(MOST) * length // MOST, axis=axis)
    said = f". Red: wrong in any {' or '.join(others)}" if others else ". Red: wrong"
    return Wrong(f"{title}{said}", grid)


def _picture(wrong: Wrong) -> Drawing:
    """The picture."""
    from attention_service.render.drawing import Cells, Drawing, Shape, Text, text_width

    rows, columns = wrong.grid.shape
    cell = max(2, SIDE // max(rows, columns, SIDE // 16))
    pixels = COLOURS[np.digitize(wrong.grid, (CORRECT, IMPRECISE), right=True)]
    shapes: list[Shape] = [Text(0, 14, wrong.title, 12), Cells(0, 22, pixels, cell)]
    width = max(text_width(wrong.title, 12), columns * cell)
    return Drawing(width, 24 + rows * cell, wrong.title, shapes)
