"""The error of a right kernel: what legal rounding in the caller's type explains."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Final

import numpy as np

from attention_service.attention.arrays import compute_dtype
from attention_service.comparison.case import Case
from attention_service.comparison.errors import distance, largest, ulp
from attention_service.comparison.floors import floors, right_weights
from attention_service.comparison.legal import legal_roundings
from attention_service.comparison.problem import Answer, rounded
from attention_service.comparison.rules import TINY, Arrays
from attention_service.comparison.sample import Sample
from attention_service.comparison.solve import solve

# The arrays that kernels return and mutants change, and the attributes of an Answer that hold them.
FIELDS: Final = {"output": "output", "logsumexp": "logsumexp", "attention_weights": "weights"}


def rounded_cases(case: Case, dtype: np.dtype) -> list[Case]:
    """The case with each legal rounding; the plain one first."""
    roundings = legal_roundings(dtype, case.liberties, changes=any(case.steps.values()))
    return [replace(case, rounding=rounding) for rounding in roundings]


def arrays_of(answer: Answer, names: Collection[str]) -> dict[str, np.ndarray]:
    """The arrays of an answer that have one of these names."""
    found = {name: getattr(answer, FIELDS[name]) for name in FIELDS if name in names}
    return {name: array for name, array in found.items() if array is not None}


def baselines(
    case: Case, sample: Sample, right: Arrays, dtype: np.dtype, see: Callable[[Arrays], None] | None = None
) -> dict[str, float]:
    """The largest error that legal rounding explains, of each array of a sample.

    right: the arrays of the case in float64. A fourth of the unit in the last place is added to `legal_errors`.
    see: as of `legal_errors`
    """
    errors = legal_errors(case, sample, right, dtype, see)
    return {name: limit(error, 0.0, right[name], stored_dtype(name, dtype)) for name, error in errors.items()}


def legal_errors(
    case: Case, sample: Sample, right: Arrays, dtype: np.dtype, see: Callable[[Arrays], None] | None = None
) -> dict[str, float]:
    """The largest error of legal rounding, of each array of a sample; at least the floor (see `floors`).

    see: gets what each of `rounded_cases` returns
    """
    cases = rounded_cases(case, dtype)

    def answered(variant: Case) -> tuple[dict[str, np.ndarray], dict[str, float]]:
        answer = solve(variant, sample)
        least = floors(case, variant, sample, right, right_weights(variant, answer)) if variant is cases[0] else {}
        return arrays_of(answer, right), least

    found: dict[str, float] = {}
    for answer, least in case.each(answered, cases):
        found |= least
        stored = {name: rounded(array, stored_dtype(name, dtype)) for name, array in answer.items()}
        if see is not None:
            see(stored)
        for name, array in stored.items():
            apart = distance(array, right[name])
            if np.isfinite(apart):
                found[name] = max(found[name], apart)
    return found


def limit(error: float, floor: float, array: np.ndarray, dtype: np.dtype) -> float:
    """The baseline of a right array: the larger of the error of legal rounding and of its floor, and a fourth of the
    unit in the last place of the largest number. dtype: that kernels return the array in"""
    return max(error, floor) + max(float(ulp(np.array(largest(array)), dtype)) / 4, TINY)


def stored_dtype(name: str, dtype: np.dtype) -> np.dtype:
    """The type in which a kernel returns an array: the logsumexp in the type that it computes in."""
    return compute_dtype(dtype) if name == "logsumexp" else dtype
