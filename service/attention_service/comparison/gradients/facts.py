"""Facts about wrong gradients: where their right numbers are, and which terms of their sums they have."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from attention_service.attention.gradients import PREFIX
from attention_service.attention.score_term import Part
from attention_service.attention.shapes import canonical
from attention_service.attention.tile import Tile
from attention_service.backends.dense.library import Array
from attention_service.comparison.baseline import CORRECT
from attention_service.comparison.case import TILES, Case
from attention_service.comparison.errors import distances
from attention_service.comparison.facts import LISTED, MAX_ROWS, PAIRS, find_facts
from attention_service.comparison.gradients.case import Gradients, Sums
from attention_service.comparison.gradients.judge import GradientTruth
from attention_service.comparison.gradients.mutants.scores import NoDelta, OtherCotangent
from attention_service.comparison.gradients.mutants.sums import Counted
from attention_service.comparison.gradients.mutants.table import Wrong as WrongTiles
from attention_service.comparison.gradients.mutants.table import is_softmax
from attention_service.comparison.judged import Judged
from attention_service.comparison.places import in_words, plural_of, runs_of
from attention_service.comparison.wrong import BITS, Wrong, shown
from attention_service.schemas.compare import Fact

# The most batch entries and heads whose gradients are told apart in sums.
MOST_PLACES: Final = 64
# Terms of a sum come in blocks of so many rows or keys; the tokens whose sums are looked at.
BLOCK: Final = TILES[0]
SAMPLE: Final = 64
# The largest table of how often the terms of each row count for each key.
MOST_SCORES: Final = 2**22
# Terms count at most so often, and once if that is as near to the fit as this.
MOST_TIMES: Final = 16
# Bits that a fitted number takes, if it is a whole one and if it is any.
WHOLE_BITS: Final = math.log2(2 * MOST_TIMES)
REAL_BITS: Final = 53.0
AXES: Final = ("batch entry", "head", "row", "feature")


@dataclass(frozen=True, eq=False)
class WrongGradient(Wrong):
    """A wrong gradient (b, h, l, d), each number of which has a limit of its own. limits: of right numbers, like them"""

    limits: np.ndarray

    @property
    def bounds(self) -> np.ndarray:
        """The largest error of each number that legal rounding explains."""
        return self.limits

    def agrees(self, predicted: np.ndarray, limits: np.ndarray, lost: float) -> bool:
        """True if all wrong rows are what is predicted, which tells more than the bits that are lost by fits."""
        self.case.check()
        if not self.sums[2].sum() - lost >= BITS:
            return False
        return bool(
            (distances(self.actual, predicted) <= np.maximum(limits, self.limits)).all(axis=-1)[self.rows].all()
        )


def facts_of_gradients(truth: GradientTruth, judged: Mapping[str, Judged], case: Case) -> tuple[Fact, ...]:
    """What is true of all gradients that are wrong. case: of the forward pass"""
    found: list[Fact] = []
    with np.errstate(all="ignore"):
        for name in (name for name, one in judged.items() if one.ratio > CORRECT):
            sent, right, limits = (
                _as_rows(truth, name, arrays[name]) for arrays in (truth.sent, truth.case.right, truth.limits.limits)
            )
            axes = tuple("key" if one == "row" and "query" not in name else one for one in AXES)
            limits = CORRECT * limits
            wrong = WrongGradient(name, axes, sent, right, float(limits.max()), case, has_rows=False, limits=limits)
            own = list(_summed_places(wrong)) or find_facts([wrong])
            others = itertools.chain(_added_rows(wrong), _terms_of_heads(wrong, truth))
            others = itertools.chain(others, _terms_of_tiles(wrong, truth), _terms_of_scores(wrong, truth))
            found += own or list(itertools.islice(others, 1))
    return tuple(found[:LISTED])


def _as_rows(truth: GradientTruth, name: str, array: np.ndarray) -> np.ndarray:
    """A gradient with the axes (b, h, l, d), or its rows one below the other."""
    field, plan = name.removeprefix(PREFIX), truth.case.plan
    if field in ("query", "key", "value"):
        role = getattr(plan.roles, field)
        if role.map is None:
            heads = plan.sizes.num_heads if field == "query" else plan.sizes.num_kv_heads
            return canonical(array, plan.layout, heads)
    return array.reshape(1, 1, -1, array.shape[-1] if array.ndim else 1)


def _summed_places(wrong: WrongGradient) -> Iterator[Fact]:
    """Batch entries or heads are the right ones of others, or sums of them."""
    for axes, what in (((1,), "head"), ((0,), "batch entry"), ((0, 1), "batch entry and head")):
        own, right, limits = (_slices(array, axes) for array in (wrong.actual, wrong.right, wrong.limits))
        count, numbers = right.shape
        if not 1 < count <= MOST_PLACES or numbers < 2 * count or not np.isfinite(own).all():
            continue
        unit = math.sqrt(float(np.square(right).mean())) or 1.0
        times = np.linalg.lstsq((right / unit).T, (own / unit).T, rcond=None)[0].T
        times = np.clip(np.nan_to_num(np.rint(times)), -MOST_TIMES, MOST_TIMES)
        if not (times - np.diag(np.diag(times))).any():
            continue
        predicted, widened = (
            _whole(product, wrong.right.shape, axes) for product in (times @ right, np.abs(times) @ limits)
        )
        lost = WHOLE_BITS * count * count
        if wrong.agrees(predicted, widened, min(lost, count * math.log2(count + 1) + WHOLE_BITS * times.any(1).sum())):
            differs = np.flatnonzero((times != np.eye(count)).any(axis=1))
            words = [f"{place} is {_sum_in_words(times[place])}" for place in differs[:LISTED]]
            order = "" if len(axes) == 1 else ", counted one after the other"
            text = f"{{}} has its right numbers at other places: {what} {', '.join(words)}{order}"
            yield wrong.fact("places", text, places=differs[:LISTED])
            return


def _slices(array: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """An array (b, h, l, d) with one row for each index of some axes, the first ones of (b, h)."""
    moved = np.moveaxis(array, axes, range(len(axes)))
    return moved.reshape(math.prod(moved.shape[: len(axes)]), -1)


def _whole(rows: np.ndarray, shape: tuple[int, ...], axes: tuple[int, ...]) -> np.ndarray:
    """The array (b, h, l, d) of rows that `_slices` made."""
    first = [shape[axis] for axis in axes]
    others = [length for axis, length in enumerate(shape) if axis not in axes]
    return np.moveaxis(rows.reshape(*first, *others), range(len(axes)), axes)


def _sum_in_words(times: np.ndarray) -> str:
    """A sum of right parts: "the right one of 2, and 2 times that of 3"."""
    words = [f"{'' if by == 1 else f'{by:g} times '}that of {place}" for place, by in enumerate(times) if by]
    return " plus ".join(words) if words else "0"


def _added_rows(wrong: WrongGradient) -> Iterator[Fact]:
    """Each wrong row is its right one and that of another row, or the right one of another row."""
    rows, places = wrong.right.reshape(wrong.rows.size, -1), np.argwhere(wrong.rows)
    sent, limits = wrong.actual[wrong.rows], wrong.limits.reshape(rows.shape)
    if not 1 < len(rows) <= MAX_ROWS or not np.isfinite(sent).all():
        return
    own, squares = rows[wrong.rows.ravel()], np.square(rows).sum(axis=1)
    for kept, what in ((own, "the sum of its right one and of that"), (np.zeros_like(own), "the right one")):
        nearest, step = np.empty(len(sent), np.int64), max(1, PAIRS // len(rows))
        for start in range(0, len(sent), step):
            wrong.case.check()
            at = slice(start, start + step)
            nearest[at] = (squares - 2 * ((sent[at] - kept[at]) @ rows.T)).argmin(axis=1)
        # A row that is 0 is as near as one that has nothing to add.
        is_nothing = (distances(sent, kept) <= limits[wrong.rows.ravel()]).all(axis=-1)
        added = np.where(is_nothing[:, None], 0, rows[nearest])
        predicted, widened = wrong.right.copy(), wrong.limits.copy()
        predicted[wrong.rows] = kept + added
        widened[wrong.rows] = limits[wrong.rows.ravel()] + limits[nearest]
        if not is_nothing.all() and wrong.agrees(predicted, widened, len(sent) * math.log2(len(rows) + 1)):
            of = np.stack(np.unravel_index(nearest, wrong.rows.shape), axis=1)
            pairs = zip(places[~is_nothing][:4].tolist(), of[~is_nothing][:4].tolist(), strict=True)
            listed, row = ", ".join(f"{to} of {one}" for to, one in pairs), wrong.axes[2]
            zeros = f", or 0 ({is_nothing.sum()} {plural_of(row)})" if is_nothing.any() else ""
            text = (
                f"every wrong {row} of {{}} is {what} of another {row}{zeros}: [{', '.join(wrong.axes[:3])}] {listed}"
            )
            yield wrong.fact("places", text, rows=(~is_nothing).sum(), zeros=is_nothing.sum())
            return


class PerHead(WrongTiles):
    """Keeps what each query head adds to the gradients of key and value. kept: (b, h, k, d or e) by role"""

    def __init__(self, *arguments: Any, kept: Sums, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.kept, self.role = kept, "value"

    def run(self, *arguments: Any) -> list[Part]:
        self.role = "value"
        return super().run(*arguments)

    def products(self, tile: Tile, gradient: Array) -> list[Part]:
        self.role = "key"
        return super().products(tile, gradient)

    def over_rows(self, left: Array, right: Array, tile: Tile) -> Array:
        self.kept[self.role][tile.batch, tile.heads, tile.columns] += left.swapaxes(-1, -2) @ right
        return super().over_rows(left, right, tile)


def _has_plain_sums(wrong: WrongGradient, truth: GradientTruth) -> bool:
    """True if a gradient of query, key or value is what the tiles add up, without steps, maps and a past."""
    plan, field = truth.case.plan, wrong.name.removeprefix(PREFIX)
    if field not in ("query", "key", "value") or plan.roles.past_length:
        return False
    place = ("query", "key", "value").index(field)
    return not plan.steps[place] and plan.roles.inputs[place].map is None and np.isfinite(wrong.actual).all()


def _terms_of_heads(wrong: WrongGradient, truth: GradientTruth) -> Iterator[Fact]:
    """The gradient of a key/value head is the sum over other query heads than those of its group."""
    case, sizes, role = truth.case, truth.case.plan.sizes, wrong.name.removeprefix(PREFIX)
    count, (b, g, k, d) = sizes.num_heads, wrong.right.shape
    if (
        case.group == 1
        or role == "query"
        or not _has_plain_sums(wrong, truth)
        or count > MOST_PLACES
        or b * k * d < 2 * count
    ):
        return
    features = {"key": sizes.head_dim, "value": sizes.value_dim}
    kept = {name: np.zeros((b, count, k, length)) for name, length in features.items()}
    case.run(partial(PerHead, case=case, kept=kept))
    heads = _slices(kept[role], (1,))
    own = _slices(wrong.actual, (1,))
    unit = math.sqrt(float(np.square(heads).mean())) or 1.0
    times = np.linalg.lstsq((heads / unit).T, (own / unit).T, rcond=None)[0].T
    times = np.clip(np.nan_to_num(np.rint(times)), -MOST_TIMES, MOST_TIMES)
    predicted = _whole(times @ heads, wrong.right.shape, (1,))
    # Each term may be off as much as the sums that it is part of.
    widened = np.broadcast_to(wrong.limits.max(axis=1, keepdims=True), wrong.right.shape)
    if wrong.agrees(predicted, widened, times.size * math.log2(3)):
        words = [f"{place}: {_heads_in_words(times[place])}" for place in range(min(g, LISTED))]
        text = f"{{}} is the sum over other query heads than those of each group: key/value head {'; '.join(words)}"
        yield wrong.fact("terms", text, times=times.ravel()[:LISTED])


def _heads_in_words(times: np.ndarray) -> str:
    """The query heads of a sum: "heads 0 to 2, and 2 times head 3"."""
    words = []
    for by in np.unique(times[times != 0]):
        heads = np.flatnonzero(times == by)
        words.append(f"{'' if by == 1 else f'{by:g} times '}{in_words(runs_of(heads), 'and')}")
    return "; ".join(words) if words else "none"


class Blocks(WrongTiles):
    """Keeps what blocks of rows add to the gradients of some keys, and blocks of keys to those of some queries.

    place: batch entry and head of the gradient; tokens: (s,), of it; kept: (heads of a group, blocks, s, d or e) by role
    """

    def __init__(self, *arguments: Any, place: tuple[int, int], tokens: np.ndarray, kept: Sums, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.place, self.tokens, self.kept, self.role = place, tokens, kept, "value"

    def run(self, *arguments: Any) -> list[Part]:
        self.role = "value"
        return super().run(*arguments)

    def products(self, tile: Tile, gradient: Array) -> list[Part]:
        self.role = "key"
        entry, head = self.place
        is_here = tile.batch.start <= entry < tile.batch.stop and tile.heads.start <= head < tile.heads.stop
        if "query" in self.kept and is_here:
            inside = (self.tokens >= tile.rows.start) & (self.tokens < tile.rows.stop)
            own = gradient[entry - tile.batch.start, head - tile.heads.start, self.tokens[inside] - tile.rows.start]
            key = self.key[entry, head // self.case.group, tile.columns]
            for block, part in _blocks(tile.columns):
                self.kept["query"][0, block, inside] += own[:, part] @ key[part]
        return super().products(tile, gradient)

    def over_rows(self, left: Array, right: Array, tile: Tile) -> Array:
        entry, head = self.place
        is_here = tile.batch.start <= entry < tile.batch.stop and tile.kv_heads.start <= head < tile.kv_heads.stop
        if self.role in self.kept and is_here:
            inside = (self.tokens >= tile.columns.start) & (self.tokens < tile.columns.stop)
            first = head * self.case.group - tile.heads.start
            place = entry - tile.batch.start, slice(first, first + self.case.group)
            own = left[place][..., self.tokens[inside] - tile.columns.start]
            for block, part in _blocks(tile.rows):
                self.kept[self.role][:, block, inside] += own[:, part].swapaxes(-1, -2) @ right[place][:, part]
        return super().over_rows(left, right, tile)


def _blocks(part: slice) -> Iterator[tuple[int, slice]]:
    """The blocks of some rows or keys, each with its place among them."""
    for block in range(part.start // BLOCK, -(-part.stop // BLOCK)):
        yield block, slice(max(block * BLOCK - part.start, 0), min((block + 1) * BLOCK, part.stop) - part.start)


def _terms_of_tiles(wrong: WrongGradient, truth: GradientTruth) -> Iterator[Fact]:
    """A gradient has its terms, but those of some tiles, or of some heads of each group, several times or not at all."""
    if not _has_plain_sums(wrong, truth):
        return
    case, role, sizes = truth.case, wrong.name.removeprefix(PREFIX), truth.case.plan.sizes
    length = sizes.key_length if role == "query" else sizes.query_length
    errors = wrong.sums[2].sum(axis=-1)
    entry, head = (int(one) for one in np.unravel_index(int(errors.argmax()), errors.shape))
    tokens = np.flatnonzero(wrong.rows[entry, head])
    tokens = tokens[np.unique(np.linspace(0, len(tokens) - 1, SAMPLE).astype(int))]
    group = 1 if role == "query" else case.group
    blocks = np.zeros((group, -(-length // BLOCK), len(tokens), wrong.right.shape[3]))
    case.run(partial(Blocks, case=case, place=(entry, head), tokens=tokens, kept={role: blocks}))
    error, limits = (wrong.actual - wrong.right)[entry, head, tokens], wrong.limits[entry, head, tokens]
    for labels, tile in _labels(blocks.shape[:2], tokens, length):
        counts = _fitted(blocks, labels, error, limits)
        if counts is None or not (found := _counted(wrong, truth, labels, counts, tile)):
            continue
        predicted, text, lost = found
        if wrong.agrees(predicted, wrong.limits * max(1.0, float(np.abs(counts).max())), lost):
            yield wrong.fact("terms", f"{{}} has {text}", times=counts[:LISTED])
            return


def _labels(shape: tuple[int, int], tokens: np.ndarray, length: int) -> Iterator[tuple[np.ndarray, int]]:
    """Ways to group blocks (heads, blocks) for each token: labels (heads, blocks, tokens), and the size of a tile.

    The size is 0 where blocks are those of a head, and negative where labels depend on the tile of the token, too.
    """
    heads, count = shape
    of_head = np.arange(heads)[:, None, None] + np.zeros((1, count, len(tokens)), np.int64)
    if heads > 1:
        yield of_head, 0
    for tile in (tile for tile in TILES if length > tile):
        of_block = np.arange(count)[None, :, None] * BLOCK // tile + np.zeros((heads, 1, len(tokens)), np.int64)
        yield of_block, tile
    for tile in (tile for tile in TILES if max(length, int(tokens.max()) + 1) > tile):
        of_block = np.arange(count)[None, :, None] * BLOCK // tile + np.zeros((heads, 1, len(tokens)), np.int64)
        yield of_block + (tokens // tile) * -(-length // tile), -tile


def _fitted(blocks: np.ndarray, labels: np.ndarray, error: np.ndarray, limits: np.ndarray) -> np.ndarray | None:
    """How often the terms of each label count, whole numbers; None if that does not explain the errors (tokens, d)."""
    names, inverse = np.unique(labels, return_inverse=True)
    inverse = inverse.reshape(labels.shape)
    if len(names) > error.size // 2:
        return None
    terms = np.zeros((len(names), *error.shape))
    for token in range(error.shape[0]):
        np.add.at(terms[:, token], inverse[:, :, token], blocks[:, :, token])
    flat = (terms / limits).reshape(len(names), -1)
    more = np.linalg.lstsq(flat.T, (error / limits).ravel(), rcond=None)[0]
    more = np.clip(np.nan_to_num(np.rint(more)), -MOST_TIMES, MOST_TIMES)
    if not more.any() or not (np.abs(error - np.tensordot(more, terms, 1)) <= 2 * limits).all():
        return None
    counts = np.ones(int(labels.max()) + 1)
    counts[names] += more
    return counts


def _counted(
    wrong: WrongGradient, truth: GradientTruth, labels: np.ndarray, counts: np.ndarray, tile: int
) -> tuple[np.ndarray, str, float] | None:
    """The gradient whose terms count as often as labels say, that in words, and the bits of the fit; None if too large."""
    case, sizes, role = truth.case, truth.case.plan.sizes, wrong.name.removeprefix(PREFIX)
    of_query, group = role == "query", case.group
    own, other = ("rows", "keys") if of_query else ("keys", "queries")
    lengths = (sizes.query_length, sizes.key_length)
    length, tokens = (lengths[1], lengths[0]) if of_query else lengths
    lost = WHOLE_BITS * len(np.unique(labels))
    if tile == 0:
        table = counts[np.arange(sizes.num_heads) % group][:, None, None]
        text = _times_in_words(counts, lambda heads: f"query heads {in_words(runs_of(heads), 'and')} of each group")
    elif tile > 0:
        table = counts[np.arange(length) // tile]
        table = table if of_query else table[:, None]
        text = _times_in_words(counts, lambda tiles: _tokens_in_words(other, tiles, tile, length))
    else:
        per_row = -(-length // -tile)
        if lengths[0] * lengths[1] > MOST_SCORES:
            return None
        whole = np.ones(-(-tokens // -tile) * per_row, np.int8)
        whole[: len(counts)] = counts
        table = whole[(np.arange(tokens)[:, None] // -tile) * per_row + np.arange(length) // -tile]
        table = table if of_query else table.T
        pairs = whole.reshape(-1, per_row)
        text = _times_in_words(
            whole,
            lambda at: (
                ", ".join(
                    f"{_tokens_in_words(other, np.array([n % per_row]), -tile, length)} for "
                    f"{_tokens_in_words(own, np.array([n // per_row]), -tile, tokens)}"
                    for n in at[:4]
                )
                + (f" and {len(at) - 4} more pairs of tiles" if len(at) > 4 else "")
            ),
        )
        lost = WHOLE_BITS * pairs.size
    kind = partial(Counted, case=case, **{"of_query" if of_query else "of_keys": table})
    made = _as_rows(truth, wrong.name, case.run(kind)[wrong.name])
    return made, text, lost


def _tokens_in_words(what: str, tiles: np.ndarray, tile: int, length: int) -> str:
    """The tokens of some tiles: "queries 0 to 63 and 128 to 130"."""
    tokens = np.flatnonzero(np.isin(np.arange(length) // tile, tiles))
    return f"{what} {in_words(runs_of(tokens), 'and')}"


def _times_in_words(counts: np.ndarray, say: Any) -> str:
    """How often terms count that do not count once. say: from the places of terms to words"""
    words = []
    for by in np.unique(counts[counts != 1]):
        times = {0: "not at all", 2: "twice"}.get(int(by), f"{by:g} times")
        words.append(f"the terms of {say(np.flatnonzero(counts == by))} {times}")
    return f"{'; '.join(words)}, and all others once"


def _terms_of_scores(wrong: WrongGradient, truth: GradientTruth) -> Iterator[Fact]:
    """The gradient of the scores P ⊙ (dP - D + dL) has its terms in other numbers."""
    case, field = truth.case, wrong.name.removeprefix(PREFIX)
    if field not in ("query", "key") or not is_softmax(case) or case.cotangent is None:
        return
    if not np.isfinite(wrong.actual).all():
        return
    name, gradients = wrong.name, case.plan.gradients
    makes = {"- P ⊙ D": partial(NoDelta, case=case)}
    if gradients is not None and gradients.logsumexp is not None:
        makes["P ⊙ dL"] = partial(OtherCotangent, case=case, factor=0.0)
    terms = {what: wrong.right - _as_rows(truth, name, case.run(kind)[name]) for what, kind in makes.items()}
    terms = {"P ⊙ dP": wrong.right - sum(terms.values())} | terms
    rows = np.stack([array[wrong.rows] / wrong.limits[wrong.rows] for array in terms.values()]).reshape(len(terms), -1)
    sent = (wrong.actual[wrong.rows] / wrong.limits[wrong.rows]).ravel()
    times = np.linalg.lstsq(rows.T, sent, rcond=None)[0]
    error = np.sqrt(np.diag(np.linalg.pinv(rows @ rows.T)))
    times = np.where(np.abs(times - np.rint(times)) <= 4 * error + 1e-3, np.rint(times), times)
    predicted = sum(by * array for by, array in zip(times, terms.values(), strict=True))
    widened = wrong.limits * max(1.0, float(np.abs(times).max()))
    if (times != 1).any() and wrong.agrees(np.asarray(predicted), widened, REAL_BITS * len(times)):
        words = [f"{what} {shown(float(by), float(e))} times" for what, by, e in zip(terms, times, error, strict=True)]
        text = f"{{}} is made of a gradient of scores that has {', '.join(words)} in the place of once each"
        yield wrong.fact("terms", text, times=times)
