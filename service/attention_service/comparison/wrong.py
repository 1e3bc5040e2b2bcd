"""An array that is wrong, (b, h, q, n), with a row for each batch entry, head and query, or keys in the place of
queries; what is true of all rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np

from attention_service.comparison.case import Case
from attention_service.comparison.errors import distances
from attention_service.comparison.problem import scaled_scores, without_values
from attention_service.comparison.rules import TINY
from attention_service.comparison.sample import blocks, everything
from attention_service.comparison.solve import make_problem
from attention_service.schemas.compare import Fact

# A prediction must fit so many bits of the errors better than by chance, beside those that its fitted numbers take.
BITS: Final = 20.0
# No error counts for more bits; rows that are looked at first.
MOST_BITS: Final = 50.0
# Facts, and numbers of a fact, that are listed at most.
LISTED: Final = 16
PROBED: Final = 8
# Digits that are shown of a number, at most, and at least without its error.
DIGITS: Final = 5
FEWEST: Final = 3
# A number that is as uncertain as what it says tells nothing: it is so many times its error.
TOLD: Final = 4.0
# The least and the largest number of all, and of those that are known.
FROM_TO: Final = ", from {} to {}"
IN_ONE: Final = ", as {} in one and {} in another"
# Names of arrays in a sentence, where they differ.
NOUNS: Final = {"output": "the output", "logsumexp": "the logsumexp"}


def bits_of(errors: np.ndarray) -> np.ndarray:
    """How much numbers tell of a mistake, in bits of each. errors: in units of what legal rounding explains"""
    found: np.ndarray = np.log2(np.clip(errors, 1, 2**MOST_BITS))
    return found


@dataclass(frozen=True, eq=False)
class Wrong:
    """A wrong array, of which the first three axes say the row.

    axes: what each axis counts; tolerance: the largest error that legal rounding explains; has_rows: True if its rows
    are those of the case
    """

    name: str
    axes: tuple[str, ...]
    actual: np.ndarray
    right: np.ndarray
    tolerance: float
    case: Case
    has_rows: bool

    @cached_property
    def sums(self) -> np.ndarray:
        """(7, b, h, q): the largest error, the mean difference, the bits of all errors and the most of one, and the
        sums of actual², actual · right and right²."""
        apart = distances(self.actual, self.right)
        bits = bits_of(apart / self.bounds)
        pairs = (self.actual, self.actual), (self.actual, self.right), (self.right, self.right)
        products = (np.einsum("...i,...i->...", *pair) for pair in pairs)
        mean = self.actual.mean(axis=-1) - self.right.mean(axis=-1)
        return np.stack([apart.max(axis=-1), mean, bits.sum(axis=-1), bits.max(axis=-1), *products])

    @cached_property
    def rows(self) -> np.ndarray:
        """(b, h, q), True for rows with a wrong number."""
        found: np.ndarray = self.sums[3] > 0
        return found

    @property
    def bounds(self) -> float | np.ndarray:
        """The largest error that legal rounding explains, of all numbers or of each."""
        return self.tolerance

    @property
    def is_plain_output(self) -> bool:
        """True for an output of the softmax that nothing is done to after the sums over values."""
        case = self.case
        is_softmax = self.has_rows and self.name == "output" and case.plan.normalization == "softmax"
        return is_softmax and not case.steps["output"] and case.gate is None and case.bad_values is None

    def some(self, count: int) -> tuple[np.ndarray, ...]:
        """The index of about so many wrong rows."""
        places = np.argwhere(self.rows)
        return tuple(places[:: -(-len(places) // count)].T)

    @cached_property
    def about(self) -> dict[str, np.ndarray]:
        """Of each row: its logsumexp and largest weight, how many keys it sees, the largest q·k of these, and the mean
        of all scores."""
        case, found = self.case, np.full((5, *self.rows.shape), np.nan)
        for block in blocks(case, everything(case), ()):
            case.check()
            problem = make_problem(case, block)
            answer = without_values(problem)
            if answer.logsumexp is not None and answer.weights is not None:
                found[:2, *block.index] = answer.logsumexp, answer.weights.max(axis=-1)
            found[2, *block.index] = problem.seen.sum(axis=-1)
            found[3, *block.index] = np.max(problem.scores, axis=-1, where=problem.seen, initial=-np.inf)
            found[4, *block.index] = np.mean(scaled_scores(problem), axis=-1)
        return dict(zip(("logsumexp", "weight", "seen", "product", "mean"), found, strict=True))

    def said(
        self,
        lost: float,
        right: np.ndarray | None = None,
        by: Any = 1.0,
        added: Any = 0.0,
        bounds: np.ndarray | None = None,
    ) -> str:
        """Where right · by + added was sent, as `every` says it; "" if not there, or if it says little.

        lost: bits that are fitted; right: (b, h, q, n) in the place of the right numbers; by, added: of each row
        bounds: the largest error of each number; None for those of the right ones
        """
        right = self.right if right is None else right
        by, added = (np.broadcast_to(one, self.rows.shape)[..., None] for one in (by, added))
        slack = np.maximum(1, np.abs(by[..., 0]))
        if not self.sums[2].sum() - lost >= BITS:
            return ""
        for at in (self.some(PROBED), ...):
            self.case.check()
            most = np.broadcast_to(self.bounds if bounds is None else bounds, self.right.shape)[at]
            apart = distances(self.actual[at], right[at] * by[at] + added[at])
            close = (apart <= most * slack[at][..., None]).all(axis=-1)
            if not close[self.rows[at]].all():
                return ""
        if (slack > 1).any() and not self._bits_beyond(slack) - lost >= BITS:
            return ""
        return self.every(is_wrong=not close.all())

    def _bits_beyond(self, slack: np.ndarray) -> float:
        """The bits of all errors, where those of a row may be so many times larger. slack: (b, h, q)"""
        apart = distances(self.actual, self.right)
        return float(bits_of(apart / (self.bounds * slack[..., None])).sum())

    def every(self, *, is_wrong: bool) -> str:
        """All rows, or all that are wrong, in a sentence: "in every wrong row", "for every key"."""
        return f"{'for' if self.axes[2] == 'key' else 'in'} every {'wrong ' * is_wrong}{self.axes[2]}"

    @cached_property
    def longest(self) -> np.ndarray:
        """(b, h, q), the largest right number of each row."""
        found: np.ndarray = np.abs(self.right).max(axis=-1)
        return found

    def errors(self, by: Any) -> np.ndarray:
        """(b, h, q): how far a factor of each row may be from the true one, as the row is known up to the tolerance."""
        slack = np.maximum(1, np.abs(np.broadcast_to(by, self.rows.shape)))
        found = np.divide(self.tolerance * slack, self.longest)
        return np.where(np.isfinite(found), found, np.inf)

    def fact(self, name: str, message: str, **numbers: Any) -> Fact:
        """A fact of this array, whose name is {} in the message."""
        text = message.replace("{}", NOUNS.get(self.name, self.name))
        lists = {key: np.atleast_1d(value).tolist() for key, value in numbers.items()}
        return Fact(name=name, array=self.name, message=f"{text[0].upper()}{text[1:]}.", numbers=lists)


def is_open(facts: Sequence[Fact]) -> bool:
    """True if no fact says what was sent, so that a known mistake that is not proved may say it."""
    return not facts or facts[0].name == "rows_by_keys"


def shown(number: float, error: float) -> str:
    """A fitted number with the digits that its error leaves, but no more than needed: five, or what tells it from 1.

    Its error is shown, too, if few are left. error: 0 for a number that is exact
    """
    if not error < math.inf:
        return "any number"
    if not (error and math.isfinite(number)):
        return f"{number:.{DIGITS}g}"
    decimals = math.floor(-math.log10(2 * error))  # the last digit is wrong by half of itself at most
    if abs(number) <= error and decimals >= FEWEST:
        return f"{0:.{min(decimals, DIGITS)}f}"
    known = math.floor(math.log10(abs(number))) + 1 + decimals if number else 0
    for digits in range(min(known, DIGITS), known + 1) if known >= FEWEST else ():
        text = f"{number:#.{digits}g}".removesuffix(".")
        if float(text) != 1 or abs(number - 1) <= error:
            return text
    places = -math.floor(math.log10(error))
    unit = max(10.0**-places, TINY)
    return f"{round(number, places) + 0.0:.{max(0, places)}f} ± {math.ceil(error / unit) * unit:g}"  # no -0.0


def ends(numbers: np.ndarray, errors: np.ndarray, *, every: bool, words: tuple[str, str] = (FROM_TO, IN_ONE)) -> str:
    """The least and the largest of some numbers in words; "" if these may be the same.

    every: True if these are all numbers that there are, for which the first words are
    """
    return ends_within(ranges_of(numbers, errors), every=every, words=words)


def ranges_of(numbers: np.ndarray, errors: np.ndarray) -> np.ndarray:
    """(2, 2), between which numbers the least of some numbers is, and the largest.

    No single one may stand for all: another one that is known less may be beyond it.
    """
    low, high = numbers - errors, numbers + errors
    return np.array([[low.min(), high.min()], [low.max(), high.max()]])


def ends_within(ranges: np.ndarray, *, every: bool, words: tuple[str, str] = (FROM_TO, IN_ONE)) -> str:
    """The words of `ends`, from what `ranges_of` returns."""
    (least, most), (unsure, other) = ranges.mean(axis=1), np.diff(ranges)[:, 0] / 2
    if not ranges[1, 0] - ranges[0, 1] > unsure + other:
        return ""
    return words[not every].format(shown(least, unsure), shown(most, other))
