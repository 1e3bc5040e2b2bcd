"""Mistakes of what tiles add up, and of the way back from there to the fields of a request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from attention_service.attention.gradients import PREFIX
from attention_service.attention.score_term import Part
from attention_service.attention.steps.rotation import RotationStep
from attention_service.attention.terms.additions import Bias
from attention_service.attention.tile import Tile, part_of
from attention_service.backends.dense.gradients import TileBackward
from attention_service.backends.dense.library import Array
from attention_service.comparison.case import TILES
from attention_service.comparison.gradients.case import GradientCase, Gradients, Sums
from attention_service.comparison.gradients.mutants.table import Variant, Wrong, edited, made_by, mutant
from attention_service.comparison.mutants.table import SPLITS


def scaled(case: GradientCase, power: int) -> Iterator[Variant]:
    """dQ and dK with another power of the scale."""
    scale = case.plan.scale

    def edit(sums: Sums) -> Sums:
        return {name: array * scale**power if name in ("query", "key") else array for name, array in sums.items()}

    if case.plan.head_scales is None and abs(scale) not in (0, 1):
        yield edited(case, edit)


@mutant("scale_absent", "The gradients of query and key are not multiplied by the scale.")
def scale_absent(case: GradientCase) -> Iterator[Variant]:
    yield from scaled(case, -1)


@mutant("scale_twice", "The gradients of query and key are multiplied by the scale twice.")
def scale_twice(case: GradientCase) -> Iterator[Variant]:
    yield from scaled(case, 1)


class Counted(Wrong):
    """Terms of sums that count several times, or not at all, in the gradients of key and value, or of the query.

    of_keys, of_query: how often each counts, an array that broadcasts to (b, h, q, k); None for once
    """

    def __init__(
        self,
        *arguments: Any,
        case: GradientCase,
        of_keys: np.ndarray | None = None,
        of_query: np.ndarray | None = None,
    ) -> None:
        super().__init__(*arguments, case=case)
        self._of_keys, self._of_query = (
            None if counts is None else counts.reshape((1,) * (4 - counts.ndim) + counts.shape)
            for counts in (of_keys, of_query)
        )

    def over_rows(self, left: Array, right: Array, tile: Tile) -> Array:
        return super().over_rows(left if self._of_keys is None else left * part_of(self._of_keys, tile), right, tile)

    def products(self, tile: Tile, gradient: Array) -> list[Part]:
        parts = super().products(tile, gradient)
        if self._of_query is not None:
            of_query = super().products(tile, gradient * part_of(self._of_query, tile))
            parts = [one for one in parts if one.field != "query"] + [one for one in of_query if one.field == "query"]
        return parts


@mutant("not_grouped", "The gradients of key and value are those of one query head, not the sum over its group.")
def not_grouped(case: GradientCase) -> Iterator[Variant]:
    of_group = np.arange(case.plan.sizes.num_heads)[:, None, None] % case.group
    if case.group > 1:
        yield made_by(case, partial(Counted, of_keys=of_group == 0), "the first")
        yield made_by(case, partial(Counted, of_keys=of_group == case.group - 1), "the last")


def sums_of(case: GradientCase, kind: Callable[..., TileBackward]) -> Sums:
    """What the tiles of a mistake add up. kind: makes the backward pass of tiles"""
    kept: dict[str, np.ndarray] = {}

    def keep(sums: Sums) -> Sums:
        kept.update(sums)
        return sums

    case.run(kind, keep)
    return kept


@mutant("group_mean", "The gradients of key and value are the mean over the query heads of a group, not the sum.")
def group_mean(case: GradientCase) -> Iterator[Variant]:
    def edit(sums: Sums) -> Sums:
        return {name: array / case.group if name in ("key", "value") else array for name, array in sums.items()}

    if case.group > 1:
        yield edited(case, edit)


@mutant("query_head", "The gradients of key and value are written at the index of the query head.")
def query_head(case: GradientCase) -> Iterator[Variant]:
    if case.group > 1 and case.plan.sizes.num_kv_heads > 1:
        yield Variant(partial(at_query_head, case))


def at_query_head(case: GradientCase) -> Gradients:
    """Key/value head j has what query head j alone adds to its own; what later query heads write is out of range."""
    heads = range(case.plan.sizes.num_kv_heads)
    every = np.arange(case.plan.sizes.num_heads)[:, None, None]
    kept = [sums_of(case, partial(Counted, case=case, of_keys=every == head)) for head in heads]

    def edit(sums: Sums) -> Sums:
        written = {
            name: np.stack([kept[head][name][:, head // case.group] for head in heads], axis=1)
            for name in ("key", "value")
            if name in sums
        }
        return sums | written

    return case.run(edit=edit)


def exchanged(case: GradientCase, one: str, other: str) -> Iterator[Variant]:
    """Two sums of tiles in the place of each other, where they have the same shape."""
    shapes = case.plan.gradient_shapes
    if shapes.get(one) == shapes.get(other, ()):
        yield edited(case, lambda sums: sums | {one: sums[other], other: sums[one]})


@mutant("dk_dv_swapped", "The gradients of key and value are exchanged.", of_all=True)
def dk_dv_swapped(case: GradientCase) -> Iterator[Variant]:
    yield from exchanged(case, "key", "value")


@mutant("dq_dk_swapped", "The gradients of query and key are exchanged.")
def dq_dk_swapped(case: GradientCase) -> Iterator[Variant]:
    yield from exchanged(case, "query", "key")


class Transposed(Wrong):
    def products(self, tile: Tile, gradient: Array) -> list[Part]:
        parts = [one for one in super().products(tile, gradient) if one.field != "key"]
        query = self.query[tile.batch, tile.heads, tile.columns]
        b, h, r, _ = gradient.shape
        product = np.matmul(gradient, query).reshape(b, h // self.case.group, self.case.group, r, -1).sum(axis=2)
        return [*parts, Part("key", (tile.batch, tile.kv_heads, tile.rows), product)]


@mutant("transposed", "The gradient of the key is made of the gradients of the scores without their transpose.")
def transposed(case: GradientCase) -> Iterator[Variant]:
    sizes = case.plan.sizes
    if "key" in case.plan.gradient_shapes and sizes.query_length == sizes.key_length > 1:
        yield made_by(case, Transposed)


@mutant("last_tile", "Rows of the last tile of queries beyond the end are read as its last row, which counts again.")
def last_tile(case: GradientCase) -> Iterator[Variant]:
    length = case.plan.sizes.query_length
    for tile in TILES:
        if beyond := -length % tile:
            counts = np.ones((length, 1))
            counts[-1] += beyond
            yield made_by(case, partial(Counted, of_keys=counts), f"of {tile} queries")


@mutant("tail_dropped", "The last queries, which do not fill a tile, add nothing to the gradients of key and value.")
def tail_dropped(case: GradientCase) -> Iterator[Variant]:
    length = case.plan.sizes.query_length
    for tile in TILES:
        if length > tile and length % tile:
            is_counted = np.arange(length)[:, None] < length // tile * tile
            yield made_by(case, partial(Counted, of_keys=is_counted), f"of {tile} queries")


@mutant(
    "not_accumulated", "Gradients of key and value are those of the last tile of queries, not the sum of all tiles."
)
def not_accumulated(case: GradientCase) -> Iterator[Variant]:
    length = case.plan.sizes.query_length
    for tile in TILES:
        if length > tile:
            is_counted = np.arange(length)[:, None] >= (length - 1) // tile * tile
            yield made_by(case, partial(Counted, of_keys=is_counted), f"of {tile} queries")


@mutant(
    "query_not_accumulated", "The gradient of the query is that of the last tile of keys, not the sum of all tiles."
)
def query_not_accumulated(case: GradientCase) -> Iterator[Variant]:
    length = case.plan.sizes.key_length
    if "query" in case.plan.gradient_shapes:
        firsts = {(length - 1) // tile * tile: f"of {tile} keys" for tile in TILES if length > tile}
        firsts |= {length - length // n: f"of {n} parts" for n in SPLITS if length % n == 0 and length > n}
        for first, detail in firsts.items():
            yield made_by(case, partial(Counted, of_query=np.arange(length) >= first), detail)


class FirstChunk(Wrong):
    def __init__(self, *arguments: Any, case: GradientCase, parts: int) -> None:
        super().__init__(*arguments, case=case)
        self.parts = parts

    def over_rows(self, left: Array, right: Array, tile: Tile) -> Array:
        first = super().over_rows(left[..., : left.shape[-1] // self.parts], right, tile)
        return np.tile(first, (1, 1, self.parts, 1))

    def products(self, tile: Tile, gradient: Array) -> list[Part]:
        is_first = np.arange(gradient.shape[-1]) < gradient.shape[-1] // self.parts
        of_query = [one for one in super().products(tile, gradient * is_first) if one.field == "query"]
        of_query = [one._replace(numbers=one.numbers * self.parts) for one in of_query]
        return [one for one in super().products(tile, gradient) if one.field != "query"] + of_query


@mutant("first_chunk", "Each step over a part of the keys differentiates the first part.")
def first_chunk(case: GradientCase) -> Iterator[Variant]:
    length = case.plan.sizes.key_length
    if not case.plan.skips_hidden_keys and not case.plan.roles.past_length:
        for parts in SPLITS:
            if length % parts == 0 and length > parts:
                yield made_by(case, partial(FirstChunk, parts=parts), f"of {parts}")


class OneOfBias(Wrong):
    def __init__(self, *arguments: Any, case: GradientCase, index: int) -> None:
        super().__init__(*arguments, case=case)
        self.index = index

    def of_terms(self, gradient: Array, tile: Tile) -> list[Part]:
        bias, one = next(term for term in self.plan.terms if isinstance(term, Bias)), gradient
        for axis, part in enumerate((tile.batch, tile.heads, tile.rows, tile.columns)):
            if bias.numbers.shape[axis] == 1 < self.lengths[axis]:
                place = [1] * 4
                place[axis] = -1
                is_read = np.arange(part.start, part.stop) == self.index % self.lengths[axis]
                one = one * is_read.reshape(place)
        others = [part for part in super().of_terms(gradient, tile) if part.field != "bias"]
        return others + bias.backward(one, tile, self.lib)

    @property
    def lengths(self) -> tuple[int, int, int, int]:
        sizes = self.plan.sizes
        return sizes.batch_size, sizes.num_heads, sizes.query_length, sizes.key_length


@mutant("bias_not_summed", "The gradient of a bias that was broadcast is that of one entry, not the sum.")
def bias_not_summed(case: GradientCase) -> Iterator[Variant]:
    shape = case.plan.gradient_shapes.get("bias")
    sizes = case.plan.sizes
    full = sizes.batch_size, sizes.num_heads, sizes.query_length, sizes.key_length
    if shape is not None and shape != full:
        yield made_by(case, partial(OneOfBias, index=0), "the first")
        yield made_by(case, partial(OneOfBias, index=-1), "the last")


@mutant("rotary_not_undone", "The gradients of query and key are those of the rotated ones.")
def rotary_not_undone(case: GradientCase) -> Iterator[Variant]:
    plan = case.plan
    query, key = (tuple(step for step in steps if not isinstance(step, RotationStep)) for steps in plan.steps[:2])
    if (query, key) != plan.steps[:2]:
        around = replace(plan, query_steps=query, key_steps=key)
        yield Variant(partial(case.run, around=around))


@mutant("zero", "The gradient is 0 everywhere.")
def zero(case: GradientCase) -> Iterator[Variant]:
    yield from multiplied(case, 0.0)


@mutant("negated", "The gradient has the wrong sign.")
def negated(case: GradientCase) -> Iterator[Variant]:
    yield from multiplied(case, -1.0)


@mutant("mean_loss", "The gradient is that of the mean of all outputs: divided by how many there are.")
def mean_loss(case: GradientCase) -> Iterator[Variant]:
    if case.spec.grad_output is not None and case.spec.grad_output.size > 1:
        yield Variant(partial(times, case, case.names, 1 / case.spec.grad_output.size))


def multiplied(case: GradientCase, factor: float) -> Iterator[Variant]:
    """All gradients times a number, or one of them."""
    yield Variant(partial(times, case, case.names, factor))
    if len(case.names) > 1:
        for name in case.names:
            yield Variant(partial(times, case, (name,), factor), f"that of {name.removeprefix(PREFIX)}")


def times(case: GradientCase, names: tuple[str, ...], factor: float) -> Gradients:
    """The right gradients, some of them times a number."""
    return {name: np.asarray(array * factor) if name in names else array for name, array in case.right.items()}
