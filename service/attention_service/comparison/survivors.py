"""Which mistakes a request cannot show: their answers are right on all of its rows."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from attention_service.backends.base import Check
from attention_service.comparison.baseline import arrays_of
from attention_service.comparison.case import Case
from attention_service.comparison.engine.candidate import Candidate, ratio
from attention_service.comparison.errors import distance
from attention_service.comparison.evidence import Evidence
from attention_service.comparison.row_errors import RowErrors, judges_rows, legal_rows, mean_squares, rows_show
from attention_service.comparison.rules import CORRECT, Arrays
from attention_service.comparison.sample import Sample, blocks, everything
from attention_service.comparison.samples import is_whole
from attention_service.comparison.solve import solve

# Requests of at most so many scores, and products for them and for the outputs, are looked at whole before a mistake is
# called invisible.
CONFIRMED_SCORES: Final = 2**23
CONFIRMED_PRODUCTS: Final = 2**31
# Coarse rounding shows if it is so many times as far off as needed: by its largest error, and in the mean.
SURE: Final = 2.0
SURE_MEAN: Final = 1.15


@dataclass(frozen=True)
class Known:
    """The right arrays of all rows, their baselines, and the legal mean squares of the rows that are judged."""

    right: Arrays
    limits: Mapping[str, float]
    legal: Mapping[str, np.ndarray]


def survivors(
    evidence: Evidence, candidates: list[Candidate[Case]], check: Check, known: Known | None = None
) -> list[Candidate[Case]]:
    """The candidates whose answers do not differ from what is right, on any row nor in the mean of rows.

    known: what is right on all rows, None to compute it
    """
    case, right, limits = evidence.case, evidence.right, evidence.baselines
    rounding = [one for one in candidates if one.rounds]
    legal = legal_rows(case, evidence.sample, evidence.squares, right) if candidates else {}
    alive = [one for one in candidates if not (one.rounds or ratio(one.arrays, right, limits) > CORRECT)]
    alive = [one for one in alive if not rows_show(_squares_of(one.arrays, right, legal), legal)]
    if alive and not is_whole(case, evidence.sample) and _can_confirm(case):
        alive = _alive(case, alive, right, check, known)
    return alive + _unseen_roundings(evidence, rounding, legal)


def _squares_of(arrays: Arrays, right: Arrays, names: Collection[str]) -> dict[str, np.ndarray]:
    """The mean squares of the differences of the rows of some arrays, by name."""
    return {name: mean_squares(arrays[name], right[name]) for name in names}


def _unseen_roundings(
    evidence: Evidence, found: list[Candidate[Case]], legal: Mapping[str, np.ndarray]
) -> list[Candidate[Case]]:
    """The candidates whose coarse rounding may not show: that of a kernel has other errors, larger or smaller ones.

    In the mean of many rows they are alike; where only the largest error is judged, it must be far from legal.
    """
    right = evidence.right

    def shows(one: Candidate[Case]) -> bool:
        if not legal:
            return ratio(one.arrays, right, evidence.baselines) > SURE * CORRECT
        means = (RowErrors(mean_squares(one.arrays[name], right[name], 0.0), legal[name]).mean for name in legal)
        return max(means) > SURE_MEAN

    return [one for one in found if not shows(one)]


def _can_confirm(case: Case) -> bool:
    """True if all rows of a request are few enough to be computed for each mistake that the sample does not show."""
    sizes, scores = case.plan.sizes, case.plan.score_count
    return scores <= CONFIRMED_SCORES and scores * (sizes.head_dim + sizes.value_dim) <= CONFIRMED_PRODUCTS


def _alive(
    case: Case, found: list[Candidate[Case]], names: Collection[str], check: Check, known: Known | None
) -> list[Candidate[Case]]:
    """The candidates whose answers do not differ from the truth on any row, nor in the mean of rows."""
    apart = [dict.fromkeys(names, 0.0) for _ in found]
    limits = dict.fromkeys(names, 0.0)
    whole, sizes = everything(case), case.plan.sizes
    shape = sizes.batch_size, sizes.num_heads, sizes.query_length
    judged = [name for name in names if judges_rows(case, name)]
    legal = {name: np.zeros(shape) for name in judged} if known is None else known.legal
    squares = [{name: np.zeros(shape) for name in judged} for _ in found]
    for block in blocks(case, whole):
        check()
        if known is None:
            of_block = Evidence.of(case, block, None, names)
            right, here = of_block.right, of_block.baselines
            for name, own in legal_rows(case, block, of_block.squares, right).items():
                block.put(legal[name], own)
        else:
            right, here = {name: block.of(known.right[name]) for name in names}, dict(known.limits)
        limits.update({name: max(limits[name], limit) for name, limit in here.items()})
        errors = case.each(partial(_errors, block, right, judged), found)
        for largest, rows, (distances, of_rows) in zip(apart, squares, errors, strict=True):
            largest.update({name: max(largest[name], distance) for name, distance in distances.items()})
            for name, own in of_rows.items():
                block.put(rows[name], own)
    return [
        one
        for one, largest, rows in zip(found, apart, squares, strict=True)
        if all(largest[name] <= CORRECT * limits[name] for name in one.arrays) and not rows_show(rows, legal)
    ]


def _errors(
    block: Sample, right: Arrays, judged: Collection[str], one: Candidate[Case]
) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """How far the answer of a candidate is from the truth in a block, and the rows of the arrays that they judge."""
    arrays = arrays_of(solve(one.case, block), one.arrays)
    return {name: distance(array, right[name]) for name, array in arrays.items()}, _squares_of(arrays, right, judged)
