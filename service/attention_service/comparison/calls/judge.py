"""One part of a call judged: whether what was returned for its sequences is right."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from attention_service.backends.base import Backend, Check
from attention_service.comparison.compare import Comparison, compare_question
from attention_service.comparison.engine.power import no_power
from attention_service.comparison.engine.rules import CORRECT
from attention_service.comparison.rows import compare_rows
from attention_service.comparison.truth import Question, reference_and_baseline


def judge(question: Question, backend: Backend, check: Check, rows: int | None = None) -> Comparison:
    """The comparison without a search for mistakes. rows: see `right`. Errors: as of compare_question."""
    return right(question, backend, check, rows) or _whole(question, backend, check)


def right(question: Question, backend: Backend, check: Check, rows: int | None = None) -> Comparison | None:
    """The comparison of so many rows of each head if they are right, which takes less time; None if they may be wrong.

    rows: None for all. Errors: as of compare_question.
    """
    if not np.isfinite(question.spec.sources["value"]).all():  # whether a query sees it, the whole comparison says
        whole = _whole(question, backend, check)
        return None if is_wrong(whole) else whole
    found = compare_rows(question, backend, rows or sys.maxsize, check)
    return found if found is None or rows else replace(found, rows=None)


def _whole(question: Question, backend: Backend, check: Check) -> Comparison:
    """The whole comparison without a search for mistakes, with its truth."""
    truth = reference_and_baseline(question, backend, check)
    found = compare_question(replace(question, time_limit=0), backend, check, truth)
    return replace(found, ended_early=False, power=no_power(found.tolerances))


def largest_errors(comparison: Comparison) -> Mapping[str, float]:
    """The largest error of each array; infinity for numbers that are infinite or NaN where they should not be."""
    return {
        name: np.inf if one.errors.non_finite else one.errors.max_abs or 0.0 for name, one in comparison.judged.items()
    }


def is_wrong(comparison: Comparison) -> bool:
    """True if an array is not right."""
    return comparison.ratio > CORRECT
