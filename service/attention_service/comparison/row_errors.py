"""The errors of the rows of an array in a half type, beside those of legal rounding.

The largest error hides what is small: scores that are rounded make more of most errors, but not of the largest one; a
wrong tile of long rows has smaller errors than right rows of few keys. So rows are compared with themselves. The share
of a row is sent / (sent + legal), with mean squares of errors: 1/2 where a row is as far off as rounding makes it. No
row has more than the whole share, so that a mean of them does not hang on the largest error either.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from attention_service.comparison.baseline import rounded_cases
from attention_service.comparison.case import Case
from attention_service.comparison.errors import epsilon
from attention_service.comparison.legal import CODED_WEIGHTS, TANH_ERROR
from attention_service.comparison.sample import Sample
from attention_service.comparison.solve import solve

# Rows of a tile that are judged together.
TILE: Final = 16
# How many standard errors the mean share must be above 1/2: of all rows, and of any head or tile, which are many.
ALL: Final = 4.0
PART: Final = 6.0
# What the shares of rows scatter at least, and as so many rows more do: a few that are alike by chance say little.
SCATTER: Final = 0.1
FEW: Final = 2.5
# Numbers of an output that are few: their rounding may be less than usual by chance.
FEW_NUMBERS: Final = 4
# A single row may be so many times as far off as legal rounding makes it: right kernels reach 2.3.
ROW: Final = 4.0
# Mean squares that an approximate tanh adds to each row, in those of the mean row.
UNEVEN: Final = 4.0
# What a mean says of its size, at most, in legal errors: its shares are at most 1.
MOST: Final = 5.0


@dataclass(frozen=True, eq=False)
class RowErrors:
    """The mean squares of the errors of each row (b, h, q): of an array that was sent, and by legal rounding."""

    sent: np.ndarray
    legal: np.ndarray

    @classmethod
    def empty(cls, shape: tuple[int, ...]) -> RowErrors:
        """Zeros for the rows (b, h, q), to be filled by `put_rows`."""
        return cls(np.zeros(shape), np.zeros(shape))

    @property
    def ratios(self) -> np.ndarray:
        """(b, h, q), how far each row is off, in errors of legal rounding; 0 where both are 0."""
        with np.errstate(all="ignore"):
            return np.where(self.sent > 0, np.sqrt(self.sent / self.legal), 0.0)

    @property
    def far(self) -> np.ndarray:
        """(b, h, q), True where a row alone is further off than right kernels are."""
        found: np.ndarray = self.ratios > ROW
        return found

    @property
    def in_words(self) -> tuple[float, float]:
        """How far the worst row and all rows in the mean are off, in errors of legal rounding, as they are."""
        share = float(np.nanmean(shares_of(self.sent, self.legal)))
        return float(self.ratios.max()), math.sqrt(share / (1 - share)) if share < 1 else math.inf

    @property
    def mean(self) -> float:
        """How far all rows are off in the mean, at least."""
        return _least_mean(shares_of(self.sent, self.legal), ALL)

    @property
    def ratio(self) -> float:
        """How far rows are off, where more than 1 is not legal: all of them, those of a head or tile, or a single one.

        Of means it is what they have at least, by their standard errors.
        """
        shares = shares_of(self.sent, self.legal)
        parts = self.mean, _least_mean(shares.reshape(-1, shares.shape[2]), PART), _least_mean(_tiles(shares), PART)
        return max(float(self.ratios.max(initial=0.0)) / ROW, *(min(MOST, ratio) for ratio in parts))


def rows_show(squares: Mapping[str, np.ndarray], legal: Mapping[str, np.ndarray]) -> bool:
    """True if rows with these mean squares of errors are not right, as the verdict says it. legal: by legal rounding"""
    return any(RowErrors(own, legal[name]).ratio > 1 for name, own in squares.items())


def legal_rows(
    case: Case, sample: Sample, squares: Mapping[str, Sequence[np.ndarray]], right: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The mean squares of legal errors of the rows of a sample, of each array that is judged by rows.

    squares, right: of each of these arrays, see `legal_squares`
    """
    return {name: evened(case, legal_squares(case, sample, name, own, right[name])) for name, own in squares.items()}


def shares_of(sent: np.ndarray, legal: np.ndarray) -> np.ndarray:
    """The shares sent / (sent + legal) of rows; NaN where both are 0."""
    with np.errstate(all="ignore"):
        found: np.ndarray = np.where(np.isinf(sent), 1.0, sent / (sent + legal))
        return found


def _tiles(shares: np.ndarray) -> np.ndarray:
    """The shares (b, h, q) of each tile, (tiles, rows), NaN behind the last row."""
    b, h, q = shares.shape
    padded = np.full((b, h, -(-q // TILE) * TILE), np.nan)
    padded[..., :q] = shares
    return padded.reshape(-1, TILE)


def _least_mean(shares: np.ndarray, errors: float) -> float:
    """The ratio that the mean share of a part has at least, the largest of all parts. errors: how many standard errors

    shares: (parts, rows) with a part in each line, or (b, h, q) for one part of all rows
    """
    parts = shares.reshape(1, -1) if shares.ndim == 3 else shares
    has = np.isfinite(parts)
    count = np.maximum(1, has.sum(axis=1))
    mean = np.sum(parts, axis=1, where=has) / count
    square = np.sum(np.square(parts), axis=1, where=has) / count
    spread = np.sqrt((square - np.square(mean) + SCATTER**2 * (1 + FEW / count)) / count)
    least = float(np.max(mean - errors * spread, initial=0.0))
    return math.sqrt(least / (1 - least)) if least < 1 else MOST


def judges_rows(case: Case, name: str) -> bool:
    """True if the roundings of right kernels of a case are known well enough to judge each row of an array.

    Kernels round what norms, maps, gates and codes of 8 bits make in more ways than are computed.
    """
    roles = case.plan.roles
    is_plain = not any(case.steps.values()) and case.gate is None and all(role.map is None for role in roles.inputs)
    is_plain = is_plain and roles.output_map is None and case.plan.normalization == "softmax"
    is_half = case.dtype.itemsize == 2 and CODED_WEIGHTS not in case.liberties
    return is_plain and is_half and name in ("output", "attention_weights")


def mean_squares(array: np.ndarray, right: np.ndarray, unknown: float = np.inf) -> np.ndarray:
    """The mean squares of the errors of the rows of an array (b, h, r, n). unknown: what infinite and NaN rows have"""
    with np.errstate(all="ignore"):
        apart = np.subtract(array, right, dtype=np.float64)
        found = np.vecdot(apart, apart) / max(1, apart.shape[-1])
        return np.where(np.isfinite(found), found, unknown)


def legal_squares(
    case: Case,
    block: Sample,
    name: str,
    squares: Sequence[np.ndarray],
    right: np.ndarray,
    sent: np.ndarray | float = np.inf,
    weights: np.ndarray | None = None,
) -> np.ndarray:
    """The mean squares of legal errors of the rows (b, h, r) of a block, of one array.

    All liberties may be taken at once, so what they add to a plain computation is added up. That of rounded weights and
    of the rounded output is at least what it is for most rows: a row of few keys or features may have less by chance.

    squares: of each of `rounded_cases`; right: the array (b, h, r, n); sent: of what was sent: only larger ones matter
    weights: those of the plain computation, None to compute them
    """
    variants, (plain, *others) = rounded_cases(case, case.dtype), squares
    found = plain.copy()
    for folds in (True, False):
        pairs = zip(variants[1:], others, strict=True)
        more = [square - plain for one, square in pairs if (one.rounding.scaled_query is not None) == folds]
        found += np.max(more, axis=0, initial=0.0) if more else 0.0
    larger = np.nonzero(sent > found)
    if name == "output" and "rounded_weights" in case.liberties and len(larger[0]):
        weights = solve(variants[0], block).weights if weights is None else weights
        assert weights is not None
        values = _squares_of_values(case)[block.batches[larger[0]], case.value_of_head[block.heads[larger[1]]]]
        values = values if block.columns is None else values[..., block.columns]
        errors = np.vecdot(np.square(weights[larger]), values)
        own = np.square(right[larger], dtype=np.float64)  # of which one may be as large as all others
        is_few = np.square(own.sum(axis=-1)) < FEW_NUMBERS * np.square(own).sum(axis=-1)
        errors += np.where(is_few, own.mean(axis=-1), 0)
        found[larger] = np.maximum(found[larger], epsilon(case.dtype) ** 2 / 12 * errors)
    return found


def put_rows(
    case: Case,
    block: Sample,
    name: str,
    rows: RowErrors,
    squares: Sequence[np.ndarray],
    sent: np.ndarray,
    right: np.ndarray,
    weights: np.ndarray | None,
) -> None:
    """Write the errors of the rows of a block. sent, right: the array (b, h, r, n); others: see `legal_squares`"""
    own = mean_squares(sent, right, unknown=0.0)
    block.put(rows.sent, own)
    block.put(rows.legal, legal_squares(case, block, name, squares, right, own, weights))


def evened(case: Case, legal: np.ndarray) -> np.ndarray:
    """Legal mean squares (b, h, q) where those of an approximate tanh are at least those of other rows of their head.

    Each score has an error of its own, so that rows of few keys have small ones by chance. In bfloat16 those of weights
    are larger.
    """
    if case.softcap is None or "approximate_tanh" not in case.liberties or epsilon(case.dtype) / 2 > TANH_ERROR:
        return legal
    found: np.ndarray = legal + UNEVEN * np.where(np.isfinite(legal), legal, 0.0).mean(axis=2, keepdims=True)
    return found


def _squares_of_values(case: Case) -> np.ndarray:
    """The mean squares of the features of each value, (b, g, k)."""

    def found() -> np.ndarray:
        arrays = (case.past_value, case.value) if case.past_length else (case.value,)
        lengths = [np.vecdot(array, array, dtype=np.float64) / array.shape[-1] for array in arrays]
        return np.concatenate(lengths, axis=2)

    return case.once("squares of values", found)
