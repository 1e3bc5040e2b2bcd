"""Evidence: what a kernel returned for a sample, beside what is right; and how well a mistake explains it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from threading import Event
from typing import Final, Self

import numpy as np

from attention_service.backends.base import Check
from attention_service.comparison.baseline import arrays_of, baselines
from attention_service.comparison.candidates import candidates, is_fitted, make_candidate
from attention_service.comparison.case import INEXPRESSIBLE, Case
from attention_service.comparison.engine.candidate import Candidate, ratio
from attention_service.comparison.engine.hypothesis import Hypothesis
from attention_service.comparison.engine.subject import S, Subject, T
from attention_service.comparison.errors import distance, distances
from attention_service.comparison.mutants import MUTANTS
from attention_service.comparison.row_errors import RowErrors, judges_rows, legal_rows, mean_squares, rows_show
from attention_service.comparison.rules import CORRECT, Arrays
from attention_service.comparison.sample import Sample, blocks, everything
from attention_service.comparison.solve import solve

# Coarse rounding that makes so many times the error of an output does not explain it.
OVERSIZED: Final = 4.0
# Below this share of the error explained the baseline of the mutant is not worth computing.
CLOSE: Final = 0.8
# Weights below this tell nothing of the scale of their scores.
LITTLE: Final = 1e-3


@dataclass(frozen=True, eq=False)
class Evidence(Subject[Case]):
    """An output for a sample, as a subject.

    squares: of the errors of each legal rounding, of the arrays whose rows are judged, see `legal_squares`
    """

    case: Case
    sample: Sample
    squares: Mapping[str, list[np.ndarray]]

    @classmethod
    def of(
        cls,
        case: Case,
        sample: Sample,
        actual: Arrays | None,
        names: Collection[str] = (),
        wrong: frozenset[str] = frozenset(),
    ) -> Self:
        """The evidence of the rows of a sample.

        actual: canonical arrays of all rows; None if nothing was sent, but arrays of these names would be
        """
        right = arrays_of(solve(case, sample), names if actual is None else actual)
        sent = {} if actual is None else {name: sample.of(actual[name]) for name in right}
        squares: dict[str, list[np.ndarray]] = {name: [] for name in right if judges_rows(case, name)}

        def see(stored: Arrays) -> None:
            for name, own in squares.items():
                own.append(mean_squares(stored[name], right[name]))

        limits = baselines(case, sample, right, case.dtype, see)
        return cls(sent, right, limits, wrong & right.keys(), case, sample, squares)

    def of_seen(self, far: Iterable[str]) -> Self:
        """The evidence without wrong arrays that are right in the sample, unless all are: baselines of a sample differ.

        far: those whose largest error is wrong
        """
        limits = {name: CORRECT * self.baselines[name] for name in far if name in self.wrong}
        right = {name for name, most in limits.items() if distance(self.actual[name], self.right[name]) <= most}
        return replace(self, wrong=self.wrong - right or self.wrong)

    def answer(self, names: tuple[str, ...], case: Case) -> Candidate[Case]:
        """The candidate that a wrong case is."""
        return make_candidate(names, case, {**self.right, **arrays_of(solve(case, self.sample), self.right)})

    def candidates(self, check: Check) -> Iterator[Candidate[Case]]:
        """The answers of all mutants."""
        return candidates(self.case, self.sample, self.right, check)

    def each(self, function: Callable[[S], T], parts: Iterable[S]) -> Iterator[T]:
        """The results of a function for each part, in order, by the threads of the case."""
        return self.case.each(function, parts)

    def is_by_tile(self, name: str) -> bool:
        """True for the name of a mistake of tiles."""
        return MUTANTS[name].by_tile

    @property
    def tiles(self) -> tuple[int, ...]:
        """The sizes of tiles that mistakes of tiles are tried for."""
        return self.case.tiles

    def forget(self) -> None:
        """Drop what was computed for the sample."""
        self.sample.forget()

    def unexplained(self, arrays: Arrays) -> float:
        """The squared error of the wrong arrays that is left beside those of a mutant, in baselines."""
        return sum(self.left(arrays).values())

    def restricted(self, candidate: Candidate[Case], part: tuple[str, ...]) -> Candidate[Case]:
        """A mistake of some of the wrong arrays alone, which no field of a request says."""
        case = candidate.case.changed(INEXPRESSIBLE, detail=f"{' and '.join(part)} only")
        return super().restricted(replace(candidate, case=case), part)

    @cached_property
    def legal(self) -> dict[str, np.ndarray]:
        """The legal mean squares of the rows of the wrong arrays that are judged by rows, see `legal_rows`."""
        squares = {name: own for name, own in self.squares.items() if name in self.wrong}
        return legal_rows(self.case, self.sample, squares, self.right)

    def by_rows(self, one: Hypothesis) -> Hypothesis:
        """A hypothesis that says how much of errors that are too large in the mean of rows alone it explains.

        A mistake explains all of them if rows are legal beside it; coarse rounding as much as it adds to legal errors.
        """
        arrays, shares = one.candidate.arrays, [one.explained]
        for name, legal in self.legal.items():
            squares = mean_squares(self.actual[name], arrays[name])
            if one.candidate.rounds:
                made, sent = (
                    float(np.sum(np.maximum(mean_squares(of[name], self.right[name], 0.0) - legal, 0)))
                    for of in (arrays, self.actual)
                )
                shares.append(made / sent if sent else 1.0)
            elif one.explained > 0 and RowErrors(squares, legal).ratio <= 1:
                shares[0] = 1.0
        return replace(one, explained=min(shares))

    def refined(self, hypothesis: Hypothesis) -> Hypothesis:
        """A hypothesis by the baselines of its own case, which are larger where its scores are."""
        one = hypothesis
        if one.ratio <= CORRECT / 2 or one.explained < CLOSE or one.part:
            return one
        own = baselines(one.candidate.case, self.sample, one.candidate.arrays, self.case.dtype)
        return self._judged(one.candidate, one.explained, ratio(self.actual, one.candidate.arrays, own))

    def _rows_are_legal(self, candidate: Candidate[Case]) -> bool:
        """True if the rows of all wrong arrays that are judged by rows are legal beside a candidate."""
        arrays = candidate.arrays
        squares = {name: mean_squares(self.actual[name], arrays[name], unknown=0.0) for name in self.legal}
        return not rows_show(squares, self.legal)

    def can_prove(self, candidate: Candidate[Case], apart: float) -> bool:
        """False for one query and one key, which many mistakes agree on, and where a fitted number explains no more
        than one other: a single wrong number, or wrong rows with one free weight, as one key of a row has the rest.

        Beyond all usual rounding another mistake may be as close by chance, but hardly in the mean of rows.
        """
        if apart > 1 and not self._rows_are_legal(candidate):
            return False
        sizes = self.case.plan.sizes
        if not is_fitted(candidate):
            return sizes.key_length > 1 or sizes.query_length > 1
        weights = solve(candidate.case, self.sample).weights
        if weights is None:
            return False
        free = np.count_nonzero(np.abs(weights) > LITTLE, axis=-1) - 1  # b h r
        wrong, numbers = np.zeros(free.shape, bool), 0
        for name, array in self.actual.items():
            is_wrong = distances(array, self.right[name]) > CORRECT * self.baselines[name]
            numbers += int(np.count_nonzero(is_wrong))
            wrong |= is_wrong if is_wrong.ndim == 3 else is_wrong.any(axis=-1)
        # Rows that are all too large by one number may have different ones: the sums that they are divided by.
        is_one = "output.scaled" in candidate.names and int(wrong.sum()) < 2
        return numbers > 1 and not is_one and int(np.maximum(free, 0)[wrong].sum()) > 1

    def share_of_size(self, candidate: Candidate[Case]) -> float:
        """How much of the size of the error coarse rounding makes: its errors differ with the order of the sums."""
        shares = []
        for name in self.wrong:
            error = ratio({name: self.actual[name]}, self.right, self.baselines)
            made = ratio({name: candidate.arrays[name]}, self.right, self.baselines)
            is_likely = math.isfinite(error) and made < OVERSIZED * error
            shares.append(min(1.0, CORRECT * made / error) if is_likely and error else 0.0)
        return min(shares, default=0.0)


def holds(one: Hypothesis, evidence: Evidence, actual: Arrays, limits: Mapping[str, float], check: Check) -> bool:
    """True if the distance of an output to a mutant is within its baselines on all rows.

    limits: baselines of the reference on all rows; those of the mutant count for the sample
    """
    case, arrays = one.candidate.case, one.candidate.arrays
    own = baselines(case, evidence.sample, arrays, case.dtype)
    most = {name: CORRECT * max(own[name], limits[name]) for name in arrays}
    is_apart = Event()

    def agrees(block: Sample) -> bool:
        check()
        if not is_apart.is_set():  # in any block
            for name, array in arrays_of(solve(case, block), arrays).items():
                if not distance(block.of(actual[name]), array) <= most[name]:
                    is_apart.set()
        block.forget()
        return not is_apart.is_set()

    return all(evidence.case.each(agrees, blocks(case, everything(case), arrays)))
