"""Which terms of their sums wrong gradients have: of query heads, tiles and parts of the gradient of a score.

What each term adds is computed for all or for a few tokens, the numbers of times that explain the error are fitted, and
the gradients with these are computed as a whole before a fact is told.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from attention_service.attention.gradients import PREFIX
from attention_service.attention.score_term import Part
from attention_service.attention.shapes import canonical
from attention_service.attention.tile import Tile
from attention_service.backends.base import Check
from attention_service.backends.dense.gradients import TileBackward
from attention_service.backends.dense.library import Array
from attention_service.comparison.case import TILES
from attention_service.comparison.errors import distances
from attention_service.comparison.gradients.case import MOST_TERMS, Sums
from attention_service.comparison.gradients.judge import GradientTruth
from attention_service.comparison.gradients.mutants.scores import NoDelta, OtherCotangent
from attention_service.comparison.gradients.mutants.sums import Counted
from attention_service.comparison.gradients.mutants.table import Wrong as WrongTiles
from attention_service.comparison.gradients.mutants.table import is_softmax
from attention_service.comparison.places import in_words, runs_of
from attention_service.comparison.wrong import BITS, LISTED, Wrong, shown
from attention_service.schemas.compare import Fact

# The most heads or batch entries whose gradients are told apart in sums.
MOST_PLACES: Final = 64
# Blocks of rows or keys that the terms of a sum come in, at most; the tokens whose sums are looked at; numbers of times
# that are fitted at once.
MOST_BLOCKS: Final = 64
SAMPLE: Final = 64
MOST_FITTED: Final = 256
# Pairs of tiles that are told.
LISTED_PAIRS: Final = 4
# The largest table of how often the terms of each row count for each key.
MOST_SCORES: Final = 2**22
# Terms count at most so many times.
MOST_TIMES: Final = 16
# Bits that a fitted number takes, if it is a whole one and if it is any.
WHOLE_BITS: Final = math.log2(2 * MOST_TIMES)
REAL_BITS: Final = 53.0


@dataclass(frozen=True, eq=False)
class WrongGradient(Wrong):
    """A wrong gradient (b, h, l, d), each number of which has a limit of its own. limits: like the right numbers"""

    limits: np.ndarray

    @property
    def bounds(self) -> np.ndarray:
        """The largest error of each number that legal rounding explains."""
        return self.limits

    def agrees(self, predicted: np.ndarray, limits: np.ndarray, lost: float) -> bool:
        """True if all rows are what is predicted, and their errors tell more bits than are lost by fits."""
        self.case.check()
        if not self.sums[2].sum() - lost >= BITS:
            return False
        return bool((distances(self.actual, predicted) <= np.maximum(limits, self.limits)).all())


def as_rows(truth: GradientTruth, name: str, array: np.ndarray) -> np.ndarray:
    """A gradient with the axes (b, h, l, d), or its rows one below the other."""
    field, plan = name.removeprefix(PREFIX), truth.case.plan
    if field in ("query", "key", "value"):
        role = getattr(plan.roles, field)
        if role.map is None:
            heads = plan.sizes.num_heads if field == "query" else plan.sizes.num_kv_heads
            return canonical(array, plan.layout, heads)
    return array.reshape(1, 1, -1, array.shape[-1] if array.ndim else 1)


def slices(array: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """An array (b, h, l, d) with one row for each index of some axes, the first ones of (b, h)."""
    moved = np.moveaxis(array, axes, range(len(axes)))
    return moved.reshape(math.prod(moved.shape[: len(axes)]), -1)


def whole(rows: np.ndarray, shape: tuple[int, ...], axes: tuple[int, ...]) -> np.ndarray:
    """The array (b, h, l, d) of rows that `slices` made."""
    first = [shape[axis] for axis in axes]
    others = [length for axis, length in enumerate(shape) if axis not in axes]
    return np.moveaxis(rows.reshape(*first, *others), range(len(axes)), axes)


def whole_sums(sums: np.ndarray, parts: np.ndarray) -> np.ndarray:
    """(m, n), how often each of n rows is in each of m sums of them, in whole numbers that fit best."""
    return whole_numbers(np.linalg.lstsq(parts @ parts.T, parts @ sums.T, rcond=None)[0].T)


def usual_where_any_fits(
    check: Check, times: np.ndarray, usual: np.ndarray, parts: np.ndarray, limits: np.ndarray
) -> np.ndarray:
    """Fitted numbers of times (m, n), but the usual ones where parts (n, x) are so small that rounding fits any number.

    limits: (m, x), of the sums
    """
    found = times.copy()
    for place, source in np.argwhere(times != usual):
        check()
        if (np.abs((times - usual)[place, source] * parts[source]) <= limits[place]).all():
            found[place, source] = usual[place, source]
    return found


class RecordedSums(WrongTiles):
    """The right backward pass, which keeps parts of its sums. kept: arrays by role; role: whose sum is computed"""

    def __init__(self, *arguments: Any, kept: Sums, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.kept, self.role = kept, "value"

    def run(self, *arguments: Any) -> list[Part]:
        """What a tile adds; the sums of values come first."""
        self.role = "value"
        return super().run(*arguments)

    def products(self, tile: Tile, gradient: Array) -> list[Part]:
        """What a tile adds to query and key, after the sums of values."""
        self.role = "key"
        return super().products(tile, gradient)


class PerHead(RecordedSums):
    """Keeps what each query head adds to the gradients of key and value. kept: (b, h, k, d or e) by role"""

    def over_rows(self, left: Array, right: Array, tile: Tile) -> Array:
        """The sums over rows and the heads of groups, of which those of each head are kept."""
        if self.role in self.kept:
            self.kept[self.role][tile.batch, tile.heads, tile.columns] += left.swapaxes(-1, -2) @ right
        return super().over_rows(left, right, tile)


def has_plain_sums(wrong: WrongGradient, truth: GradientTruth) -> bool:
    """True if a gradient of query, key or value is what the tiles add up, without steps, maps and a past."""
    plan, field = truth.case.plan, wrong.name.removeprefix(PREFIX)
    if field not in ("query", "key", "value") or plan.roles.past_length:
        return False
    place = ("query", "key", "value").index(field)
    return not plan.steps[place] and plan.roles.inputs[place].map is None and np.isfinite(wrong.actual).all()


def terms_of_heads(wrong: WrongGradient, truth: GradientTruth) -> Iterator[Fact]:
    """The gradient of a key/value head is a sum over other query heads than all of its group."""
    case, sizes, role = truth.case, truth.case.plan.sizes, wrong.name.removeprefix(PREFIX)
    count, (b, g, k, d) = sizes.num_heads, wrong.right.shape
    if (
        case.group == 1
        or role == "query"
        or not has_plain_sums(wrong, truth)
        or count > MOST_PLACES
        or b * k * d < 2 * count
        or b * count * k * d > MOST_TERMS
    ):
        return
    kept = {role: np.zeros((b, count, k, d))}
    case.run(partial(PerHead, case=case, kept=kept))
    heads = slices(kept[role], (1,))
    own = slices(wrong.actual, (1,))
    unit = math.sqrt(float(np.square(heads).mean())) or 1.0
    limits = slices(wrong.limits, (1,))
    usual = np.arange(count) // case.group == np.arange(g)[:, None]
    times = usual_where_any_fits(case.check, whole_sums(own / unit, heads / unit), usual.astype(float), heads, limits)
    predicted = whole(times @ heads, wrong.right.shape, (1,))
    # Each term may be off as much as the sums that it is part of.
    widened = np.broadcast_to(wrong.limits.max(axis=1, keepdims=True), wrong.right.shape)
    if wrong.agrees(predicted, widened, times.size * math.log2(3)):
        words = [f"{place}: {_heads_in_words(times[place])}" for place in range(min(g, LISTED))]
        text = (
            f"{{}} is a sum over other query heads than all of each group: those of key/value head {'; '.join(words)}"
        )
        yield wrong.fact("terms", text, times=times.ravel()[:LISTED])


def _heads_in_words(times: np.ndarray) -> str:
    """The query heads of a sum: "heads 0 to 2, and 2 times head 3"."""
    words = [
        f"{'' if by == 1 else f'{by:g} times '}{in_words(runs_of(np.flatnonzero(times == by)), 'and')}"
        for by in np.unique(times[times != 0])
    ]
    return ", ".join(words) if words else "none"


class Blocks(RecordedSums):
    """Keeps what blocks of rows add to the gradients of some keys, and blocks of keys to those of some queries.

    place: batch entry and head of the gradient; tokens: (s,), of it; size: of a block
    kept: (heads of a group, blocks, s, d or e)
    """

    def __init__(self, *arguments: Any, place: tuple[int, int], tokens: np.ndarray, size: int, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.place, self.tokens, self.size = place, tokens, size

    def products(self, tile: Tile, gradient: Array) -> list[Part]:
        """What a tile adds to query and key; blocks of keys are kept."""
        entry, head = self.place
        is_here = tile.batch.start <= entry < tile.batch.stop and tile.heads.start <= head < tile.heads.stop
        if "query" in self.kept and is_here:
            inside = (self.tokens >= tile.rows.start) & (self.tokens < tile.rows.stop)
            own = gradient[entry - tile.batch.start, head - tile.heads.start, self.tokens[inside] - tile.rows.start]
            key = self.key[entry, head // self.case.group, tile.columns]
            for block, part in _blocks(tile.columns, self.size):
                self.kept["query"][0, block, inside] += own[:, part] @ key[part]
        return super().products(tile, gradient)

    def over_rows(self, left: Array, right: Array, tile: Tile) -> Array:
        """The sums over rows and the heads of groups; blocks of rows are kept."""
        entry, head = self.place
        is_here = tile.batch.start <= entry < tile.batch.stop and tile.kv_heads.start <= head < tile.kv_heads.stop
        if self.role in self.kept and is_here:
            inside = (self.tokens >= tile.columns.start) & (self.tokens < tile.columns.stop)
            first = head * self.case.group - tile.heads.start
            place = entry - tile.batch.start, slice(first, first + self.case.group)
            own = left[place][..., self.tokens[inside] - tile.columns.start]
            for block, part in _blocks(tile.rows, self.size):
                self.kept[self.role][:, block, inside] += own[:, part].swapaxes(-1, -2) @ right[place][:, part]
        return super().over_rows(left, right, tile)


def _blocks(part: slice, size: int) -> Iterator[tuple[int, slice]]:
    """The blocks of some rows or keys, each with its place among them."""
    for block in range(part.start // size, -(-part.stop // size)):
        yield block, slice(max(block * size - part.start, 0), min((block + 1) * size, part.stop) - part.start)


@dataclass(frozen=True, eq=False)
class Labels:
    """A way to group the terms of a gradient: all with one label count as often.

    of_blocks: (heads of a group, blocks, tokens), labels of blocks of terms for each token of a sample
    shape: of a table of all labels: (heads,), (tiles,), or tiles of tokens and tiles of terms; tile: the size of a tile
    """

    of_blocks: np.ndarray
    shape: tuple[int, ...]
    tile: int = 0


def terms_of_tiles(wrong: WrongGradient, truth: GradientTruth) -> Iterator[Fact]:
    """A gradient has the terms of some tiles, or of some heads of each group, several times or not at all."""
    if not has_plain_sums(wrong, truth):
        return
    case, role, sizes = truth.case, wrong.name.removeprefix(PREFIX), truth.case.plan.sizes
    length = sizes.key_length if role == "query" else sizes.query_length
    errors = wrong.sums[2].sum(axis=-1)
    entry, head = (int(one) for one in np.unravel_index(int(errors.argmax()), errors.shape))
    tokens = np.flatnonzero(wrong.rows[entry, head])
    tokens = tokens[np.unique(np.linspace(0, len(tokens) - 1, SAMPLE).astype(int))]
    group, size = 1 if role == "query" else case.group, TILES[0]
    while length > size * MOST_BLOCKS:
        size *= 2
    shape = (group, -(-length // size), len(tokens), wrong.right.shape[3])
    if math.prod(shape) > MOST_TERMS:
        return
    blocks = np.zeros(shape)
    case.run(partial(Blocks, case=case, place=(entry, head), tokens=tokens, size=size, kept={role: blocks}))
    error, limits = (wrong.actual - wrong.right)[entry, head, tokens], wrong.limits[entry, head, tokens]
    for labels in _labels(blocks.shape[:2], size, tokens, (length, wrong.right.shape[2])):
        counts = _fitted(blocks, labels, error, limits)
        if counts is None:
            continue
        widened = wrong.limits * max(1.0, float(np.abs(counts).max()))
        lost = WHOLE_BITS * len(np.unique(labels.of_blocks))
        if wrong.agrees(_counted(truth, wrong.name, labels, counts), widened, lost):
            text = _counts_in_words(labels, counts, role == "query", (length, wrong.right.shape[2]))
            yield wrong.fact("terms", f"{{}} has {text}", times=counts.ravel()[:LISTED])
            return


def _labels(shape: tuple[int, int], size: int, tokens: np.ndarray, lengths: tuple[int, int]) -> Iterator[Labels]:
    """Ways to group blocks of terms. shape: heads of a group and blocks; size: of a block; tokens: of the sample

    lengths: of what the terms are of, and of the gradient
    """
    heads, count = shape
    zeros = np.zeros((heads, count, len(tokens)), np.int64)
    if heads > 1:
        yield Labels(zeros + np.arange(heads)[:, None, None], (heads,))
    tiles = [tile for tile in TILES if tile >= size]
    of_blocks = {tile: zeros + (np.arange(count) * size // tile)[:, None] for tile in tiles}
    for tile in (tile for tile in tiles if lengths[0] > tile):
        yield Labels(of_blocks[tile], (-(-lengths[0] // tile),), tile)
    for tile in (tile for tile in tiles if max(lengths) > tile and math.prod(lengths) <= MOST_SCORES):
        of_terms, of_tokens = (-(-length // tile) for length in lengths)
        yield Labels(of_blocks[tile] + tokens // tile * of_terms, (of_tokens, of_terms), tile)


def _fitted(blocks: np.ndarray, labels: Labels, error: np.ndarray, limits: np.ndarray) -> np.ndarray | None:
    """How often the terms of each label count, whole numbers; None if that does not explain the errors (tokens, d)."""
    names, inverse = np.unique(labels.of_blocks, return_inverse=True)
    inverse = inverse.reshape(labels.of_blocks.shape)
    if len(names) > min(MOST_FITTED, error.size // 2):
        return None
    terms = np.zeros((len(names), *error.shape))
    for token in range(error.shape[0]):
        np.add.at(terms[:, token], inverse[:, :, token], blocks[:, :, token])
    flat, left = (terms / limits).reshape(len(names), -1), (error / limits).ravel()
    more = whole_numbers(np.linalg.lstsq(flat.T, left, rcond=None)[0])
    left = left - more @ flat
    if not more.any() or not (np.abs(left) <= 2).all():
        return None
    for place in np.argsort(np.abs(flat).max(axis=1)):  # terms as small as rounding fit any number
        for by in (0, -1, 1):
            other = left + (more[place] - by) * flat[place]
            if (np.abs(other) <= 1).all():
                left, more[place] = other, by
                break
    counts = np.ones(math.prod(labels.shape))
    counts[names] += more
    return counts.reshape(labels.shape)


def whole_numbers(times: np.ndarray) -> np.ndarray:
    """The nearest whole numbers of times, MOST_TIMES at most."""
    return np.clip(np.nan_to_num(np.rint(times)), -MOST_TIMES, MOST_TIMES)


def _counted(truth: GradientTruth, name: str, labels: Labels, counts: np.ndarray) -> np.ndarray:
    """The gradient of a name whose terms count as often as their labels say."""
    case, sizes, of_query = truth.case, truth.case.plan.sizes, name == "grad_query"
    if not labels.tile:
        table = counts[np.arange(sizes.num_heads) % case.group][:, None, None]
    else:
        rows, keys = np.arange(sizes.query_length)[:, None] // labels.tile, np.arange(sizes.key_length) // labels.tile
        terms, tokens = (keys, rows) if of_query else (rows, keys)
        small = counts.astype(np.int8)
        table = small[terms] if counts.ndim == 1 else small[tokens, terms]
    kind = partial(Counted, case=case, **{"of_query" if of_query else "of_keys": table})
    return as_rows(truth, name, case.run(kind)[name])


def _counts_in_words(labels: Labels, counts: np.ndarray, of_query: bool, lengths: tuple[int, int]) -> str:
    """How often terms count that do not count once. of_query: True for those of the query; lengths: see _labels"""
    names = ("keys", "rows") if of_query else ("queries", "keys")

    def tiles(axis: int, which: np.ndarray) -> str:
        tokens = np.flatnonzero(np.isin(np.arange(lengths[axis]) // labels.tile, which))
        return f"{names[axis]} {in_words(runs_of(tokens), 'and')}"

    def places(by: float) -> str:
        at = np.argwhere(counts == by)
        if not labels.tile:
            return f"query heads {in_words(runs_of(at[:, 0]), 'and')} of each group"
        if counts.ndim == 1:
            return tiles(0, at)
        pairs = [f"{tiles(0, term)} for {tiles(1, token)}" for token, term in at[:LISTED_PAIRS]]
        more = f" and {len(at) - LISTED_PAIRS} more pairs of tiles" if len(at) > LISTED_PAIRS else ""
        return ", ".join(pairs) + more

    times = {0: "not at all", 2: "twice"}
    words = [f"the terms of {places(by)} {times.get(by, f'{by:g} times')}" for by in np.unique(counts[counts != 1])]
    return f"{'; '.join(words)}, and all others once"


def terms_of_scores(wrong: WrongGradient, truth: GradientTruth) -> Iterator[Fact]:
    """The gradient of the scores P ⊙ (dP - D + dL) has its terms in other numbers."""
    case, field = truth.case, wrong.name.removeprefix(PREFIX)
    if field not in ("query", "key") or not is_softmax(case) or case.cotangent is None:
        return
    if not np.isfinite(wrong.actual).all():
        return
    name, gradients = wrong.name, case.plan.gradients
    makes: dict[str, Callable[..., TileBackward]] = {"- P ⊙ D": partial(NoDelta, case=case)}
    if gradients is not None and gradients.logsumexp is not None:
        makes["P ⊙ dL"] = partial(OtherCotangent, case=case, factor=0.0)
    terms = {what: wrong.right - as_rows(truth, name, case.run(kind)[name]) for what, kind in makes.items()}
    terms = {"P ⊙ dP": wrong.right - np.sum(list(terms.values()), axis=0)} | terms
    rows = np.stack([array[wrong.rows] / wrong.limits[wrong.rows] for array in terms.values()]).reshape(len(terms), -1)
    sent = (wrong.actual[wrong.rows] / wrong.limits[wrong.rows]).ravel()
    times: np.ndarray = np.linalg.lstsq(rows.T, sent, rcond=None)[0]
    error = np.sqrt(np.diag(np.linalg.pinv(rows @ rows.T)))
    if (np.abs(times - np.rint(times)) <= 4 * error + 1e-3).all():  # whole numbers, which have no error
        times, error = np.rint(times), 0 * error
    predicted = np.tensordot(times, np.stack(list(terms.values())), 1)
    widened = wrong.limits * max(1.0, float(np.abs(times).max()))
    if (times != 1).any() and wrong.agrees(predicted, widened, REAL_BITS * len(times)):
        words = [f"{what} {shown(float(by), float(e))} times" for what, by, e in zip(terms, times, error, strict=True)]
        text = f"{{}} is made of a gradient of scores that has {', '.join(words)} in the place of once each"
        yield wrong.fact("terms", text, times=times)
