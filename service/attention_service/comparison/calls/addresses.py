"""How stored tokens are addressed, and by which other rules a kernel may address them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from attention_service.engines.places import Places, Strides
from attention_service.engines.tokens import Tokens

# From the entries of a table and the number of an entry of a sequence, (pages,) that are read; may raise IndexError.
Pages = Callable[["Addresses", int, np.ndarray], np.ndarray]
# Entries and tokens that a kernel may be off by, and pages that it may believe in.
STEPS: Final = (1, -1, 2, -2, 3, -3, 4, -4)
SIZES: Final = tuple(2**n for n in range(10))
# Sequences whose places are tried for each, and entries of a row.
MOST: Final = 64
# Widths of integers in bits: of a page, and of an address.
PAGE_BITS: Final = (7, 8, 15, 16)
ADDRESS_BITS: Final = range(7, 33)


@dataclass(frozen=True)
class Addresses:
    """Where the tokens of each sequence are: token t in the page of entry (first + t) // size, at the rest.

    An array without pages is a table whose entries are its slots. columns: of a table with rows, else 0
    pages: reads the table, None for as it is; is_reversed: True for the last token first
    strides, bits: as of Places; swizzle: that the slot of a page is combined with by XOR
    """

    entries: np.ndarray
    start: np.ndarray
    size: int
    first: np.ndarray
    lengths: np.ndarray
    columns: int = 0
    is_paged: bool = False
    pages: Pages | None = None
    is_reversed: bool = False
    strides: Strides | None = None
    bits: int = 0
    swizzle: int = 0

    @classmethod
    def of(cls, tokens: Tokens) -> Addresses:
        """Those of stored tokens, which are in pages or in slots."""
        table, rows = tokens.table, tokens.rows
        if table is not None:
            first = table.lengths - tokens.lengths
            return cls(table.entries, table.start, table.page, first, tokens.lengths, table.columns, is_paged=True)
        assert rows is not None
        every = np.arange(len(rows.slot))
        # Beyond its slot a token is in the next one, as memory goes.
        return cls(rows.slot, every, 2**62, rows.first, rows.lengths)

    @property
    def count(self) -> int:
        """The number of sequences."""
        return len(self.start)

    @property
    def places(self) -> Places:
        """Where each token is."""
        return Places(self.lengths, self._of, self.strides, self.bits)

    def _of(self, sequence: int) -> tuple[np.ndarray, np.ndarray]:
        tokens = np.arange(int(self.lengths[sequence]))
        tokens = int(self.first[sequence]) + (tokens[::-1] if self.is_reversed else tokens)
        if not len(tokens):
            return tokens, tokens
        if tokens.min() < 0:
            raise IndexError
        at, slot = np.divmod(tokens, self.size)
        return (entries_of if self.pages is None else self.pages)(self, sequence, at), slot ^ self.swizzle


def entries_of(one: Addresses, sequence: int, at: np.ndarray) -> np.ndarray:
    """The pages of entries of a sequence. Errors: IndexError."""
    index = int(one.start[sequence]) + at
    if len(index) and index.min() < 0:
        raise IndexError
    found: np.ndarray = one.entries[index]
    return found


def other_addresses(one: Addresses, queries: np.ndarray | None) -> Iterator[tuple[str, Addresses]]:
    """Other addresses that a kernel may read, each with what it says: of rows, entries, pages, slots and memory.

    queries: where those of each sequence begin, beside each other; None for slots
    """
    yield from _rows(one)
    yield from _tokens(one)
    if one.is_paged:
        yield from _entries(one)
        yield from _tables(one)
        yield from _sizes(one)
        yield from _swizzled(one)
    else:
        yield from _starts(one, queries)
    yield from _memory(one)


def _rows(one: Addresses) -> Iterator[tuple[str, Addresses]]:
    """Those of other sequences."""
    every = np.arange(one.count)
    orders = [(np.roll(every, 1), "the sequence before"), (np.roll(every, -1), "the sequence after")]
    orders += [(np.full(one.count, n), f"sequence {n}") for n in range(min(one.count, MOST))]
    for order, whose in orders if one.count > 1 else ():
        yield f"they are those of {whose}", replace(one, start=one.start[order], first=one.first[order])


def _tokens(one: Addresses) -> Iterator[tuple[str, Addresses]]:
    """Other tokens of the same pages or slots."""
    for by in STEPS:
        yield f"token t{by:+d} is read for token t", replace(one, first=one.first + by)
    yield "the last token is read first", replace(one, is_reversed=True)
    if one.first.any():
        yield "tokens before the first are not skipped", replace(one, first=np.zeros_like(one.first))
        yield "tokens before the first are skipped twice", replace(one, first=2 * one.first)


def _entries(one: Addresses) -> Iterator[tuple[str, Addresses]]:
    """Other entries of the table."""
    for by in STEPS:
        yield f"entry i{by:+d} of the table is read for entry i", replace(one, start=one.start + by)
    if one.columns:
        row = one.start // one.columns
        yield "row n of the table is read for sequence n", replace(one, start=np.arange(one.count) * one.columns)
    else:
        row = np.arange(one.count)
    for width in range(1, min(one.columns or len(one.entries), MOST) + len(STEPS)):
        if width != one.columns:
            yield f"rows of the table are taken for {width} entries long", replace(one, start=row * width)
    half = np.stack([one.entries, np.zeros_like(one.entries)], axis=1).reshape(-1)
    said = "entries of 64 bits are read as entries of 32"
    yield said, replace(one, entries=half)
    yield said, replace(one, entries=half, start=2 * one.start)
    for bits in PAGE_BITS:
        if one.entries.max(initial=0) >= 2**bits:
            yield f"of an entry of the table {bits} bits are read", replace(one, entries=one.entries % 2**bits)


def _tables(one: Addresses) -> Iterator[tuple[str, Addresses]]:
    """No table, or its entries in another order."""
    yield "the table is not read: page i is read for entry i", replace(one, pages=lambda _, n, at: at)
    own = one.start // one.columns if one.columns else np.arange(one.count)
    yield (
        "the table is not read: pages are counted over all rows",
        replace(one, pages=lambda it, n, at: it.start[n] + at),
    )
    yield "sequence n reads page n", replace(one, pages=lambda it, n, at: own[n] + np.zeros_like(at))
    yield "pages follow the first one", replace(one, pages=lambda it, n, at: entries_of(it, n, at * 0) + at - at.min())
    yield "the first page is read for all", replace(one, pages=lambda it, n, at: entries_of(it, n, at * 0))
    yield "pages are read in ascending order", replace(one, pages=_sorted)
    yield "pages are read from the last to the first", replace(one, pages=_backwards)
    for by in (1, -1):
        yield f"page p{by:+d} is read for page p", replace(one, pages=_beside(by))


def _beside(by: int) -> Pages:
    return lambda one, sequence, at: entries_of(one, sequence, at) + by


def _row(one: Addresses, sequence: int) -> np.ndarray:
    """All pages of a sequence."""
    count = -(-int(one.first[sequence] + one.lengths[sequence]) // one.size)
    return entries_of(one, sequence, np.arange(count))


def _sorted(one: Addresses, sequence: int, at: np.ndarray) -> np.ndarray:
    found: np.ndarray = np.sort(_row(one, sequence))[at]
    return found


def _backwards(one: Addresses, sequence: int, at: np.ndarray) -> np.ndarray:
    found: np.ndarray = _row(one, sequence)[::-1][at]
    return found


def _sizes(one: Addresses) -> Iterator[tuple[str, Addresses]]:
    """Pages of another length, as far apart as they are, or as close as that length makes them."""
    sizes = dict.fromkeys((one.size // 2, one.size * 2, *SIZES))
    for size in (size for size in sizes if size not in (0, one.size)):
        said = f"pages are taken for {size} tokens long"
        yield said, replace(one, size=size)
        yield f"{said}, and as far apart", replace(one, size=size, strides=_far_apart(size / one.size))
        yield f"{said}, one behind the other", replace(one, size=size, strides=_behind(size))
    for factor in (0.5, 2):
        yield f"pages are taken for {factor:g} times as far apart", replace(one, strides=_far_apart(factor))
    yield "pages are taken for one behind the other", replace(one, strides=_behind(one.size))


def _swizzled(one: Addresses) -> Iterator[tuple[str, Addresses]]:
    """Slots of a page in the order of a swizzle: beside a last page that is filled in part, unused slots are read."""
    is_power = one.size & (one.size - 1) == 0
    for by in (2**n for n in range((one.size - 1).bit_length())) if is_power else ():
        yield f"slot s XOR {by} of a page is read for slot s", replace(one, swizzle=by)


def _far_apart(factor: float) -> Strides:
    return lambda own, shape: (int(own[0] * factor), own[1], own[2])


def _behind(size: int) -> Strides:
    def of(own: tuple[int, int, int], shape: tuple[int, ...]) -> tuple[int, int, int]:
        inner = own[2] * shape[2] if own[1] < own[2] else own[1] * shape[1]
        return inner * size // shape[1], own[1], own[2]

    return of


def _starts(one: Addresses, queries: np.ndarray | None) -> Iterator[tuple[str, Addresses]]:
    """Other places where sequences begin that lie beside each other, and other slots."""
    every = np.arange(one.count)
    yield "slot n is read for sequence n", replace(one, entries=every, start=every)
    if queries is not None:
        yield "they begin where the queries of the sequence do", replace(one, first=queries)
    longest = int(one.lengths.max(initial=0))
    yield f"each sequence is taken for {longest} tokens, the most, long", replace(one, first=every * longest)
    ends = np.cumsum(one.lengths)
    yield "sequences are taken for one behind the other, without gaps", replace(one, first=ends - one.lengths)


def _memory(one: Addresses) -> Iterator[tuple[str, Addresses]]:
    """Other steps between tokens and heads, and addresses that wrap."""
    yield "the axes of tokens and heads are exchanged", replace(one, strides=_exchanged)
    yield "a token is taken for the numbers of one head", replace(one, strides=_one_head)
    for bits in ADDRESS_BITS:
        yield f"addresses wrap at 2**{bits} numbers", replace(one, bits=bits)


def _exchanged(own: tuple[int, int, int], shape: tuple[int, ...]) -> tuple[int, int, int]:
    least = min(own[1:])
    return (own[0], least, least * shape[1]) if own[1] > own[2] else (own[0], least * shape[2], least)


def _one_head(own: tuple[int, int, int], shape: tuple[int, ...]) -> tuple[int, int, int]:
    return own[0], min(own[1:]), own[2]


def page_lengths(one: Addresses) -> dict[str, Any]:
    """Other numbers of tokens of each sequence, by what they say, beside those of a few more or fewer."""
    every, ends = np.arange(one.count), one.first + one.lengths
    found: dict[str, Any] = {f"{abs(by)} {'more' if by > 0 else 'fewer'}": one.lengths + by for by in STEPS}
    if one.count > 1:
        for order, whose in ((np.roll(every, 1), "before"), (np.roll(every, -1), "after")):
            found[f"as many as the sequence {whose}"] = one.lengths[order]
        found["as many as the longest"] = np.full(one.count, one.lengths.max())
        found["as many as all together"] = np.full(one.count, one.lengths.sum())
        found |= {f"as many as sequence {n}": np.full(one.count, one.lengths[n]) for n in range(min(one.count, MOST))}
    if one.is_paged:
        found["those of full pages"] = -(-ends // one.size) * one.size - one.first
        found["those of the pages that are full"] = ends // one.size * one.size - one.first
        found["those of a page more"] = one.lengths + one.size
        found["those of a page fewer"] = one.lengths - one.size
        found["those of a page more where all are full"] = one.lengths + one.size * (ends % one.size == 0)
    if one.first.any():
        found["those before the first, too"] = ends
        found["as many fewer as are before the first"] = one.lengths - one.first
    return found
