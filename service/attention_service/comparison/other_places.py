"""Facts about outputs that hold right numbers of other places, in the place of their own or added to them.

What is sent is then the right numbers of other places, or what is left of it without the right ones of its own. Sums of
two right numbers have the errors of both.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Final

import numpy as np

from attention_service.backends.base import Check
from attention_service.comparison.errors import distances, largest
from attention_service.comparison.places import plural_of
from attention_service.comparison.wrong import LISTED, PROBED, Wrong
from attention_service.schemas.compare import Fact

# Rows by which features are told apart, and the most features that are.
ROWS: Final = 256
MAX_FEATURES: Final = 1024
# More rows, or parts of them, are not looked for in another place; pairs of them that are compared at a time.
MAX_PARTS: Final = 2**14
PAIRS: Final = 2**18
# Tiles of rows and features that a thread block, a warp or a matrix instruction stores.
STORED: Final = ((16, 16), (8, 8), (16, 8), (8, 16), (8, 32), (32, 8), (32, 32))
# Rows are cut into up to so many parts of features, of so many features at least.
CUTS: Final = (1, 2, 4, 8)
LEAST: Final = 2


def _said(wrong: Wrong, lost: float, others: np.ndarray, *, is_added: bool) -> str:
    """Where the right numbers of other places were sent, or added to the right ones, see `Wrong.said`."""
    if is_added:
        return wrong.said(lost + 1, (wrong.right + others) / 2, by=2.0)
    return wrong.said(lost, others)


def _sent(wrong: Wrong, at: tuple[np.ndarray, ...], *, is_added: bool) -> tuple[np.ndarray, float]:
    """What was sent in rows, without the right numbers if others are added to them, and the largest error of that."""
    return (
        (wrong.actual[at] - wrong.right[at], 2 * wrong.tolerance) if is_added else (wrong.actual[at], wrong.tolerance)
    )


def moved(wrong: Wrong) -> Iterator[Fact]:
    """Rows are the right ones of another place, which is as far away for each, or these are added to them."""
    shape, at = wrong.rows.shape, wrong.some(1)
    for is_added in (False, True) if wrong.right.shape[3] > 1 else ():
        (sent,), tolerance = _sent(wrong, at, is_added=is_added)
        near = (distances(wrong.right, sent) <= tolerance).all(axis=-1)
        steps = (np.argwhere(near) - np.array(at).ravel()).tolist()
        steps = [step for step in steps if any(step)]  # twice its own number is a factor
        for step in steps if len(steps) <= LISTED else ():
            rolled = np.roll(wrong.right, [-by for by in step], axis=(0, 1, 2))
            if said := _said(wrong, math.log2(wrong.rows.size), rolled, is_added=is_added):
                step = [(by + length // 2) % length - length // 2 for by, length in zip(step, shape, strict=True)]
                axes = zip(wrong.axes, step, strict=False)  # an array may have one more
                words = ", ".join(f"{name} i is that of i{by:+d}" for name, by in axes if by)
                text = f"{said} {{}} is right for another place: {words}"
                text = f"{said} {{}} has the right one of another place added to it: {words}" if is_added else text
                yield wrong.fact("moved", text, steps=step)
                return


def permuted(wrong: Wrong) -> Iterator[Fact]:
    """Rows have their right numbers in another order, or 0 in the place of some; or these are added to them."""
    length, at = wrong.right.shape[3], wrong.some(ROWS)
    for is_added in (False, True) if 2 <= length <= MAX_FEATURES else ():
        sent, tolerance = _sent(wrong, at, is_added=is_added)
        columns = wrong.right[at].T
        order = (np.square(columns).sum(axis=1) - 2 * (sent.T @ columns.T)).argmin(axis=1)
        kept = sent.any(axis=0)
        near = np.where(kept, wrong.right[at][:, order], 0)
        if kept.sum() < 2 or len(set(order.tolist())) < 2 or not (distances(sent, near) <= tolerance).all():
            continue
        if kept.all() and (order == np.arange(length)).all():
            continue  # twice its own numbers is a factor
        others = np.where(kept, wrong.right[..., order], 0)
        if said := _said(wrong, length * math.log2(length + 1), others, is_added=is_added):
            is_order = len(set(order[kept].tolist())) == kept.sum()
            order, zeros = np.where(kept, order, -1), "" if kept.all() else ", or is 0 where that is -1"
            what = "its right numbers in another order" if is_order else "right numbers more than once"
            listed = f"number i is {order[:LISTED].tolist()}[i]{zeros}"
            yield wrong.fact(
                "permuted", f"{said} {{}} has {what}{', added to itself' * is_added}: {listed}", order=order[:LISTED]
            )
            return


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
    names = ("batch entry", "key/value head", "head of a group", "row", "feature")
    groups = sizes.num_heads // sizes.num_kv_heads
    shape = (sizes.batch_size, sizes.num_kv_heads, groups, sizes.query_length, wrong.right.shape[3])
    probes = np.array(wrong.some(PROBED))
    for order in itertools.permutations(range(5)) if wrong.has_rows and wrong.right.size == math.prod(shape) else ():
        words = f"({', '.join(names[axis] for axis in order)})".replace(", feature)", ")")
        for is_back, what in ((False, f"is written as {words}"), (True, f"is taken for {words}")):
            found = _read(wrong, shape, order, probes, is_back=is_back)
            if not (distances(wrong.actual[tuple(probes)], found) <= wrong.tolerance).all():
                continue
            moved = wrong.right.reshape(shape)
            moved = (
                moved.reshape([shape[axis] for axis in order]).transpose(np.argsort(order))
                if is_back
                else moved.transpose(order)
            )
            if said := wrong.said(math.log2(240), moved.reshape(wrong.right.shape)):
                text = f"{said} {{}} has its axes in another order: memory {what}"
                yield wrong.fact("reordered", text, order=order[:4] if order[4] == 4 else order)
                return


def _read(
    wrong: Wrong, shape: tuple[int, ...], order: tuple[int, ...], rows: np.ndarray, *, is_back: bool
) -> np.ndarray:
    """The right numbers that rows (3, n) have if all are written in another order of their axes, or read in it."""
    start = np.ravel_multi_index(tuple(rows), wrong.rows.shape)
    flat = start[:, None] * shape[-1] + np.arange(shape[-1])
    lengths = [shape[axis] for axis in order]
    if is_back:
        places = np.unravel_index(flat, shape)
        flat = np.ravel_multi_index([places[axis] for axis in order], lengths)
    else:
        places = np.unravel_index(flat, lengths)
        flat = np.ravel_multi_index([places[order.index(axis)] for axis in range(len(shape))], shape)
    found: np.ndarray = wrong.right.reshape(-1)[flat]
    return found


def elsewhere(wrong: Wrong) -> Iterator[Fact]:
    """Each wrong row, or part of its features, is the right one of some other place, or 0; or that is added to it."""
    apart = distances(wrong.actual, wrong.right) > wrong.bounds
    features = np.flatnonzero(apart.any(axis=(0, 1, 2)))
    for count, is_added in itertools.product(CUTS, (False, True)):
        is_cut = len(features) % count == 0 and (count == 1 or len(features) // count >= LEAST)
        if is_cut and len(features) and 1 < wrong.rows.size * count <= MAX_PARTS:
            yield from itertools.islice(_parts_elsewhere(wrong, features, count, is_added=is_added), 1)


def _parts_elsewhere(wrong: Wrong, features: np.ndarray, count: int, *, is_added: bool) -> Iterator[Fact]:
    """The fact of the features of rows that are cut into so many parts."""
    shape, width = (*wrong.rows.shape, count), len(features) // count
    bounds = np.broadcast_to(wrong.bounds, wrong.right.shape)
    right, actual, limits = (array[..., features].reshape(-1, width) for array in (wrong.right, wrong.actual, bounds))
    most = 2 + 2 * largest(right)
    every = np.nan_to_num(right, posinf=most, neginf=-most)
    places = np.flatnonzero((distances(actual, right) > limits).any(axis=1))
    sent = actual[places] - right[places] if is_added else actual[places]
    if np.isnan(sent).any():
        return
    sent = np.clip(sent, -most, most)
    # Sums of two right numbers have the errors of both.
    widened = np.add if is_added else np.maximum
    some = slice(None, None, -(-len(sent) // PROBED))
    few = nearest_of(wrong.case.check, sent[some], every)
    is_near = (distances(sent[some], every[few]) <= widened(limits[places[some]], limits[few])).all(axis=1)
    if not (is_near | ~sent[some].any(axis=1)).all():
        return
    kept, nearest = sent.any(axis=1), nearest_of(wrong.case.check, sent, every)
    if (nearest == places).all():
        return  # twice its own numbers is a factor
    others, most_apart = right.copy(), limits.copy()
    others[places] = np.where(kept[:, None], right[nearest], 0) + (right[places] if is_added else 0)
    most_apart[places] = widened(limits[places], limits[nearest])
    predicted, slack = wrong.right.copy(), bounds.copy()
    predicted[..., features] = others.reshape(*wrong.rows.shape, -1)
    slack[..., features] = most_apart.reshape(*wrong.rows.shape, -1)
    lost = len(sent) * math.log2(len(every) + 1) + is_added * wrong.rows.sum() * wrong.right.shape[3]
    if kept.any() and wrong.said(lost, predicted, bounds=slack):
        is_row = len(features) == wrong.right.shape[3] and count == 1
        what = wrong.axes[2] if is_row else f"part of {width} features"
        places, nearest = (np.stack(np.unravel_index(one[kept], shape), axis=1) for one in (places, nearest))
        zeros = "" if kept.all() else f", or 0 ({len(sent) - kept.sum()} {plural_of(what)})"
        text = f"every wrong {what} of {{}} is the right one of another {what}{zeros}"
        text = f"to every wrong {what} of {{}} the right one of another {what} is added" if is_added else text
        text += f": {_in_words(places, nearest, shape, (*wrong.axes[:3], 'part')[: 3 + (count > 1)])}"
        yield wrong.fact("elsewhere", text, rows=kept.sum(), zeros=len(sent) - kept.sum())


def nearest_of(check: Check, sent: np.ndarray, every: np.ndarray) -> np.ndarray:
    """The index of the vector of `every` (m, n) that each of `sent` (r, n) is closest to."""
    sizes, found = np.square(every).sum(axis=1), np.empty(len(sent), np.int64)
    for start in range(0, len(sent), step := max(1, PAIRS // len(every))):
        check()
        found[start : start + step] = (sizes - 2 * (sent[start : start + step] @ every.T)).argmin(axis=1)
    return found


def _in_words(places: np.ndarray, of: np.ndarray, shape: tuple[int, ...], axes: tuple[str, ...]) -> str:
    """Which places (n, axes) have the numbers of which others: by a step or an order along axes, or the first four."""
    words = []
    for axis, name in enumerate(axes):
        here, there, length = places[:, axis], of[:, axis], shape[axis]
        steps = (there - here) % length
        if (steps == steps[0]).all():
            by = (int(steps[0]) + length // 2) % length - length // 2
            words += [f"{name} i is that of i{by:+d}"] if by else []
            continue
        order = np.full(length, -1)
        order[here] = there
        if length > LISTED or (order[here] != there).any():
            listed = zip(places[:4, : len(axes)].tolist(), of[:4, : len(axes)].tolist(), strict=True)
            return f"[{', '.join(axes)}] {', '.join(f'{to} is {one}' for to, one in listed)}"
        words.append(f"{name} i is that of {np.where(order < 0, np.arange(length), order).tolist()}[i]")
    return ", ".join(words)
