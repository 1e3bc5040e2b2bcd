"""One part of a call judged: whether what was returned for its sequences is right."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from attention_service.backends.base import Backend, Check
from attention_service.comparison.compare import compare_question
from attention_service.comparison.engine.comparison import Comparison
from attention_service.comparison.engine.power import no_power
from attention_service.comparison.rows import compare_rows
from attention_service.comparison.rules import CORRECT
from attention_service.comparison.truth import Question, Truth, reference_and_baseline


def judge(
    question: Question, backend: Backend, check: Check, rows: int | None = None
) -> tuple[Comparison[Question], Truth | None]:
    """The comparison without a search for mistakes, and its truth if all of it was judged.

    rows: see `right`. Errors: as of compare_question.
    """
    found = right(question, backend, check, rows)
    return _whole(question, backend, check) if found is None else (found, None)


def right(question: Question, backend: Backend, check: Check, rows: int | None = None) -> Comparison[Question] | None:
    """The comparison of so many rows of each head if they are right, which takes less time; None if they may be wrong.

    rows: None for all. Errors: as of compare_question.
    """
    if not np.isfinite(question.spec.sources["value"]).all():  # whether a query sees it, the whole comparison says
        whole, _ = _whole(question, backend, check)
        return None if is_wrong(whole) else whole
    found = compare_rows(question, backend, rows or sys.maxsize, check)
    return found if found is None or rows else replace(found, rows=None)


def _whole(question: Question, backend: Backend, check: Check) -> tuple[Comparison[Question], Truth]:
    """The whole comparison without a search for mistakes, with its truth."""
    truth = reference_and_baseline(question, backend, check)
    found = compare_question(replace(question, time_limit=0), backend, check, truth)
    return replace(found, ended_early=False, power=no_power(found.tolerances)), truth


def largest_errors(comparison: Comparison[Question]) -> Mapping[str, float]:
    """The largest error of each array; infinity for numbers that are infinite or NaN where they should not be."""
    return {
        name: np.inf if one.errors.non_finite else one.errors.max_abs or 0.0 for name, one in comparison.judged.items()
    }


def is_wrong(comparison: Comparison[Question]) -> bool:
    """True if an array is not right."""
    return comparison.ratio > CORRECT
