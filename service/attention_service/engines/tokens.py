"""Where the tokens of each sequence are: in slots of an array, in pages of a cache, or as codes with factors.

Letters: b sequences, h heads, hk key/value heads, d features. All are views as long as NumPy can make them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple

import ml_dtypes
import numpy as np

from attention_service.attention.arrays import FLOATS, MAX_COUNT, cast, integers
from attention_service.engines.places import Places, numbers_at
from attention_service.errors import FieldConflict, InvalidArray, ShapeMismatch, shape

# Types of numbers, and of codes, which a factor makes numbers of; int8 is one of these, too.
NUMBERS: Final = (
    *FLOATS.values(),
    *map(np.dtype, (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fnuz)),
)
# The axes of caches in the order (pages, page, hk, …), and as they are. What is after hk are features.
CACHES: Final[Mapping[str, tuple[tuple[int, ...], str]]] = {
    "NHD": ((0, 1, 2, 3), "pages, page, hk, d"),
    "HND": ((0, 2, 1, 3), "pages, hk, page, d"),
    "classic key": ((0, 3, 1, 2, 4), "pages, hk, d/x, page, x"),
    "classic value": ((0, 3, 1, 2), "pages, hk, d, page"),
}


class Rows(NamedTuple):
    """Where tokens are in an array (slots, l, …): those of sequence i from [slot[i], first[i]] on.

    room: (b,), how many tokens there are of which the first `lengths` count; None for no others
    """

    slots: int
    length: int
    slot: np.ndarray
    first: np.ndarray
    lengths: np.ndarray
    room: np.ndarray | None = None

    def of(self, sequence: int) -> tuple[Any, slice]:
        """The index of the tokens of a sequence."""
        first = int(self.first[sequence])
        return int(self.slot[sequence]), slice(first, first + int(self.lengths[sequence]))


class Tokens(NamedTuple):
    """The tokens of each sequence.

    name: the argument that they come from; lengths: (b,); heads, features: of each token
    of: the tokens of a sequence, (tokens, heads, features); dtype: as they are stored
    rows, table: where they are, in slots or in pages; at: tokens at other places: of this kind, or Places
    codes, factors: what they are the product of, see `factors`; None for no factors
    """

    name: str
    lengths: np.ndarray
    heads: int
    features: int
    of: Callable[[int], np.ndarray]
    dtype: np.dtype
    at: Callable[[Any], Tokens]
    rows: Rows | None = None
    table: Table | None = None
    codes: Tokens | None = None
    factors: np.ndarray | None = None


def slots(name: str, array: np.ndarray, rows: Rows) -> Tokens:
    """Tokens of an array (slots, l, h, d), as views. Errors: InvalidArray, ShapeMismatch."""
    array = numbers(name, array, 4, "b, l, h, d")
    _check_head(name, array)
    _, _, heads, features = array.shape

    def of(sequence: int) -> np.ndarray:
        found: np.ndarray = array[rows.of(sequence)]
        return found

    def at(other: Any) -> Tokens:
        return read_at(name, array, other) if isinstance(other, Places) else slots(name, array, other)

    return Tokens(name, rows.lengths, heads, features, of, array.dtype, at, rows)


def read_at(name: str, array: np.ndarray, places: Places) -> Tokens:
    """The tokens at places of an array (pages, page, heads, …). `of` raises IndexError for those outside of it."""
    features = math.prod(array.shape[3:])
    of, at = partial(numbers_at, array, places), partial(read_at, name, array)
    return Tokens(name, places.lengths, array.shape[2], features, of, array.dtype, at)


def joined(one: Tokens, other: Tokens) -> Tokens:
    """Features of two beside each other, as queries and keys with a rotated part have them. Errors: ShapeMismatch."""
    same(one.name, one, other)

    def of(sequence: int) -> np.ndarray:
        return np.concatenate([tokens.of(sequence).astype(np.float64) for tokens in (one, other)], axis=-1)

    def at(places: Any) -> Tokens:
        return joined(one.at(places), other.at(places))

    return one._replace(features=one.features + other.features, of=of, at=at, codes=None, factors=None)


def repeated(tokens: Tokens, heads: int) -> Tokens:
    """Tokens of so many heads, a multiple of their own: each stands for as many beside each other."""
    times = heads // tokens.heads
    if times == 1:
        return tokens

    def of(sequence: int) -> np.ndarray:
        return tokens.of(sequence).repeat(times, axis=1)

    def at(places: Any) -> Tokens:
        return repeated(tokens.at(places), heads)

    return tokens._replace(heads=heads, of=of, at=at)


def descaled(name: str, given: np.ndarray | None, codes: Tokens, heads: int) -> Tokens:
    """Codes times their factors, in float64; the codes themselves without factors. Errors: as of `factors`."""
    return codes if given is None else times(codes, factors(name, given, codes, heads))


def times(codes: Tokens, found: np.ndarray) -> Tokens:
    """Codes times factors (b or 1, heads or 1, tokens or 1), in float64; a factor stands for the heads of its group."""

    def of(sequence: int) -> np.ndarray:
        tokens = codes.of(sequence).astype(np.float64)
        if 1 < found.shape[2] < len(tokens):
            raise IndexError  # as for tokens outside of memory, which only mistakes read
        factor = found[sequence if len(found) > 1 else 0, :, : len(tokens)]
        factor = factor.repeat(codes.heads // len(factor), axis=0)
        with np.errstate(over="ignore", invalid="ignore"):  # the backend refuses what is infinite then
            scaled: np.ndarray = tokens * factor.T[..., None]
        return scaled

    def at(places: Any) -> Tokens:
        return times(codes.at(places), found)

    return codes._replace(of=of, at=at, codes=codes, factors=found)


def numbers(name: str, array: np.ndarray, rank: int, axes: str) -> np.ndarray:
    """The array, if its elements are floats, codes or plain numbers, and it has these axes.

    Errors: InvalidArray, ShapeMismatch.
    """
    if array.ndim != rank:
        raise ShapeMismatch.of(f"/{name}", f"({axes})", array)
    if array.dtype not in NUMBERS and array.dtype.kind != "i":
        got = f"{array.dtype.name} of shape {shape(array.shape)}"
        raise InvalidArray.at(f"/{name}", "numbers: a float type, float8 or int8", got)
    return array


def _check_head(name: str, array: np.ndarray) -> None:
    if 0 in array.shape[2:]:
        raise ShapeMismatch.of(f"/{name}", "at least one head and one feature", array)
    if array.shape[2] > MAX_COUNT:
        raise ShapeMismatch.of(f"/{name}", f"at most {MAX_COUNT} heads", array)


def check_sequences(name: str, count: int) -> None:
    """Refuse more sequences than anybody sends: there are loops over them. Errors: ShapeMismatch."""
    if count > MAX_COUNT:
        raise ShapeMismatch.at(f"/{name}", f"at most {MAX_COUNT} sequences", str(count))


Named = tuple[str, np.ndarray]  # an argument by its name


def dense(name: str, array: np.ndarray, used: Named | None = None) -> Tokens:
    """A sequence in each slot of (b, l, h, d), of which the first `used` tokens count.

    Errors: InvalidArray, ShapeMismatch.
    """
    b, length, *_ = numbers(name, array, 4, "b, l, h, d").shape
    check_sequences(name, b)
    room = np.full(b, length, np.int64)
    lengths = room if used is None else counts(*used, room)
    return slots(name, array, Rows(b, length, np.arange(b), np.zeros(b, np.int64), lengths, room))


def ragged(name: str, array: np.ndarray, bounds: Named, used: Named | None = None) -> Tokens:
    """Sequences beside each other in (total, h, d), of which the first `used` tokens count.

    bounds: cumulated lengths, (b + 1). Errors: InvalidArray, ShapeMismatch.
    """
    array = numbers(name, array, 3, "total, h, d")[None]
    first, room = boundaries(*bounds, array.shape[1], f"tokens of {name}")
    lengths = room if used is None else counts(*used, room)
    return slots(name, array, Rows(1, array.shape[1], np.zeros(len(first), np.int64), first, lengths, room))


def boundaries(name: str, given: np.ndarray, total: int, what: str) -> tuple[np.ndarray, np.ndarray]:
    """Where sequences begin and how long they are, (b,), from cumulated lengths (b + 1). total: the most of each

    Errors: InvalidArray, ShapeMismatch.
    """
    bounds = whole(name, given, (len(given) if given.ndim == 1 else None,), "b + 1,")
    if not len(bounds):
        raise ShapeMismatch.of(f"/{name}", "(b + 1,)", given)
    check_sequences(name, len(bounds) - 1)
    if bounds[0] != 0:
        raise InvalidArray.at(f"/{name}/0", "0, where the first sequence begins", str(bounds[0]))
    if (bad := np.flatnonzero((bounds < 0) | (bounds > total))).size:  # before differences, which may overflow
        n = int(bad[0])
        raise InvalidArray.at(f"/{name}/{n}", f"at least 0 and at most {total}, the {what}", str(bounds[n]))
    lengths = np.diff(bounds)
    if (bad := np.flatnonzero(lengths < 0)).size:
        n = int(bad[0])
        raise InvalidArray.at(f"/{name}/{n + 1}", f"at least {bounds[n]}, as lengths are cumulated", str(bounds[n + 1]))
    return bounds[:-1], lengths


def whole(name: str, given: np.ndarray, sizes: tuple[int | None, ...], axes: str) -> np.ndarray:
    """Integers of this shape as int64; None stands for any size. Errors: InvalidArray, ShapeMismatch."""
    fits = given.ndim == len(sizes) and all(want in (None, got) for want, got in zip(sizes, given.shape, strict=True))
    if not fits:
        wanted = shape(tuple("·" if size is None else size for size in sizes))
        raise ShapeMismatch.of(f"/{name}", f"({axes})" + (f", {wanted} here" if None not in sizes else ""), given)
    if given.size == 0 and given.dtype.kind == "f":  # an empty list
        given = given.astype(np.int64)
    return integers(given, f"/{name}", {given.shape: axes})


def counts(name: str, given: np.ndarray, most: np.ndarray, low: int = 0) -> np.ndarray:
    """Lengths (b,), from low to `most` (b,), or one integer for all. Errors: InvalidArray, ShapeMismatch."""
    given = np.broadcast_to(given, most.shape) if given.ndim == 0 else given
    lengths = whole(name, given, most.shape, "b,")
    if (bad := np.flatnonzero((lengths < low) | (lengths > most))).size:
        n = int(bad[0])
        raise InvalidArray.at(f"/{name}/{n}", f"an integer from {low} to {most[n]}", str(lengths[n]))
    return lengths


def paged(name: str, cache: np.ndarray, axes: str, table: Table, first: np.ndarray | None = None) -> Tokens:
    """The tokens of pages: token t of a sequence is in the page of entry t // page, at t % page.

    They are views where pages follow each other in the cache, and its axes allow it.
    axes: a name of CACHES; first: tokens before it, (b,), are not used. Errors: InvalidArray, ShapeMismatch.
    """
    order, letters = CACHES[axes]
    cache = numbers(name, cache, len(order), letters).transpose(order)
    _check_head(name, cache)
    return _of_pages(name, cache, table, first)


def _of_pages(name: str, cache: np.ndarray, table: Table, first: np.ndarray | None) -> Tokens:
    """The same, of a cache (pages, page, hk, …)."""
    table.check(cache, name)
    page, heads, features = cache.shape[1], cache.shape[2], math.prod(cache.shape[3:])
    has_no_gaps = cache.strides[0] == page * cache.strides[1]

    def of(sequence: int) -> np.ndarray:
        skipped, length = 0 if first is None else int(first[sequence]), int(table.lengths[sequence])
        low, start = skipped // page, int(table.start[sequence])
        entries = table.entries[start + low : start + -(-length // page)]
        used = slice(skipped - low * page, length - low * page)
        if len(entries) == 1:
            tokens = cache[entries[0], used]
        elif has_no_gaps and len(entries) and (np.diff(entries) == 1).all():
            pages = cache[entries[0] : entries[0] + len(entries)]
            tokens = pages.reshape(len(entries) * page, *cache.shape[2:])[used]
        else:  # token by token: the first and the last page may be much larger than what is used of them
            at, place = np.divmod(np.arange(skipped, length), page)
            tokens = cache[table.entries[start + at], place]
        return tokens.reshape(length - skipped, heads, features)

    def at(other: Any) -> Tokens:
        """At places, or by a table whose pages may be shorter: the first tokens of each."""
        if isinstance(other, Places):
            return read_at(name, cache, other)
        return _of_pages(name, cache[:, : other.page], other, first)

    lengths = table.lengths if first is None else table.lengths - first
    return Tokens(name, lengths, heads, features, of, cache.dtype, at, table=replace(table, pages=len(cache)))


@dataclass(frozen=True)
class Table:
    """A table of pages, not yet checked: the entries of sequence i begin at start[i].

    name: the argument; entries: of all sequences; page: tokens of a page; columns: of a table with rows, else 0
    pages: of the cache, once it is known
    """

    name: str
    entries: np.ndarray
    start: np.ndarray
    lengths: np.ndarray
    page: int
    columns: int = 0
    pages: int = 0

    @classmethod
    def of_rows(cls, name: str, given: np.ndarray, lengths: Named, page: int, b: int) -> Table:
        """A table (b, max pages). lengths: tokens of each sequence, (b,). Errors: InvalidArray, ShapeMismatch."""
        check_sequences(name, b)
        rows = whole(name, given, (b, None), "b, max pages")
        columns = rows.shape[1]
        used = counts(*lengths, np.full(b, columns * page))
        return cls(name, rows.reshape(-1), np.arange(b) * columns, used, page, columns)

    def check(self, cache: np.ndarray, name: str) -> None:
        """Refuse entries of used pages that are no pages of the cache. Errors: InvalidArray, ShapeMismatch."""
        pages, page = cache.shape[:2]
        if page != self.page or page < 1:
            raise ShapeMismatch.at(f"/{name}", f"pages of {max(self.page, 1)} tokens", str(page))
        taken = -(-self.lengths // page)
        edges = np.zeros(len(self.entries) + 1, np.int32)
        np.add.at(edges, self.start[taken > 0], 1)  # sequences may share a row
        np.add.at(edges, (self.start + taken)[taken > 0], -1)
        used = np.cumsum(edges[:-1], dtype=np.int32) > 0
        if (bad := np.flatnonzero(used & ((self.entries < 0) | (self.entries >= pages)))).size:
            at = int(bad[0])
            place = "/".join(map(str, divmod(at, self.columns))) if self.columns else str(at)
            raise InvalidArray.at(f"/{self.name}/{place}", f"a page from 0 to {pages - 1}", str(self.entries[at]))


def last_pages(bounds: Named, indices: Named, last: Named, page: int) -> Table:
    """The table of FlashInfer: boundaries (b + 1) of each sequence's indices, and the tokens in its last page (b,).

    Errors: InvalidArray, ShapeMismatch.
    """
    entries = whole(*indices, (None,), "pages of all sequences,")
    start, taken = boundaries(*bounds, len(entries), f"entries of {indices[0]}")
    name, given = last
    if given.shape == taken.shape:
        given = np.where(taken > 0, given, given.dtype.type(1))  # without pages it means nothing
    used = counts(name, given, np.full(len(taken), page), 1)
    return Table(indices[0], entries, start, np.where(taken > 0, (taken - 1) * page + used, 0), page)


def factors(name: str, given: np.ndarray, codes: Tokens, heads: int) -> np.ndarray:
    """Factors of codes, (b or 1, hk or 1, tokens or 1), from shape (), (b,), (b, hk) or (b, hk, k).

    heads: hk; a factor stands for all heads of its group. Errors: InvalidArray, ShapeMismatch.
    """
    b, longest = len(codes.lengths), int(codes.lengths.max(initial=0))
    leading = (b, heads)
    if given.ndim > 3 or given.shape[:2] != leading[: given.ndim] or any(size < longest for size in given.shape[2:]):
        expected = f"(), {shape((b,))}, {shape((b, heads))} or {shape((b, heads, longest))}"
        raise ShapeMismatch.of(f"/{name}", expected, given)
    if codes.heads % heads:
        raise ShapeMismatch.at(f"/{codes.name}", f"a multiple of {heads} heads", str(codes.heads))
    found = cast(given[..., :longest] if given.ndim == 3 else given, FLOATS["float64"], f"/{name}")
    return found.reshape([*found.shape, 1, 1, 1][:3])


def same(name: str, one: Tokens, other: Tokens) -> None:
    """Refuse keys and values of different heads or numbers of tokens. Errors: ShapeMismatch, FieldConflict."""
    if one.heads != other.heads:
        raise ShapeMismatch.at(f"/{other.name}", f"{one.heads} heads, as {name}", str(other.heads))
    if not np.array_equal(one.lengths, other.lengths):
        raise FieldConflict.at(f"/{other.name}", f"as many tokens as {name}", "another number")
