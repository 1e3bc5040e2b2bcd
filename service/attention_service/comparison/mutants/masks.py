"""Mistakes of masks by content: mask, padding, segments, keys that are left out, queries that see no key."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Final

import numpy as np

from attention_service.attention.array_functions import Array
from attention_service.attention.arrays import compute_dtype
from attention_service.attention.score_term import Load, ScoreTerm
from attention_service.attention.terms.additions import Bias
from attention_service.attention.terms.masks import KeyLengths, KeyMask, Mask, QueryLengths, Segments
from attention_service.attention.terms.selected import SelectedKeys
from attention_service.attention.tile import Tile
from attention_service.attention.visibility import visible
from attention_service.comparison.case import Case
from attention_service.comparison.mutants.table import LEFT_OUT, SPLITS, absent, mutant, tiles
from attention_service.comparison.problem import (
    Answer,
    Problem,
    Rounding,
    attention,
    finished,
    masked_scores,
    row_max,
    weighted,
)
from attention_service.comparison.solve import operand

# What a finite mask adds to hidden scores, as many implementations do.
FINITE: Final = -1e4


class LeftOut(Mask):
    """Keys that a mistake leaves out, a term of no request."""

    __slots__ = ()


absent("mask.absent", "The mask is not applied.", Mask, {"mask": None})


@mutant("mask.inverted", "The mask is inverted: True hides.")
def mask_inverted(case: Case) -> Iterator[Case]:
    mask, bias = case.term(Mask), case.term(Bias)
    if mask:
        yield case.with_term(Mask(~mask.booleans), {"mask": "inverted"})
    # A bias that only hides, by minus infinity or another low number, and is read as booleans: 0 is false.
    if bias and not (shown := bias.numbers == 0).all() and (shown | (bias.numbers <= FINITE)).all():
        yield case.with_term(replace(bias, numbers=np.where(shown, -np.inf, 0.0)), {"bias": "inverted"}, detail="bias")


class _AddedMask(Bias):
    """A mask that is added beside a bias, a term of no request."""

    __slots__ = ()


@mutant("mask.added", "The mask is added to the scores, as numbers 0 and 1.")
def mask_added(case: Case) -> Iterator[Case]:
    mask = case.term(Mask)
    if mask:
        numbers = mask.booleans.astype(np.float16)  # a search keeps many of them
        kind = Bias if case.term(Bias) is None else _AddedMask
        yield case.without(Mask).with_term(kind(numbers), None)


@mutant("mask.transposed", "The mask is transposed: queries and keys are swapped.")
def mask_transposed(case: Case) -> Iterator[Case]:
    mask, sizes = case.term(Mask), case.plan.sizes
    if mask and sizes.query_length == sizes.key_length:
        turned = mask.booleans.swapaxes(-1, -2)
        if turned.shape != mask.booleans.shape or not np.array_equal(turned, mask.booleans):
            yield case.with_term(Mask(turned), {"mask": "transposed"})


def _first(case: Case, axis: int, change: str) -> Iterator[Case]:
    mask = case.term(Mask)
    if mask and mask.booleans.shape[axis] > 1:
        first = mask.booleans.take([0], axis=axis)
        if (first != mask.booleans).any():
            yield case.with_term(Mask(first), {"mask": change})


@mutant("mask.first_batch", "All batch entries have the mask of the first.")
def mask_first_batch(case: Case) -> Iterator[Case]:
    return _first(case, 0, "that of the first batch entry")


@mutant("mask.first_head", "All heads have the mask of the first.")
def mask_first_head(case: Case) -> Iterator[Case]:
    return _first(case, 1, "that of the first head")


@mutant("mask.finite", "Hidden scores are -10000, not minus infinity.")
def mask_finite(case: Case) -> Iterator[Case]:
    if case.terms:
        yield case.changed(hidden_score=FINITE)


PADDING: Final = (KeyMask, KeyLengths)
LEFT_OUT.update(PADDING)


@mutant("mask.in_max", "Hidden scores count as 0 in the largest score, which is subtracted.")
def mask_in_max(case: Case) -> Iterator[Case]:
    if case.terms and case.plan.normalization == "softmax":
        yield case.changed(softmax=_hidden_in_max, rounding=Rounding(computes=compute_dtype(case.dtype)))


def _hidden_in_max(problem: Problem) -> Answer:
    """Softmax whose largest score is at least 0 in rows with a hidden key: lower scores vanish as exponentials."""
    scores = masked_scores(problem)
    hides = np.array(False) if problem.visible is None else np.logical_not(problem.visible.all(axis=-1, keepdims=True))
    largest = row_max(scores, problem.sinks)
    largest = np.where(hides, np.maximum(largest, 0), largest)
    scores -= largest
    exponentials = np.exp(scores, out=scores)
    total = exponentials.sum(axis=-1, keepdims=True)
    if problem.sinks is not None:
        total = total + np.exp(problem.sinks[..., None] - largest)
    found = finished(problem, exponentials, total, largest)
    lost = (total[..., 0] == 0) & np.logical_not(problem.empty)
    return replace(found, output=np.where(lost[..., None], np.nan, found.output)) if lost.any() else found


@mutant("padding.in_sum", "Hidden keys count in the sum of the softmax, with values of 0.")
def padding_in_sum(case: Case) -> Iterator[Case]:
    if case.plan.normalization != "softmax" or not case.terms:
        return
    padding = [term for kind in PADDING if (term := case.term(kind)) is not None]
    if padding:
        yield _counted(case, np.logical_and.reduce([term.booleans[:, 0, 0] for term in padding]))
    if len(padding) < len(case.terms):
        yield case.changed(softmax=_in_sum, detail="all hidden keys")


def _counted(case: Case, seen: np.ndarray) -> Case:
    """The case without padding, whose values are 0 where that was. seen: (b or 1, k), False for padding"""
    past, kept = case.past_length, seen[:, None, :, None]
    return case.without(KeyMask, KeyLengths).changed(
        value=operand(case, "value") * kept[:, :, past:],
        past_value=case.past_value * kept[:, :, :past],
        steps={**case.steps, "value": ()},
        bad_values=None if case.bad_values is None else case.bad_values & seen[:, None],
    )


def _in_sum(problem: Problem) -> Answer:
    """Attention over all keys, of which hidden ones have values of 0."""
    every = attention(problem.changed(visible=None, bad_values=None))
    assert every.weights is not None
    seen = np.where(problem.seen, every.weights, 0)
    return replace(every, output=weighted(problem, seen), weights=seen)


@mutant("padding.ignored", "Padding is not hidden: key_mask or key_lengths are ignored.")
def padding_ignored(case: Case) -> Iterator[Case]:
    given = [kind for kind in PADDING if case.term(kind)]
    if given:
        yield case.without(*given, change={kind.field: None for kind in given})
    if len(given) > 1:
        for kind in given:
            yield case.without(kind, change={kind.field: None}, detail=kind.field)


absent("segments.ignored", "Segments are not kept apart.", Segments, {"segment_ids": None})
absent("selected.absent", "Queries see other keys than the selected ones, too.", SelectedKeys, {"selected_keys": None})


def _selected(case: Case, change: Callable[[np.ndarray], np.ndarray]) -> Iterator[Case]:
    selected = case.term(SelectedKeys)
    if selected:
        indices = change(selected.indices)
        if not np.array_equal(indices, selected.indices):
            yield case.with_term(SelectedKeys(indices))


@mutant("selected.none_is_last", "The index -1, which is no key, selects the last key.")
def selected_none_is_last(case: Case) -> Iterator[Case]:
    return _selected(case, lambda indices: np.where(indices < 0, case.plan.sizes.key_length - 1, indices))


@mutant("selected.past_ignored", "The indices of the selected keys count from the first new key, not from the past.")
def selected_past_ignored(case: Case) -> Iterator[Case]:
    def shifted(indices: np.ndarray) -> np.ndarray:
        moved = indices + case.past_length
        return np.where((indices < 0) | (moved >= case.plan.sizes.key_length), -1, moved)

    return _selected(case, shifted)


def _without_keys(case: Case, hidden: np.ndarray, detail: str = "") -> Iterator[Case]:
    """The case without some keys. hidden: (k,) booleans"""
    if hidden.any() and not hidden.all():
        read = int(np.count_nonzero(~hidden))
        change = {"key_lengths": read} if not (hidden[:read].any() or case.term(KeyLengths)) else None
        yield case.with_term(LeftOut(~hidden[None, None, None]), change, detail=detail)


def _places(case: Case) -> np.ndarray:
    return np.arange(case.plan.sizes.key_length)


@mutant("keys.last_dropped", "The last key is left out.")
def keys_last_dropped(case: Case) -> Iterator[Case]:
    keys = _places(case)
    return _without_keys(case, keys == len(keys) - 1)


@mutant("keys.tail_dropped", "Keys after the last whole tile are left out.", by_tile=True)
def keys_tail_dropped(case: Case) -> Iterator[Case]:
    keys = _places(case)
    for tile in tiles(case):
        yield from _without_keys(case.changed({}, tile=tile), keys >= len(keys) // tile * tile, f"of {tile} keys")


def _half(case: Case, *, is_first: bool) -> Iterator[Case]:
    """The case with half of its keys: of an odd number rounded up and rounded down, as kernels do either."""
    keys = _places(case)
    for read in dict.fromkeys((-(-len(keys) // 2), len(keys) // 2)):
        hidden = keys >= read if is_first else keys < len(keys) - read
        yield from _without_keys(case, hidden, f"{read} of {len(keys)} keys" if len(keys) % 2 else "")


@mutant("keys.half", "Only the first half of the keys is read.")
def keys_half(case: Case) -> Iterator[Case]:
    return _half(case, is_first=True)


@mutant("keys.second_half", "Only the second half of the keys is read.")
def keys_second_half(case: Case) -> Iterator[Case]:
    return _half(case, is_first=False)


@mutant("keys.as_queries", "Only as many keys are read as there are queries.")
def keys_as_queries(case: Case) -> Iterator[Case]:
    keys, read = _places(case), case.plan.sizes.query_length
    yield from _without_keys(case, keys >= read, f"the first {read}")
    yield from _without_keys(case, keys < len(keys) - read, f"the last {read}")


@mutant("keys.last_split", "The last part of the keys, split among thread blocks, is left out.")
def keys_last_split(case: Case) -> Iterator[Case]:
    keys = _places(case)
    for splits in SPLITS[1:]:  # the first of two parts is `keys.half`
        yield from _without_keys(case, keys >= -(-len(keys) // splits) * (splits - 1), f"of {splits} parts")


@mutant("keys.share_read", "Each part of the keys, split among thread blocks, reads those of the first part.")
def keys_share_read(case: Case) -> Iterator[Case]:
    keys = case.plan.sizes.key_length
    for splits in SPLITS:
        size = -(-keys // splits)
        if 1 < size < keys and (splits > 2 or case.terms or keys % 2):  # else `keys.half`
            yield case.changed(softmax=partial(_of_first_part, size=size), detail=f"{splits} parts")


def _of_first_part(problem: Problem, size: int) -> Answer:
    """Attention whose keys and values are those of the first part, again and again, under the masks of their places."""
    read = np.arange(problem.scores.shape[-1]) % size
    bad = None if problem.bad_values is None else problem.bad_values[:, :, read]
    return attention(problem.changed(scores=problem.scores[..., read], value=problem.value[:, :, read], bad_values=bad))


@mutant("cache.ignored", "The cache of past keys and values is never read.")
def cache_ignored(case: Case) -> Iterator[Case]:
    return _without_keys(case, _places(case) < case.past_length)


def _empty_rows(case: Case, fill: Callable[[Problem, Answer], np.ndarray]) -> Iterator[Case]:
    """The case with other outputs where a query sees no key."""

    def filled(problem: Problem, answer: Answer) -> Answer:
        return replace(answer, output=np.where(problem.empty[..., None], fill(problem, answer), answer.output))

    if _may_be_empty(case):
        yield case.edited(filled)


def _may_be_empty(case: Case) -> bool:
    """True if other numbers in the masks, or the positions as they are, leave a query without keys."""
    if any(type(term).visible is not ScoreTerm.visible and not term.reads_offset for term in case.terms):
        return True
    if case.offset is None or not case.terms:
        return False
    sizes = case.plan.sizes
    return bool((case.offset < 0).any() or (case.offset + sizes.query_length > sizes.key_length).any())


# Terms that hide keys by what is added to scores, or that hide whole rows.
KEPT: Final[tuple[type[ScoreTerm], ...]] = (Bias, QueryLengths)


@mutant("empty.uniform", "A query that sees no key gets the mean of all values, not 0.")
def empty_uniform(case: Case) -> Iterator[Case]:
    return _empty_rows(case, lambda problem, _: problem.value.mean(axis=2, keepdims=True))


@dataclass(frozen=True, slots=True)
class _UnlessEmpty(ScoreTerm):
    """Terms that hide keys but in rows that see none, which see keys that only some of the terms hide.

    hidden: the numbers of terms that may hide a key from these rows; others, like the padding of queries, always do
    keys: how many there are
    """

    terms: tuple[ScoreTerm, ...]
    others: tuple[ScoreTerm, ...]
    shown: Callable[[list[np.ndarray]], np.ndarray]
    keys: int
    reads_offset: ClassVar[bool] = True

    def visible(self, tile: Tile, load: Load) -> np.ndarray:
        whole = replace(tile, columns=slice(0, self.keys))
        seen = [_as_booleans(term.visible(whole, load)) for term in self.terms]
        rest = _as_booleans(visible(self.others, whole, load))
        every = np.logical_and.reduce(np.broadcast_arrays(*seen, rest))
        is_empty = np.logical_not(np.broadcast_to(every, (*every.shape[:-1], self.keys)).any(axis=-1, keepdims=True))
        found = np.where(is_empty, self.shown(seen) & rest, every)
        return np.broadcast_to(found, (*found.shape[:-1], self.keys))[..., tile.columns]


def _as_booleans(seen: Array | None) -> np.ndarray:
    """What terms let be seen; True where they hide nothing."""
    return np.asarray(True if seen is None else seen)


def _but(seen: list[np.ndarray], term: int) -> np.ndarray:
    """True for keys that all terms but one show."""
    others = (one for place, one in enumerate(seen) if place != term)
    return np.asarray(np.logical_and.reduce(np.broadcast_arrays(*others)))


def _hidden_once(seen: list[np.ndarray]) -> np.ndarray:
    """True for keys that just one term hides."""
    return np.asarray(sum(np.logical_not(one).astype(np.int64) for one in seen) == 1)


@mutant("empty.hidden_keys", "A query that sees no key attends to keys that are hidden from it, not to none.")
def empty_hidden_keys(case: Case) -> Iterator[Case]:
    if not _may_be_empty(case):
        return
    hiding = tuple(term for term in case.terms if term.cause is not None and not isinstance(term, KEPT))
    others = tuple(term for term in case.terms if term not in hiding)
    shown: dict[str, Callable[[list[np.ndarray]], np.ndarray]] = {}
    if len(hiding) > 1:
        shown = {f"those that only {term.field} hides": partial(_but, term=n) for n, term in enumerate(hiding)}
        shown["those that one mask alone hides"] = _hidden_once
    if hiding:
        shown["all"] = lambda _: np.ones((1, 1, 1, 1), np.bool_)
    for detail, function in shown.items():
        term = _UnlessEmpty(hiding, others, function, case.plan.sizes.key_length)
        yield case.without(*map(type, hiding), detail=detail).with_term(term)


@mutant("empty.nan", "A query that sees no key gets NaN, not 0.")
def empty_nan(case: Case) -> Iterator[Case]:
    return _empty_rows(case, lambda _, answer: np.full_like(answer.output, np.nan))


@mutant("empty.last_key", "A query that sees no key gets the value of the last key, not 0.")
def empty_last_key(case: Case) -> Iterator[Case]:
    return _empty_rows(case, lambda problem, _: problem.value[:, :, -1:])
