"""Facts about wrong arrays, told where no known mistake is proved; each is checked on all rows before it is said."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from attention_service.comparison.errors import distances, largest_number
from attention_service.comparison.legal import LOG2E
from attention_service.comparison.other_places import elsewhere, moved, permuted, permuted_tiles, reordered
from attention_service.comparison.other_scores import other_scores
from attention_service.comparison.other_values import other_values
from attention_service.comparison.part_factors import part_factors
from attention_service.comparison.places import plural_of
from attention_service.comparison.refitted import refitted
from attention_service.comparison.score_curve import score_curve
from attention_service.comparison.wrong import LISTED, TOLD, Wrong, ends, shown
from attention_service.schemas.compare import Fact

LARGEST_HALF: Final = largest_number(np.dtype(np.float16))
# Kernels round the number that overflows by at most this part of it.
ROUGHLY: Final = 1e-3
# Wrong elements that are all one number, other than 0, are no chance if they are so many.
ALIKE: Final = 4
# Rows are wrong in order, by the keys that they see, if so many other rows could have been wrong in their place.
CHOICES: Final = 1000
TILES: Final = (128, 64, 32, 16, 8)
# The unit of sums of the softmax.
ZEROS: Final = ", where a key of score 0 adds 1"


def find_facts(arrays: list[Wrong]) -> list[Fact]:
    """The facts about arrays."""
    with np.errstate(all="ignore"):
        wrong = [one for one in arrays if one.rows.any()]
        found = [fact for find in FACTS for one in wrong for fact in find(one)]
        told = {fact.array for fact in found}
        for one in wrong:
            others = (fact for find in OTHERS for fact in find(one))
            found += itertools.islice(others, 0 if one.name in told else 1)
        return [*found, *(fact for one in wrong for fact in by_keys(one))][:LISTED]


def _named(wrong: Wrong, number: float, error: float, of: Callable[[float], float] = float) -> str:
    """The name of a number that kernels multiply by or divide by, or of what a function makes of it."""
    sizes = wrong.case.plan.sizes
    known = {"2": 2.0, "log2(e)": LOG2E, "√d": sizes.head_dim**0.5, "d": sizes.head_dim, "keys": sizes.key_length}
    known |= {f"1/{name}": 1 / one for name, one in known.items() if one} | {"-1": -1.0}
    names = [name for name, one in known.items() if one != 1 and abs(of(one) - number) <= error]
    return f" ({' or '.join(names)})" if names and error < abs(number) / 64 else ""


def factor(wrong: Wrong) -> Iterator[Fact]:
    """Rows are right up to a factor."""
    own, products, rights = wrong.sums[4:]
    usable = np.isfinite(own + products + rights) & (rights > 0)
    some = usable & wrong.rows
    whole = float(products[some].sum() / rights[some].sum())
    error = _error_of_all(np.where(wrong.rows, wrong.errors(whole), np.inf))
    # What is a little too large may be so by a factor or by a number that is added, but not an output.
    least = error if wrong.name == "output" else TOLD * error
    if abs(whole) > error and abs(whole - 1) > least and (said := wrong.said(wrong.sums[3].max(), by=whole)):
        text = f"{said} {{}} is {shown(whole, error)} times the right one{_named(wrong, whole, error)}"
        yield wrong.fact("factor", text, factor=whole)
        return
    each = np.where(some, products / rights, 1.0)
    least, most = float(each[wrong.rows].min()), float(each[wrong.rows].max())
    if max(-least, most) > error and wrong.said(wrong.sums[3].sum(), by=each):
        yield from itertools.islice(itertools.chain(_extra_sum(wrong, usable), _row_factor(wrong, each)), 1)


def _error_of_all(errors: np.ndarray) -> float:
    """How far one number of all heads may be from that of any. errors: (b, h, q), by each row; infinite to leave it out

    The best row of a head says how well its number is known.
    """
    of_heads = errors.min(axis=(0, 2))
    known = of_heads[np.isfinite(of_heads)]
    return float(known.max()) if known.size else math.inf


def _row_factor(wrong: Wrong, each: np.ndarray) -> Iterator[Fact]:
    """Each wrong row has a factor; the least and the largest of those that are known well, unless they may be one."""
    by, errors = each[wrong.rows], wrong.errors(each)[wrong.rows]
    known = TOLD * errors < np.maximum(np.abs(by), 1 / TOLD)
    numbers = ends(by[known], errors[known], every=bool(known.all())) if known.any() else ""
    if numbers or wrong.name == "output":  # gradients by one query have a factor of each key, whatever it is
        text = f"{wrong.every(is_wrong=True)} {{}} is right up to a factor of the {wrong.axes[2]}{numbers}"
        yield wrong.fact("row_factor", text, least=by.min(), most=by.max())


def _extra_sum(wrong: Wrong, usable: np.ndarray) -> Iterator[Fact]:
    """The factors of rows are those of a sum Z (1 + m x) in the place of Z, with one m, or one of each head.

    usable: (b, h, q), True for rows that have a factor
    """
    forms = {"": np.ones(usable.shape)}
    if wrong.has_rows and wrong.case.plan.normalization == "softmax":
        zero, hidden = np.exp(-wrong.about["logsumexp"]), wrong.case.plan.sizes.key_length - wrong.about["seen"]
        forms |= {ZEROS: zero, " times its largest exponential": wrong.about["weight"]}
        forms[f" for each hidden key{ZEROS}"] = zero * hidden
    for axes in ((0, 1, 2), (0, 2)):
        sums = [_Sums.of(wrong, usable, axes, *form) for form in forms.items()]
        # A factor of each head is the simplest; one of all was tried before. Else the one that leaves least.
        for one in sorted(sums, key=lambda one: (bool(one.unit), one.left)):
            if fact := one.fact(wrong, usable, axes):
                yield fact


@dataclass(frozen=True, eq=False)
class _Sums:
    """Sums Z (1 + m x) in the place of Z, by which rows are divided.

    unit: of m, in words, "" for one of Z itself; x: (b, h, q); extra: m, of all or of each head; fits: (b, h, q), True
    for the rows that m is fitted to; left: the squared errors of these
    """

    unit: str
    x: np.ndarray
    extra: np.ndarray
    fits: np.ndarray
    left: float

    @classmethod
    def of(cls, wrong: Wrong, usable: np.ndarray, axes: tuple[int, ...], unit: str, x: np.ndarray) -> _Sums:
        """The sums that are closest to what was sent. axes: those of which m is one number"""
        own, products, rights = wrong.sums[4:]
        fits = usable & np.isfinite(x) & (wrong.rows | ~wrong.rows.any(axes, keepdims=True))  # of right heads all rows
        extra = np.where(fits, x * (products - own), 0).sum(axes, keepdims=True)
        extra = np.nan_to_num(extra / np.where(fits, x * x * own, 0).sum(axes, keepdims=True))
        by = 1 / (1 + extra * x)
        left = np.sum(own - 2 * by * products + by * by * rights, where=fits)
        return cls(unit, x, extra, fits, float(np.nan_to_num(left, nan=np.inf)))

    def fact(self, wrong: Wrong, usable: np.ndarray, axes: tuple[int, ...]) -> Fact | None:
        """The fact that these sums are those that rows are divided by, None if it is not true or says little."""
        extra, name, by = self.extra, self.unit, 1 / (1 + self.extra * self.x)
        said = (usable & wrong.rows).sum() >= 2 * extra.size and wrong.said(wrong.sums[3].max(axes).sum(), by=by)
        numbers = (extra.ravel() if name else by[0, :, 0])[:LISTED]
        # Where rows become much larger, the sum itself has an error, too.
        errors = wrong.errors(by) / (np.abs(self.x) * np.minimum(by * by, np.abs(by)) if name else 1)
        errors = np.where(self.fits, errors, np.inf)
        errors = np.array([_error_of_all(errors)]) if extra.size == 1 else errors.min(axes).ravel()
        apart = np.abs(numbers - (0 if name else 1)) > TOLD * errors[:LISTED]
        if not said or not (apart.any() or (not name and wrong.name == "output")):
            return None
        heads = f" of {plural_of(wrong.axes[1])} 0 to {len(numbers) - 1}" if len(numbers) > 1 else ""
        what = f"is {', '.join(map(shown, numbers, errors))} times the right one"
        if name:
            what = f"is right up to a factor: the sum of its softmax is {_off_by(numbers, errors)}{name}"
            what += " (padded keys?)" if name == ZEROS and not heads and numbers[0] > 0.5 else ""
        return wrong.fact("extra_sum" if name else "head_factor", f"{said} {{}}{heads} {what}", numbers=numbers)


def _off_by(numbers: np.ndarray, errors: np.ndarray) -> str:
    """How far sums are off, in words. numbers: with their errors"""
    known = numbers[np.abs(numbers) > errors[: len(numbers)]]
    signs = "too small by" if (known <= 0).all() else "too large by" if (known >= 0).all() else "off by"
    return f"{signs} {', '.join(map(shown, -numbers if signs == 'too small by' else numbers, errors))}"


def overflow(wrong: Wrong) -> Iterator[Fact]:
    """Rows are infinite or NaN in which products do not fit into float16."""
    bad = np.isposinf(wrong.sums[0]) & ~np.isfinite(wrong.actual).all(axis=-1)
    if wrong.has_rows and bad.any():
        for name, by in (("q·k", 1.0), ("scale · q·k", np.reshape(wrong.case.scale, (-1, 1)))):
            size = np.where(wrong.about["seen"], wrong.about["product"] * by, 0)
            over, unclear = size > LARGEST_HALF, np.abs(size / LARGEST_HALF - 1) < ROUGHLY
            if over.any() and (over == bad)[~unclear].all():
                text = f"{{}} is infinite or NaN in just the rows with {name} above 65504: float16 overflows"
                yield wrong.fact("overflow", text, rows=bad.sum())
                return


def constant(wrong: Wrong) -> Iterator[Fact]:
    """All wrong elements are one number, or none is a number."""
    apart = distances(wrong.actual, wrong.right) > wrong.bounds
    values, right = wrong.actual[apart], wrong.right[apart]
    if values.size < 2:
        return
    first = float(values[0])
    is_one = (values == first).all() and (values.size >= ALIKE or first in (0, math.inf, -math.inf))
    number = f"{first:.6g}"
    tests = {
        "NaN": np.isnan(values).all(),
        f"exactly {number}" if float(number) == first else f"one number, {number}": is_one,
    }
    place = ", where minus infinity is right" if np.isneginf(right).all() else ""
    tests |= {"infinite or NaN": not np.isfinite(values).any(), "finite": place and np.isfinite(values).all()}
    for what in [what for what, holds in tests.items() if holds][:1]:
        text = f"all {values.size} wrong elements of {{}} are {what}{place}"
        yield wrong.fact("constant", text, elements=values.size)


def offset(wrong: Wrong) -> Iterator[Fact]:
    """The same number is added to all, or what makes another number of the same row of the logsumexp."""
    differences = wrong.sums[1][wrong.rows & np.isfinite(wrong.sums[1])]
    by, error = float(differences.sum() / max(1, differences.size)), wrong.tolerance
    name = _named(wrong, by, error, np.log).replace("(", "(ln ")
    forms = {f"too {'small' if by < 0 else 'large'} by {shown(abs(by), error)}{name}": np.full(wrong.rows.shape, by)}
    if wrong.has_rows and wrong.name == "logsumexp":
        total = -np.log(wrong.about["weight"])
        top = wrong.about["logsumexp"] - total
        forms["the largest score, without the logarithm of the sum"] = -total
        forms["the logarithm of the sum, without the largest score"] = -top
        forms["that of the mean, not of the sum"] = -np.log(wrong.about["seen"])
        forms["that of keys without their mean: scores are smaller by their mean"] = -wrong.about["mean"]
        forms["of base 2, but for the largest score"] = total * (LOG2E - 1)
        forms["of base e, but for the largest score, which is multiplied by log2(e)"] = top * (LOG2E - 1)
    for what, added in forms.items():
        if said := wrong.said(wrong.sums[3].max(), added=np.where(np.isfinite(added), added, 0.0)):
            yield wrong.fact("offset", f"{said} {{}} is {what}", mean=by)
            return


def by_keys(wrong: Wrong) -> Iterator[Fact]:
    """Just the rows are wrong that see few keys, many, or none."""
    if wrong.has_rows and wrong.case.terms and not wrong.rows.all():
        seen = wrong.about["seen"].astype(np.int64)
        least, most = seen[~wrong.rows].min(), seen[~wrong.rows].max()
        tests = {"no key": seen == 0, f"fewer than {least} keys": seen < least, f"more than {most} keys": seen > most}
        tests = tests if most > 1 else {"no key": seen == 0}  # mistakes do not show in rows of one key
        tests |= {f"a number of keys that is no multiple of {tile}": seen % tile != 0 for tile in TILES if most >= tile}
        numbers, count = np.unique(seen), len(np.unique(seen[wrong.rows]))
        for what in [what for what, rows in tests.items() if (rows == wrong.rows).all()][:1]:
            # Rows that see as many keys count as one: a number of keys may be wrong for another reason.
            is_empty = what == "no key"
            chosen = (wrong.rows.size, int(wrong.rows.sum())) if is_empty else (len(numbers), count)
            if chosen[1] < 2 or math.comb(*chosen) < CHOICES:
                return
            text = f"{{}} is wrong in just the rows that see {what}"
            yield wrong.fact("rows_by_keys", text, rows=wrong.rows.sum())


FACTS: Final = (factor, overflow, constant, moved, permuted, offset)
# Told of arrays that those say nothing of: the first that is true.
OTHERS: Final = (reordered, permuted_tiles, elsewhere, score_curve, refitted, part_factors, other_values, other_scores)
