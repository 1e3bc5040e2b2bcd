"""The fact that rows of a wrong output are right up to a factor of each part of the keys: parts that are rescaled or
merged by wrong weights. What is fitted to a few rows is checked on all."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from attention_service.comparison.case import TILES
from attention_service.comparison.errors import largest
from attention_service.comparison.problem import Problem, attention, scaled_scores
from attention_service.comparison.refitted import Prediction, ends_of_runs, told
from attention_service.comparison.sample import Sample
from attention_service.comparison.wrong import LISTED, TOLD, Wrong, ends_within
from attention_service.schemas.compare import Fact

# No score counts for more than this above the logsumexp of its row, as hidden ones may.
MOST_SCORE: Final = 30.0
# Numbers of the sums of parts that are computed at a time.
NUMBERS: Final = 2**17
# Numbers of equal parts that keys are split into, which need not be tiles.
SPLITS: Final = range(2, 9)
# The factor of a part is known if its sums are as long as so many tolerances.
NOTICED: Final = 8.0
# Squares of the lengths of values, of the largest one, below which they are none.
RANK: Final = 1e-14
# The share of the squared error that parts explain of which that is known.
SHARE: Final = 0.5


def part_factors(wrong: Wrong) -> Iterator[Fact]:
    """Rows are the sums of values that each tile of keys, or each equal part of the visible ones, has, times a factor
    of the row and the tile."""
    if not wrong.is_plain_output:
        return
    keys, features = wrong.case.plan.sizes.key_length, _rank_of_values(wrong)
    sizes = sorted({*TILES, *(-(-keys // count) for count in SPLITS)}, reverse=True)
    tried = [(np.full(len(wrong.rows), tile), -(-keys // tile)) for tile in sizes if tile < keys]
    lengths = 1 + ends_of_runs(wrong)[3][1].max(axis=(1, 2)) if wrong.case.terms else np.full(len(wrong.rows), keys)
    tried += [(-(-lengths // count), count) for count in SPLITS if np.unique(lengths).size > 1]
    for hidden, (tiles, parts) in itertools.product((False, True) if wrong.case.terms else (False,), tried):
        count = parts * (1 + hidden)
        if 2 * count <= features:
            factors = Factors.of(count)
            said = told(wrong, partial(_of_parts, wrong, tiles, hidden, factors), math.log2(2 * len(tried)))
            if said and factors.explained >= SHARE * factors.errors and factors.differs_from_1:
                said = wrong.every(is_wrong=not wrong.rows.all())  # factors are those of wrong rows
                yield _fact_of_parts(wrong, said, factors, tiles, hidden)
                return


@dataclass
class Factors:
    """What rows tell of the factors of parts.

    ranges: (2, 2, parts), see `ranges_of`; added: (parts,), the most that a part adds to a number
    explained, errors: the squared errors that parts of a known factor explain, and all
    every: True if each factor is known
    """

    ranges: np.ndarray
    added: np.ndarray
    explained: float = 0.0
    errors: float = 0.0
    every: bool = True

    @classmethod
    def of(cls, parts: int) -> Factors:
        """Nothing is known yet."""
        return cls(np.full((2, 2, parts), [[[np.inf]] * 2, [[-np.inf]] * 2]), np.zeros(parts))

    def see(self, factors: np.ndarray, errors: np.ndarray, added: np.ndarray, known: np.ndarray) -> None:
        """Add the factors of some rows, all (r, parts)."""
        low, high = factors - errors, factors + errors
        least, most = (np.stack([np.where(known, one, by) for one in (low, high)]) for by in (np.inf, -np.inf))
        self.ranges[0] = np.minimum(self.ranges[0], least.min(axis=1))
        self.ranges[1] = np.maximum(self.ranges[1], most.max(axis=1))
        self.added = np.maximum(self.added, np.where(known, added, 0).max(axis=0))

    @property
    def is_known(self) -> np.ndarray:
        """(parts,), True for those of which a factor is known."""
        return np.asarray(np.isfinite(self.ranges[0, 0]))

    @property
    def differs_from_1(self) -> bool:
        """True if some factor is further from 1 than it is uncertain."""
        least, most = self.ranges[:, :, self.is_known]
        return bool((1 - least[1] > np.ptp(least, axis=0)).any() or (most[0] - 1 > np.ptp(most, axis=0)).any())


def _rank_of_values(wrong: Wrong) -> int:
    """The least number of features of a head that tell values apart: sums of so many values may be any output."""
    case = wrong.case
    arrays = (case.past_value, case.value) if case.past_length else (case.value,)
    ranks = []
    for batch, head in np.ndindex(*case.value.shape[:2]):
        case.check()
        values = [array[batch, head].astype(np.float64) for array in arrays]
        squares = np.linalg.eigvalsh(sum(array.T @ array for array in values))
        ranks.append(int(np.count_nonzero(squares > max(wrong.tolerance**2, RANK * squares[-1]))))
    return min(ranks)


def _of_parts(
    wrong: Wrong, tiles: np.ndarray, hidden: bool, seen: Factors, problem: Problem, sent: np.ndarray, sample: Sample
) -> Prediction:
    """The sums of the parts of a problem that are closest to what was sent. Parts that add little are one, the last.

    tiles: the keys of a part in each batch entry; seen: gets what wrong rows tell
    """
    total, scores = attention(problem).logsumexp, scaled_scores(problem)
    assert total is not None
    powers = np.exp(np.minimum(scores - np.where(np.isneginf(total), 0, total)[..., None], MOST_SCORE))
    shown = [np.where(problem.seen, powers, 0)] + ([np.where(problem.seen, 0, powers)] if hidden else [])
    found, counts = np.empty_like(sent), np.zeros(sent.shape[:3])
    count = len(seen.added)
    step, parts = max(1, NUMBERS // ((count + 1) * sent.shape[3])), count // (1 + hidden)
    for b, h, start in np.ndindex(*sent.shape[:2], -(-sent.shape[2] // step)):
        at = b, h, slice(start * step, start * step + step)
        tile = int(tiles[sample.batches[b]])
        sums = np.concatenate([_sums(one[at], problem.value[b, h], tile, parts) for one in shown], axis=1)
        little = np.abs(sums).max(axis=2, keepdims=True) <= wrong.tolerance
        rest, adds = np.sum(sums, axis=1, where=little, keepdims=True), sums.any(axis=2)
        sums = np.concatenate([np.where(little, 0, sums), rest], axis=1)
        lengths = np.linalg.norm(sums, axis=2)
        units = np.divide(sums, lengths[..., None], out=np.zeros_like(sums), where=lengths[..., None] > 0)
        inverse = np.linalg.pinv(units, rcond=1e-9)
        fitted = (np.nan_to_num(sent[at])[:, None] @ inverse)[:, 0]
        found[at], counts[at] = (fitted[:, None] @ units)[:, 0], (lengths > 0).sum(axis=1)
        rows = wrong.rows[sample.index][at][:, None]
        errors = np.where(rows, sent[at] - wrong.right[sample.index][at], 0)
        # The last one is no part.
        fitted, lengths, units, inverse = fitted[:, :-1], lengths[:, :-1], units[:, :-1], inverse[..., :-1]
        inexact = np.linalg.norm(inverse, axis=1)  # parts that are nearly parallel are told apart by small differences
        by, inexact = (np.divide(one, lengths, out=np.zeros_like(one), where=lengths > 0) for one in (fitted, inexact))
        # All weights of a part may be off alike, as the sum of those of a row may be.
        alike = np.abs(by) / wrong.longest[sample.index][at][:, None]
        larger = np.maximum(1, np.abs(found[at]).max(axis=-1, keepdims=True) / largest(wrong.right))
        unsure = wrong.tolerance * larger * np.maximum(inexact, alike)
        known = (lengths > NOTICED * wrong.tolerance) & (TOLD * unsure < np.maximum(np.abs(by), 1 / TOLD)) & rows
        rights = np.where(np.arange(count) < parts, lengths, 0)
        explained = np.where(known, fitted - rights, 0)[:, None] @ units
        seen.explained += float(np.square(explained).sum())
        seen.errors += float(np.square(errors).sum())
        seen.every &= not (adds & rows & ~known).any()
        seen.see(by, unsure, np.abs(fitted) * np.abs(units).max(axis=2), known)
    return found, np.maximum(1, np.abs(found).max(axis=-1) / largest(wrong.right)), counts


def _sums(weights: np.ndarray, value: np.ndarray, tile: int, parts: int) -> np.ndarray:
    """The sums of values (r, parts, e) of each of so many tiles of keys. weights: (r, k), value: (k, e)"""
    starts = range(0, parts * tile, tile)
    return np.stack([weights[:, start : start + tile] @ value[start : start + tile] for start in starts], axis=1)


def _fact_of_parts(wrong: Wrong, said: str, factors: Factors, tiles: np.ndarray, hidden: bool) -> Fact:
    keys, tile, is_equal = wrong.case.plan.sizes.key_length, int(tiles[0]), bool((tiles == tiles[0]).all())
    count = len(factors.added) // (1 + hidden)
    adds = factors.added > wrong.tolerance
    nothing, shows = np.flatnonzero(factors.is_known[:count] & ~adds[:count]), factors.is_known & adds
    ranges = factors.ranges[..., shows]
    of = f"each {tile} keys" if is_equal else f"each of {count} equal parts of the keys of its batch entry"
    text = f"{said} {{}} is right up to a factor of the row for {of}"
    if shows.any():
        both = np.stack([ranges[0].min(axis=-1), ranges[1].max(axis=-1)])
        text += ends_within(both, every=factors.every)
    if len(nothing):
        runs = [f"{one * tile} to {min(one * tile + tile, keys) - 1}" for one in nothing[:LISTED]]
        which = f"keys {', '.join(runs)}" if is_equal else f"of parts from 0 on, {', '.join(map(str, nothing))}"
        text += f"; {which} add nothing"
    text += "; hidden keys take part" if hidden else ""
    sizes = tiles[:1] if is_equal else tiles[:LISTED]
    least, most = ranges.mean(axis=1)[:, :LISTED]
    return wrong.fact("part_factors", text, keys=sizes, least=least, most=most)
