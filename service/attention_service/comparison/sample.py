"""Samples: the rows of a case whose answers are computed, and how they are cut into blocks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any, Final, TypeVar

import numpy as np

from attention_service.attention.score_term import ScoreTerm
from attention_service.attention.shapes import Sizes
from attention_service.attention.tiles import visible_columns
from attention_service.comparison.case import Case
from attention_service.comparison.problem import attention

T = TypeVar("T")

# Threads that compute a comparison, at most: what each computes takes memory.
MAX_THREADS: Final = 4
# Scores that a thread computes at a time: as many for any number of threads, as the bits of products depend on how many
# rows are multiplied at once, and a verdict must not depend on the number of threads.
BLOCK: Final = 2**19
# Products of query and key, and of weights and values, that are summed up between two checks of the deadline; numbers
# of keys and values of a block of several heads, which may share them.
PRODUCTS: Final = 2**28
OPERANDS: Final = 2**21


@dataclass(frozen=True, eq=False)
class Sample:
    """Batch entries, heads and queries (rows) of which answers are compared; every combination of them.

    columns: the keys that are computed, None for all
    kept: what cases that share operands need in common, by the identities of these; keeping: locks it
    """

    batches: np.ndarray
    heads: np.ndarray
    rows: np.ndarray
    columns: slice | None = None
    kept: dict[tuple[Any, ...], tuple[tuple[Any, ...], Any]] = field(default_factory=dict)
    keeping: Lock = field(default_factory=Lock)

    def once(self, room: int, name: str, make: Callable[[], T], *operands: Any) -> T:
        """What `make` returns, an array or several, made once for these operands as long as there is room for it.

        The operands are kept, too. What was needed last is dropped last.
        room: bytes that are kept; one entry may have more
        """
        key = (name, *map(id, operands))
        with self.keeping:
            if key in self.kept:
                self.kept[key] = self.kept.pop(key)
                found: T = self.kept[key][1]
                return found
        made = make()  # by two threads at once, rather than one after the other
        with self.keeping:
            while self.kept and _bytes(*self.kept.values(), operands, made) > room:
                del self.kept[next(iter(self.kept))]
            self.kept[key] = operands, made
        return made

    def forget(self) -> None:
        """Drop what was kept: blocks wait in a list until all of them are computed."""
        with self.keeping:
            self.kept.clear()

    @property
    def index(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What takes this sample from an array (b, h, q, …)."""
        batches, heads, rows = np.ix_(self.batches, self.heads, self.rows)
        return batches, heads, rows

    def of(self, array: np.ndarray) -> np.ndarray:
        """The part of an array (b, h, q, …) that belongs to the sample; an h axis of length 1 is kept."""
        sample = self if array.shape[1] > 1 else replace(self, heads=np.zeros(1, np.int64))
        found: np.ndarray = array[sample.index]
        return found

    def put(self, array: np.ndarray, part: np.ndarray) -> None:
        """Write the part of an array (b, h, q, …) that belongs to the sample."""
        sample = self if array.shape[1] > 1 else replace(self, heads=np.zeros(1, np.int64))
        array[sample.index] = part


def _bytes(*kept: Any) -> int:
    """The bytes of arrays, each once, also of those in tuples and in terms."""
    found: dict[int, int] = {}
    waiting = [*kept]
    while waiting:
        one = waiting.pop()
        if isinstance(one, np.ndarray):
            found[id(one)] = one.nbytes
        elif isinstance(one, tuple):
            waiting += one
        elif isinstance(one, ScoreTerm):
            waiting += one.arrays
    return sum(found.values())


def everything(case: Case) -> Sample:
    """The sample of all rows of a case."""
    sizes = case.plan.sizes
    return Sample(np.arange(sizes.batch_size), np.arange(sizes.num_heads), np.arange(sizes.query_length))


def blocks(case: Case, sample: Sample, names: Collection[str] = ("attention_weights",)) -> Iterator[Sample]:
    """A sample in blocks that take little memory: as many rows of a head as possible, then several heads.

    names: of the arrays that are needed; without weights, keys that no row of a block sees are left out
    """
    row = case.plan.sizes.key_length
    needed = case.plan.sizes._replace(num_heads=len(sample.heads), query_length=len(sample.rows))
    heads, rows = block_counts(needed, needs_all_heads=case.needs_all_heads)
    narrows = "attention_weights" not in names and case.softmax is attention and bool(np.isneginf(case.hidden_score))
    narrows = narrows and not (case.over_queries or case.edits)
    for batch in sample.batches:
        for head in range(0, len(sample.heads), heads):
            for start in range(0, len(sample.rows), rows):
                part = sample.rows[start : start + rows]
                columns = None
                if narrows:
                    queries = slice(int(part[0]), int(part[-1]) + 1)
                    columns = visible_columns(case.terms, slice(batch, batch + 1), queries, row)
                yield Sample(np.array([batch]), sample.heads[head : head + heads], part, columns)


def block_counts(sizes: Sizes, *, needs_all_heads: bool) -> tuple[int, int]:
    """How many heads and queries a block has. needs_all_heads: see Case"""
    row, heads, rows = sizes.key_length, sizes.num_heads, sizes.query_length
    width = sizes.head_dim + sizes.value_dim
    most = min(BLOCK, PRODUCTS // width)
    if needs_all_heads:
        return heads, min(rows, max(1, most // (row * heads)))
    rows = min(rows, max(1, most // row))
    return min(heads, max(1, most // (row * rows)), max(1, OPERANDS // (row * width))), rows
