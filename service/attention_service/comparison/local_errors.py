"""Whether an error has a place: rows that are further off than coarse rounding makes them, beside the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from attention_service.comparison.baseline import arrays_of
from attention_service.comparison.case import TILES, Case
from attention_service.comparison.judged import Judged
from attention_service.comparison.mutants.precision import precision_accumulate, precision_scores
from attention_service.comparison.row_errors import SCATTER, mean_squares, shares_of
from attention_service.comparison.rules import CORRECT
from attention_service.comparison.sample import Sample, everything
from attention_service.comparison.samples import MAX_SCORES, choose_sample
from attention_service.comparison.solve import solve

# How much of known coarse rounding a kernel may make, as parts of its mean squares.
PARTS: Final = tuple(4.0**power for power in range(-4, 2))
# A part of the rows stands out if its errors are so many times those of the others, and its mean share is so many
# standard errors above. So few rows that these say little stand out if their errors are so many times as large, by the
# root of their number: where the other rows are within rounding, and where they are not.
LARGER: Final = 1.7
ERRORS: Final = 5.0
FEW: Final = 4
# Rows that are looked at whole.
MAX_ROWS: Final = 2**11
CALM: Final = 7.0
SINGLE: Final = 10.0
# A count, a mean and a variance of each part.
Moments = tuple[np.ndarray, np.ndarray, np.ndarray]


def place_of(case: Case, name: str, right: np.ndarray, judged: Judged) -> np.ndarray | None:
    """The rows (b, h, q) of a local error of an array; None if coarse rounding may have made it, or it is right.

    Rounding is worse where rows are long or scores are large. So known kinds of it are computed, and some part of the
    rows must stand out beside each of these, whether a kernel makes all of it or little.
    """
    rows = judged.rows
    if rows is None or judged.ratio <= CORRECT:
        return None
    sample = everything(case)
    if case.plan.score_count > MAX_SCORES or rows.sent.size > MAX_ROWS:
        sample = choose_sample(case, np.where(np.isfinite(rows.ratios), rows.ratios, 0.0))
    sent, legal = sample.of(rows.sent), sample.of(rows.legal)
    parts = _Parts(sample, rows.sent.shape)
    shares = shares_of(sent, legal)
    place = parts.standing(shares, shares)
    if place is None:
        return None
    for made in _coarse(case, sample, name, sample.of(right)):
        if any(parts.standing(shares_of(sent, legal + part * made), shares) is None for part in PARTS):
            return None
    return rows.far if rows.far.any() else place


def _coarse(case: Case, sample: Sample, name: str, right: np.ndarray) -> Iterator[np.ndarray]:
    """The mean squares (b, h, r) of the errors of known kinds of coarse rounding, and the mean of these."""
    kinds = []
    for edit in (precision_scores, precision_accumulate):
        answers = case.each(lambda wrong: arrays_of(solve(wrong, sample), (name,))[name], list(edit(case)))
        kinds.append(np.mean([mean_squares(array, right) for array in answers], axis=0))
        yield kinds[-1]
    yield np.mean(kinds, axis=0)


class _Parts:
    """Parts of the rows of a sample in which kernels go wrong: heads, batch entries, tiles, first, last, single rows.

    edges: the first row of each run, and the one after its last; starts, stops: the same in the sample
    """

    def __init__(self, sample: Sample, shape: tuple[int, ...]) -> None:
        self.sample, self.shape = sample, shape
        last = shape[2]
        edges = {(tile * size, (tile + 1) * size) for size in TILES for tile in np.unique(sample.rows // size)}
        edges |= {pair for start, stop in edges for pair in ((0, stop), (start, last))} | {(0, last)}
        edges |= {(row, row + 1) for row in sample.rows}
        self.edges = np.array(sorted(edges))
        self.starts, self.stops = np.searchsorted(sample.rows, self.edges.T)

    def standing(self, shares: np.ndarray, legal: np.ndarray) -> np.ndarray | None:
        """The rows (b, h, q) of the part whose errors stand out most by their shares (b, h, r); None if none does.

        legal: the shares beside legal rounding, which the errors of the part must exceed
        """
        (count, mean, spread), (others, rest, around) = self._moments(shares)
        (_, beyond, _), (_, calm, _) = self._moments(legal)
        with np.errstate(all="ignore"):
            ratio = np.sqrt(mean / (1 - mean) / (rest / (1 - rest)))
            spread = np.maximum(spread, around) + SCATTER**2  # a few rows may be alike by chance
            errors = (mean - rest) / np.sqrt(spread / count + spread / others)
        single = np.where(calm < 0.5, CALM, SINGLE)
        stands = np.where(count > FEW, (ratio > LARGER) & (errors > ERRORS), ratio * np.sqrt(count) > single)
        stands &= (count > 0) & (others > 1) & (beyond > 0.5)
        if not stands.any():
            return None
        group, run = np.unravel_index(int(np.argmax(np.where(stands, errors, -1.0))), stands.shape)
        return self._rows(int(group), int(run))

    def _moments(self, shares: np.ndarray) -> tuple[Moments, Moments]:
        """The moments of the shares of each part, (groups, runs), and of all other rows."""
        has = np.isfinite(shares)
        known = np.where(has, shares, 0.0)
        arrays = has, known, np.square(known)
        parts = np.array([self._sums(one) for one in arrays])
        whole = np.array([one.sum() for one in arrays])[:, None, None]
        return _moments(parts), _moments(whole - parts)

    def _sums(self, array: np.ndarray) -> np.ndarray:
        """The sums of an array (b, h, r) for each group and each run: all, batch entries, heads, and both."""
        b, h, r = array.shape
        groups = (array.sum(axis=(0, 1))[None], array.sum(axis=1), array.sum(axis=0), array.reshape(b * h, r))
        sums = np.cumsum(np.concatenate(groups), axis=1)
        sums = np.concatenate([np.zeros((len(sums), 1)), sums], axis=1)
        found: np.ndarray = sums[:, self.stops] - sums[:, self.starts]
        return found

    def _rows(self, group: int, run: int) -> np.ndarray:
        """The rows (b, h, q) of a group and a run."""
        batches, heads = self.sample.batches, self.sample.heads
        groups = [(None, None), *((one, None) for one in batches), *((None, one) for one in heads)]
        groups += [(one, other) for one in batches for other in heads]
        batch, head = groups[group]
        found = np.zeros(self.shape, bool)
        every = slice(None)
        found[every if batch is None else batch, every if head is None else head, slice(*self.edges[run])] = True
        return found


def _moments(sums: np.ndarray) -> Moments:
    """How many numbers, their mean and their variance, from their count, sum and sum of squares."""
    count, total, squares = sums
    mean = total / np.maximum(count, 1)
    return count, mean, np.maximum(squares / np.maximum(count, 1) - np.square(mean), 0)
