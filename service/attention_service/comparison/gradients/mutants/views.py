"""Masks and biases that the backward pass reads in another way than the forward pass; and what it makes of rows that
see no key.

There are many ways to read a mask: `estimates` chooses those that may explain wrong gradients, and `power` counts none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np

from attention_service.attention.array_functions import Array, BackwardFunctions
from attention_service.attention.score_term import Part, ScoreTerm
from attention_service.attention.terms.additions import Bias
from attention_service.attention.terms.masks import Mask
from attention_service.attention.terms.positions import Causal
from attention_service.attention.tile import Tile
from attention_service.comparison.gradients.case import GradientCase, Gradients
from attention_service.comparison.gradients.mutants.table import Recomputed, Variant, Wrong, is_softmax, mutant
from attention_service.comparison.places import plural_of

# The largest mask of positions or segments that is written out.
MOST_SCORES: Final = 2**22
SIDES: Final = ((1, "before"), (-1, "after"))


class View(NamedTuple):
    """Another view of what a term hides or adds. detail: in words; array: (b, h, q, k), each axis full or 1"""

    term: ScoreTerm
    detail: str
    array: np.ndarray


@mutant("mask_view", "The backward pass reads a mask or a bias at other places than the forward pass.", in_power=False)
def mask_view(case: GradientCase) -> Iterator[Variant]:
    return (viewed(case, view) for view in views(case))


def viewed(case: GradientCase, view: View) -> Variant:
    """The form of a mistake that another view of a term is, from the right logsumexp."""
    term, array = view.term, view.array
    made = OtherBias(array, term) if isinstance(term, Bias) else Mask(array)
    terms = tuple(made if one is term else one for one in case.plan.terms)
    other = replace(case, plan=replace(case.plan, terms=terms))
    name = type(term).field
    return Variant(partial(other.run, partial(Recomputed, case=other)), f"{name}: {view.detail}")


def views(case: GradientCase) -> Iterator[View]:
    """All other views of the terms of a softmax that are known as mistakes."""
    for term in case.plan.terms if is_softmax(case) else ():
        array = _array_of(case, term)
        # Another offset of the causal mask is estimated, see `shifted_masks`.
        found = () if array is None else _views(case, array, moves=not isinstance(term, Causal))
        yield from (View(term, detail, other) for detail, other in found)


@dataclass(frozen=True, slots=True)
class OtherBias(Bias):
    """A bias that is read at other places; its gradient is written at those of the right one."""

    right: Bias

    @property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        return self.right.parameter_shapes

    def backward(self, grad: Array, tile: Tile, functions: BackwardFunctions) -> list[Part]:
        return self.right.backward(grad, tile, functions)


def _array_of(case: GradientCase, term: ScoreTerm) -> np.ndarray | None:
    """What a term hides or adds, (b, h, q, k), each axis full or 1; None if that is too large, or no array says it."""
    if isinstance(term, Mask):
        return term.booleans
    if isinstance(term, Bias):
        return term.numbers
    sizes = case.plan.sizes
    if term.cause is None or sizes.query_length * sizes.key_length > MOST_SCORES // sizes.batch_size:
        return None
    batch, kv_heads, heads = (slice(0, count) for count in (sizes.batch_size, sizes.num_kv_heads, sizes.num_heads))
    rows, columns = slice(0, sizes.query_length), slice(0, sizes.key_length)
    seen = term.visible(Tile(batch, kv_heads, heads, rows, columns), np.asarray)
    return None if seen is None else np.asarray(seen).reshape((1,) * (4 - np.ndim(seen)) + np.shape(seen))


def _views(case: GradientCase, array: np.ndarray, *, moves: bool) -> Iterator[tuple[str, np.ndarray]]:
    """Other views of an array (b, h, q, k), each axis full or 1, and what each is in words.

    moves: False for those only that no other offset makes
    """
    sizes, (b, h, q, k) = case.plan.sizes, array.shape
    if sizes.query_length == sizes.key_length and (q, k) != (1, 1):
        yield "transposed", array.swapaxes(-1, -2)
    for axis, what in ((3, "key"), (2, "row"), (1, "head"), (0, "batch entry")):
        if array.shape[axis] > 1 and (moves or axis < 2):
            yield f"that of the first {what} for all", array.take([0], axis=axis)
            yield f"that of the last {what} for all", array.take([-1], axis=axis)
            yield f"{plural_of(what)} reversed", np.flip(array, axis)
            yield from _moved(array, axis, what)
    if min(q, k) > 1 and moves:
        for by, side in SIDES:
            yield f"the number {side} in memory", np.roll(array.reshape(b, h, q * k), by, -1).reshape(array.shape)
    if sizes.batch_size == sizes.num_heads and max(b, h) > 1:
        yield "with batch entries in the place of heads", array.swapaxes(0, 1)
    yield "with the opposite meaning", ~array if array.dtype == bool else -array


def _moved(array: np.ndarray, axis: int, what: str) -> Iterator[tuple[str, np.ndarray]]:
    """Views that are moved by one along an axis: around its end or, of rows and keys, with numbers from beyond it."""
    beyond = {"hidden": False, "visible": True} if array.dtype == bool else {"0": 0}
    for by, side in SIDES:
        rolled = np.roll(array, by, axis)
        yield f"that of the {what} {side}", rolled
        for name, number in beyond.items() if axis > 1 else ():
            filled = rolled.copy()
            filled[(slice(None),) * axis + (0 if by > 0 else -1,)] = number
            yield f"that of the {what} {side}, {name} beyond the end", filled


class OfEmptyRows(Wrong):
    """What rows that see no key add, if they weigh all keys: of a case whose terms hide nothing. is_uniform: alike"""

    def __init__(self, *arguments: Any, case: GradientCase, is_uniform: bool) -> None:
        super().__init__(*arguments, case=case)
        self.is_uniform = is_uniform

    def run(self, tile: Tile, weights: Array, stages: Mapping[str, Array], write: Any) -> list[Part]:
        empty = np.isneginf(self.case.logsumexp[tile.batch, tile.heads, tile.rows])[..., None]
        own = np.ones_like(weights) / self.plan.sizes.key_length if self.is_uniform else weights
        return super().run(tile, np.where(empty, own, 0.0), stages, write)


@mutant("empty_uniform", "Queries that see no key weigh all keys: a finite number stands for hidden scores.")
def empty_uniform(case: GradientCase) -> Iterator[Variant]:
    if is_softmax(case) and case.plan.all_sinks is None and np.isneginf(case.logsumexp).any():
        for is_uniform, how in ((True, "all alike"), (False, "by their scores, to which the number is added")):
            for names, detail in ((case.names, how), (("grad_value",), f"{how}; gradients of scores are masked")):
                if set(names) & set(case.names):
                    yield Variant(partial(with_empty_rows, case, names, is_uniform=is_uniform), detail)


def with_empty_rows(case: GradientCase, names: tuple[str, ...], *, is_uniform: bool) -> Gradients:
    """The right gradients, and what rows that see no key add to some of them."""
    terms = tuple(_finite(term) for term in case.plan.terms if term.cause is None or isinstance(term, Bias))
    shown = replace(case, plan=replace(case.plan, terms=terms))
    added = shown.run(partial(OfEmptyRows, case=case, is_uniform=is_uniform))
    return {name: array + added[name] if name in names else array for name, array in case.right.items()}


def _finite(term: ScoreTerm) -> ScoreTerm:
    """A term that hides nothing: a bias without minus infinity."""
    return OtherBias(np.where(np.isneginf(term.numbers), 0.0, term.numbers), term) if isinstance(term, Bias) else term
