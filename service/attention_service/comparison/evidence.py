"""Evidence: what a kernel returned for a sample, beside what is right; and how well a mistake explains it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from threading import Event
from typing import Final

import numpy as np

from attention_service.backends.base import Check
from attention_service.comparison.baseline import CORRECT, Arrays, arrays_of, baselines
from attention_service.comparison.candidates import Candidate, ratio, unexplained
from attention_service.comparison.case import INEXPRESSIBLE, Case
from attention_service.comparison.errors import distance, distances
from attention_service.comparison.row_errors import RowErrors, judges_rows, legal_rows, mean_squares, rows_show
from attention_service.comparison.sample import Sample, blocks, everything
from attention_service.comparison.solve import solve

# A mistake is proved only if the reference is so many times further from the output than the mutant is.
PROOF: Final = 10.0
# Hypotheses below this share of the error explained are not told.
LEAST: Final = 0.5
ALMOST: Final = 0.9
# Coarse rounding that makes so many times the error of an output does not explain it.
OVERSIZED: Final = 4.0
# Below this share of the error explained the baseline of the mutant is not worth computing.
CLOSE: Final = 0.8
# Weights below this tell nothing of the scale of their scores.
LITTLE: Final = 1e-3


@dataclass(frozen=True)
class Hypothesis:
    """A mistake, or several, that may explain an output.

    also:      names of other mistakes that have the same answer to this request
    explained: 1 - |actual - mutant|² / |actual - reference|², or / |actual|² if that is less; for coarse rounding the
               share of the size of the error; the least of the wrong arrays, or of those of `part`
    ratio:     distance of the output to that of the mutant, in baselines: the mutant's own for the best hypotheses
    is_proof:  True if each array is within two baselines of the mutant's, one of them is ten times closer to it than to
               the reference, and no mistake is one of rounding. In a report also: if this holds on all rows, which is
               checked for the first three; after one holds, no other is a proof.
    part:      the wrong arrays that it explains, if it does not explain others; empty if it is one of all
    """

    candidate: Candidate
    explained: float
    ratio: float
    is_proof: bool
    also: tuple[str, ...] = ()
    part: tuple[str, ...] = ()

    @property
    def is_told(self) -> bool:
        """True if it explains enough, or as much as rounding leaves of a small error."""
        return self.explained >= LEAST or (self.ratio <= CORRECT and self.explained > 0)

    @property
    def is_close(self) -> bool:
        """True if it explains almost all: if it explains less, there is likely another mistake."""
        return self.explained >= ALMOST or self.ratio <= CORRECT

    @property
    def rank(self) -> tuple[bool, bool, int, int, int, float]:
        """The order of hypotheses: proofs, then what explains enough to be told, with fewer mistakes first.

        What explains all wrong arrays comes before what explains the output alone, and that before other arrays.

        Rounding explains by chance what is nearly right: it comes after what explains almost all, but before a factor
        of the output that leaves some, as rounding may make all numbers too small, too.
        """
        is_loose = "output.scaled" in self.candidate.names and self.ratio > CORRECT
        place = 1 if self.candidate.rounds else 0 if self.is_close and not is_loose else 2
        of = 0 if not self.part else 1 if "output" in self.part else 2
        return not self.is_proof, not self.is_told, of, len(self.candidate.names), place, -self.explained


@dataclass(frozen=True)
class Evidence:
    """An output for a sample: what the kernel returned, what is right, and the baselines.

    wrong: the names of the arrays that are wrong on all rows; the others are right
    squares: of the errors of each legal rounding, of the arrays whose rows are judged, see `legal_squares`
    """

    case: Case
    sample: Sample
    actual: Arrays
    right: Arrays
    baselines: Mapping[str, float]
    wrong: frozenset[str]
    squares: Mapping[str, list[np.ndarray]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        case: Case,
        sample: Sample,
        actual: Arrays | None,
        names: Collection[str] = (),
        wrong: frozenset[str] = frozenset(),
    ) -> Evidence:
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
        return cls(case, sample, sent, right, limits, wrong & right.keys(), squares)

    def of_seen(self, far: Iterable[str]) -> Evidence:
        """The evidence without wrong arrays that are right in the sample, unless all are: baselines of a sample differ.

        far: those whose largest error is wrong
        """
        limits = {name: CORRECT * self.baselines[name] for name in far if name in self.wrong}
        right = {name for name, most in limits.items() if distance(self.actual[name], self.right[name]) <= most}
        return replace(self, wrong=self.wrong - right or self.wrong)

    def answer(self, names: tuple[str, ...], case: Case) -> Candidate:
        """The candidate that a wrong case is."""
        return Candidate(names, case, {**self.right, **arrays_of(solve(case, self.sample), self.right)})

    def unexplained(self, arrays: Arrays) -> float:
        """The squared error of the wrong arrays that is left beside those of a mutant, in baselines."""
        return sum(self._left(arrays).values())

    def _left(self, arrays: Arrays) -> dict[str, float]:
        """The squared error that is left of each wrong array, in baselines: in a sum one may hide the others."""
        names = (name for name in self.actual if name in self.wrong and name in arrays)
        return {name: unexplained({name: self.actual[name]}, arrays, self.baselines) for name in names}

    def contradicts(self, candidate: Candidate) -> bool:
        """True if a mistake would change an array that is right: the kernel did not make it."""
        return any(
            distance(candidate.arrays[name], self.right[name]) > 2 * CORRECT * self.baselines[name]
            for name in self.actual.keys() - self.wrong
        )

    def judge(self, candidate: Candidate) -> Hypothesis:
        """The hypothesis that a candidate is, by the baselines of the reference."""
        if candidate.rounds:
            return self._judged(candidate, self._share_of_size(candidate), self.baselines)
        left, of_right = self._left(candidate.arrays), self._left(self.right)
        if "output" in of_right:  # what makes all numbers small explains the error of small ones, but not what was sent
            of_sent = self._left({"output": np.zeros(self.right["output"].shape)})["output"]
            of_right["output"] = min(of_right["output"], max(of_sent, CORRECT))
        shares = {name: 1 - left[name] / error if error else 0.0 for name, error in of_right.items()}
        part = explained_part(shares)
        if part:
            others = {name: self.right[name] for name in candidate.arrays.keys() - {*part}}
            case = candidate.case.changed(INEXPRESSIBLE, detail=f"{' and '.join(part)} only")
            candidate = replace(candidate, case=case, arrays={**candidate.arrays, **others})
        explained = min((shares[name] for name in part or shares), default=0.0)
        return self._judged(candidate, explained, self.baselines, part)

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

    def refined(self, one: Hypothesis) -> Hypothesis:
        """A hypothesis by the baselines of its own case, which are larger where its scores are."""
        if one.ratio <= CORRECT / 2 or one.explained < CLOSE or one.part:
            return one
        own = baselines(one.candidate.case, self.sample, one.candidate.arrays, self.case.dtype)
        return self._judged(one.candidate, one.explained, own)

    def _judged(
        self, candidate: Candidate, explained: float, limits: Mapping[str, float], part: tuple[str, ...] = ()
    ) -> Hypothesis:
        found = ratio(self.actual, candidate.arrays, limits)
        is_closer = any(self._is_closer(candidate, name) for name in self.actual)
        proves = found <= CORRECT and is_closer and not (candidate.rounds or part) and self._can_prove(candidate)
        # Beyond all usual rounding another mistake may be as close by chance, but hardly in the mean of rows.
        proves = proves and (found <= 1 or self._rows_are_legal(candidate))
        return Hypothesis(candidate, explained, found, proves, part=part)

    def _rows_are_legal(self, candidate: Candidate) -> bool:
        """True if the rows of all wrong arrays that are judged by rows are legal beside a candidate."""
        arrays = candidate.arrays
        squares = {name: mean_squares(self.actual[name], arrays[name], unknown=0.0) for name in self.legal}
        return not rows_show(squares, self.legal)

    def _can_prove(self, candidate: Candidate) -> bool:
        """False for one query and one key, which many mistakes agree on, and where a fitted number explains no more
        than one other: a single wrong number, or wrong rows with one free weight, as one key of a row has the rest."""
        sizes = self.case.plan.sizes
        if not candidate.is_fitted:
            return sizes.key_length > 1 or sizes.query_length > 1
        weights = solve(candidate.case, self.sample).weights
        if weights is None:
            return False
        free = np.count_nonzero(np.abs(weights) > LITTLE, axis=-1) - 1  # b h r
        wrong, numbers = np.zeros(free.shape, bool), 0
        for name, array in self.actual.items():
            apart = distances(array, self.right[name]) > CORRECT * self.baselines[name]
            numbers += int(np.count_nonzero(apart))
            wrong |= apart if apart.ndim == 3 else apart.any(axis=-1)
        # Rows that are all too large by one number may have different ones: the sums that they are divided by.
        is_one = "output.scaled" in candidate.names and int(wrong.sum()) < 2
        return numbers > 1 and not is_one and int(np.maximum(free, 0)[wrong].sum()) > 1

    def _share_of_size(self, candidate: Candidate) -> float:
        """How much of the size of the error coarse rounding makes: its errors differ with the order of the sums."""
        shares = []
        for name in self.wrong:
            error = ratio({name: self.actual[name]}, self.right, self.baselines)
            made = ratio({name: candidate.arrays[name]}, self.right, self.baselines)
            is_likely = math.isfinite(error) and made < OVERSIZED * error
            shares.append(min(1.0, CORRECT * made / error) if is_likely and error else 0.0)
        return min(shares, default=0.0)

    def _is_closer(self, candidate: Candidate, name: str) -> bool:
        """True if the mutant is ten times closer to the output than the reference is."""
        if not np.isfinite(self.actual[name]).any():
            return False  # many mistakes make nothing but NaN
        to_mutant = distance(self.actual[name], candidate.arrays[name])
        return to_mutant * PROOF < distance(self.actual[name], self.right[name])


def explained_part(shares: Mapping[str, float]) -> tuple[str, ...]:
    """The wrong arrays that a mistake explains almost all of, if it does not explain others; none if it is one of all.

    shares: of the error of each wrong array that the mistake explains
    """
    if all(share >= LEAST for share in shares.values()):
        return ()
    return tuple(name for name, share in shares.items() if share >= ALMOST)


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


def joined(hypotheses: list[Hypothesis], evidence: Evidence, count: int) -> list[Hypothesis]:
    """The best of ranked hypotheses, those joined whose answers differ by no more than legal rounding.

    Of one mistake that only resembles in several ways, the best way is kept.
    Of joined ones that of rows that see no key stands first: a finite mask is only found where other rows show it.
    """
    kept: list[Hypothesis] = []
    for one in hypotheses:
        name = " and ".join(one.candidate.names)
        if not one.is_proof and any(other.candidate.names == one.candidate.names for other in kept):
            continue
        for place, other in enumerate(kept):
            if ratio(one.candidate.arrays, other.candidate.arrays, evidence.baselines) <= CORRECT:
                known = (" and ".join(other.candidate.names), *other.also)
                if name.startswith("empty.") > known[0].startswith("empty.") and one.is_proof == other.is_proof:
                    kept[place] = replace(one, also=known)
                elif name not in known:
                    kept[place] = replace(other, also=(*other.also, name))
                break
        else:
            if len(kept) == count:
                break
            kept.append(one)
    return kept
