"""Facts about wrong arrays, told where no known mistake is proved; each is checked on all rows before it is said."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from attention_service.comparison.errors import distances, largest, largest_number
from attention_service.comparison.legal import LOG2E
from attention_service.comparison.other_scores import other_scores
from attention_service.comparison.other_values import other_values
from attention_service.comparison.places import plural_of
from attention_service.comparison.refitted import refitted
from attention_service.comparison.wrong import Wrong, shown
from attention_service.schemas.compare import Fact

LISTED: Final = 16
LARGEST_HALF: Final = largest_number(np.dtype(np.float16))
# Kernels round the number that overflows by at most this part of it.
ROUGHLY: Final = 1e-3
# Wrong elements that are all one number, other than 0, are no chance if they are so many.
ALIKE: Final = 4
# Rows are wrong in order, by the keys that they see, if so many other rows could have been wrong in their place.
CHOICES: Final = 1000
# Rows by which features are told apart, and the most features that are.
ROWS: Final = 256
MAX_FEATURES: Final = 1024
TILES: Final = (128, 64, 32, 16, 8)
# Tiles of rows and features that a thread block, a warp or a matrix instruction stores.
STORED: Final = ((16, 16), (8, 8), (16, 8), (8, 16), (8, 32), (32, 8), (32, 32))
# More rows are not looked for in another place; pairs of rows that are compared at a time.
MAX_ROWS: Final = 2**13
PAIRS: Final = 2**18


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
    usable = wrong.rows & np.isfinite(own + products + rights) & (rights > 0)
    whole = float(products[usable].sum() / rights[usable].sum())
    error = float(wrong.errors(whole).min())
    if abs(whole) > error and (said := wrong.said(wrong.sums[3].max(), by=whole)):
        text = f"{said} {{}} is {shown(whole, error)} times the right one{_named(wrong, whole, error)}"
        yield wrong.fact("factor", text, factor=whole)
        return
    each = np.where(usable, products / rights, 1.0)
    least, most = float(each[wrong.rows].min()), float(each[wrong.rows].max())
    if max(-least, most) > error and wrong.said(wrong.sums[3].sum(), by=each):
        ends = (shown(one, float(wrong.errors(each)[wrong.rows & (each == one)].min())) for one in (least, most))
        said = f"{wrong.every(is_wrong=True)} {{}} is right up to a factor of the {wrong.axes[2]}"
        text = f"{said}, from {' to '.join(ends)}"
        yield next(_extra_sum(wrong, usable), wrong.fact("row_factor", text, least=least, most=most))


def _extra_sum(wrong: Wrong, usable: np.ndarray) -> Iterator[Fact]:
    """The factors of rows are those of a sum Z (1 + m x) in the place of Z, with one m, or one of each head."""
    own, products, _ = wrong.sums[4:]
    forms = {"": np.ones(usable.shape)}
    if wrong.has_rows and wrong.case.plan.normalization == "softmax":
        zero, hidden = np.exp(-wrong.about["logsumexp"]), wrong.case.plan.sizes.key_length - wrong.about["seen"]
        forms = {"keys of score 0": zero, "times its largest exponential": wrong.about["weight"]} | forms
        forms["keys of score 0 for each hidden key"] = zero * hidden
    for axes, (name, x) in itertools.product(((0, 1, 2), (0, 2)), forms.items()):
        fits = usable & np.isfinite(x)
        extra = np.where(fits, x * (products - own), 0).sum(axes, keepdims=True)
        extra = np.nan_to_num(extra / np.where(fits, x * x * own, 0).sum(axes, keepdims=True))
        by = 1 / (1 + extra * x)
        if usable.sum() >= 2 * extra.size and (said := wrong.said(wrong.sums[3].max(axes).sum(), by=by)):
            numbers = (extra.ravel() if name else by[0, :, 0])[:LISTED]
            errors = wrong.errors(by) / np.where(fits, np.abs(x) * by**2 if name else 1, 0)
            errors = np.where(usable.any(axes), errors.min(axes), 0).ravel()  # 1, or 0, in heads that are right
            text = ", ".join(map(shown, numbers, errors))
            heads = f" of {plural_of(wrong.axes[1])} 0 to {len(numbers) - 1}" if len(numbers) > 1 else ""
            what = f"is right up to a factor: the sum of its softmax differs by {text} {name}"
            what += ": padded keys?" if name == "keys of score 0" and not heads and numbers[0] > 0.5 else ""
            what = what if name else f"is {text} times the right one"
            yield wrong.fact("extra_sum" if name else "head_factor", f"{said} {{}}{heads} {what}", numbers=numbers)


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


def moved(wrong: Wrong) -> Iterator[Fact]:
    """Rows are the right ones of another place, which is as far away for each."""
    first, shape = np.array(wrong.some(1)).ravel(), wrong.rows.shape
    near = (distances(wrong.right, wrong.actual[tuple(first)]) <= wrong.tolerance).all(axis=-1)
    steps = (np.argwhere(near) - first).tolist()
    for step in steps if len(steps) <= LISTED and wrong.right.shape[3] > 1 else ():
        rolled = np.roll(wrong.right, [-by for by in step], axis=(0, 1, 2))
        if said := wrong.said(math.log2(wrong.rows.size), rolled):
            step = [(by + length // 2) % length - length // 2 for by, length in zip(step, shape, strict=True)]
            axes = zip(wrong.axes, step, strict=False)  # an array may have one more
            words = [f"{name} i is that of i{by:+d}" for name, by in axes if by]
            yield wrong.fact("moved", f"{said} {{}} is right for another place: {', '.join(words)}", steps=step)
            return


def permuted(wrong: Wrong) -> Iterator[Fact]:
    """Rows have their right numbers in another order, or 0 in the place of some."""
    length = wrong.right.shape[3]
    if 2 <= length <= MAX_FEATURES:
        chosen = wrong.some(ROWS)
        order = _order(wrong.actual[chosen], wrong.right[chosen])
        lost = length * math.log2(length + 1)
        if order.any() and (said := wrong.said(lost, np.where(order < 0, 0, wrong.right[..., order]))):
            zeros = ", or is 0 where that is -1" if (order < 0).any() else ""
            text = f"{{}} has its right numbers in another order: number i is {order[:LISTED].tolist()}[i]{zeros}"
            yield wrong.fact("permuted", f"{said} {text}", order=order[:LISTED])


def _order(actual: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Which right number (n,) each number of these rows (r, n) is, -1 for 0; all 0 if two are the same one."""
    found = (np.square(right).sum(axis=0)[:, None] - 2 * (right.T @ actual)).argmin(axis=0)
    kept = actual.any(axis=0)
    is_order = 1 < kept.sum() == len(set(found[kept].tolist()))
    return np.where(kept, found, -1) if is_order else np.zeros_like(found)


def permuted_tiles(wrong: Wrong) -> Iterator[Fact]:
    """Tiles of rows and features have their right numbers in another order, each in the same one."""
    rows, length = wrong.right.shape[2:]
    for height, width in STORED:
        if rows % height or length % width:
            continue
        count, right = height * width, _in_tiles(wrong.right, height, width)
        places = np.argwhere(wrong.rows.reshape(*right.shape[:3], height).any(axis=3))
        chosen = tuple(places[:: -(-len(places) * right.shape[3] // ROWS)].T)
        actual = _in_tiles(wrong.actual, height, width)[chosen]
        order = _order(actual.reshape(-1, count), right[chosen].reshape(-1, count))
        moved = np.flatnonzero(order != np.arange(count))[:4]
        if not order.any() or (order < 0).any() or not len(moved):
            continue
        found = right.reshape(*right.shape[:4], count)[..., order].reshape(right.shape).swapaxes(3, 4)
        if said := wrong.said(count * math.log2(count + 1), found.reshape(wrong.right.shape)):
            pairs = zip(moved.tolist(), order[moved].tolist(), strict=True)
            listed = ", ".join(f"{list(divmod(to, width))} is {list(divmod(of, width))}" for to, of in pairs)
            tile = f"{height} {plural_of(wrong.axes[2])} and {width} numbers"
            text = f"{{}} has its right numbers in another order, the same in each tile of {tile}: {listed}"
            yield wrong.fact("permuted_tiles", f"{said} {text}", tile=(height, width), order=order[:LISTED])
            return


def _in_tiles(array: np.ndarray, height: int, width: int) -> np.ndarray:
    """The tiles of an array (b, h, q, n), (b, h, q / height, n / width, height, width)."""
    b, h, rows, length = array.shape
    return array.reshape(b, h, rows // height, height, length // width, width).swapaxes(3, 4)


def reordered(wrong: Wrong) -> Iterator[Fact]:
    """Rows are written with their axes in one order, and read in another."""
    sizes = wrong.case.plan.sizes
    axes, groups = ("batch entry", "key/value head", "head of a group", "row"), sizes.num_heads // sizes.num_kv_heads
    lengths = (sizes.batch_size, sizes.num_kv_heads, groups, sizes.query_length)
    for order in itertools.permutations(range(4)) if wrong.has_rows else ():
        moved = wrong.right.reshape(*lengths, -1).transpose(*order, 4)
        back = wrong.right.reshape(moved.shape).transpose(*np.argsort(order), 4)
        words = f"({', '.join(axes[axis] for axis in order)})"
        for found, what in ((moved, f"is written as {words}"), (back, f"is taken for {words}")):
            if said := wrong.said(math.log2(48), found.reshape(wrong.right.shape)):
                text = f"{said} {{}} has its axes in another order: memory {what}"
                yield wrong.fact("reordered", text, order=order)
                return


def elsewhere(wrong: Wrong) -> Iterator[Fact]:
    """Each wrong row is the right one of some other row, or 0."""
    shape, places = wrong.rows.shape, np.argwhere(wrong.rows)
    most = 2 + 2 * largest(wrong.right)
    right = np.nan_to_num(wrong.right.reshape(wrong.rows.size, -1), posinf=most, neginf=-most)
    sizes, sent = np.square(right).sum(axis=1), wrong.actual[wrong.rows]
    if not 1 < wrong.rows.size <= MAX_ROWS or np.isnan(sent).any():
        return
    nearest = np.empty(len(sent), np.int64)
    for start in range(0, len(sent), step := max(1, PAIRS // wrong.rows.size)):
        wrong.case.check()
        numbers = np.clip(sent[start : start + step], -most, most)
        nearest[start : start + step] = (sizes - 2 * (numbers @ right.T)).argmin(axis=1)
    kept, predicted = sent.any(axis=1), wrong.right.copy()
    predicted[wrong.rows] = np.where(kept[:, None], wrong.right.reshape(right.shape)[nearest], 0)
    if kept.any() and wrong.said(len(sent) * math.log2(len(right) + 1), predicted):
        of = np.stack(np.unravel_index(nearest, shape), axis=1)[kept][:4].tolist()
        listed = ", ".join(f"{to} is {one}" for to, one in zip(places[kept][:4].tolist(), of, strict=True))
        zeros = "" if kept.all() else f", or 0 ({len(sent) - kept.sum()} {plural_of(wrong.axes[2])})"
        row, axes = wrong.axes[2], ", ".join(wrong.axes[:3])
        text = f"every wrong {row} of {{}} is the right one of another {row}{zeros}: [{axes}] {listed}"
        yield wrong.fact("elsewhere", text, rows=kept.sum(), zeros=len(sent) - kept.sum())


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
OTHERS: Final = (reordered, permuted_tiles, elsewhere, refitted, other_values, other_scores)
