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
from attention_service.comparison.problem import Answer, attention

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


class Kept:
    """What cases that share operands need in common, by a name and the identities of these operands.

    held: arrays, or tuples and terms of them, that are there in any case, so that they do not count
    """

    def __init__(self, held: tuple[Any, ...] = ()) -> None:
        self._held: frozenset[int] = frozenset()
        self._held = frozenset(self._sizes(*held))
        self._entries: dict[tuple[Any, ...], tuple[Any, Any, dict[int, int]]] = {}
        self._answers: dict[tuple[Any, ...], Answer] = {}
        self._uses: dict[int, int] = {}  # of each array, by its identity
        self._bytes = 0
        self._lock = Lock()

    def once(self, room: int, name: str, make: Callable[[], T], *operands: Any) -> T:
        """What `make` returns; see `Sample.once`."""
        key = (name, *map(id, operands))
        with self._lock:
            if key in self._entries:
                self._entries[key] = self._entries.pop(key)
                found: T = self._entries[key][1]
                return found
        made = make()  # by two threads at once, rather than one after the other
        with self._lock:
            self._add(key, operands, made)
            while len(self._entries) > 1 and self._all_bytes > room:
                self._drop(next(iter(self._entries)))
        return made

    def forget(self) -> None:
        """Drop all of it."""
        with self._lock:
            self._entries.clear()
            self._answers.clear()
            self._uses.clear()
            self._bytes = 0

    def _add(self, key: tuple[Any, ...], operands: tuple[Any, ...], made: Any) -> None:
        self._drop(key)  # of another thread
        sizes = self._sizes(*operands, made)
        self._entries[key] = operands, made, sizes
        if isinstance(made, Answer):
            self._answers[key] = made
        for one, size in sizes.items():
            uses = self._uses.get(one, 0)
            self._uses[one] = uses + 1
            self._bytes += 0 if uses else size

    def _drop(self, key: tuple[Any, ...]) -> None:
        _, _, sizes = self._entries.pop(key, ((), None, {}))
        self._answers.pop(key, None)
        for one, size in sizes.items():
            uses = self._uses.pop(one)
            if uses > 1:
                self._uses[one] = uses - 1
            else:
                self._bytes -= size

    @property
    def _all_bytes(self) -> int:
        """The bytes of all that is kept; answers grow with what is computed of them."""
        return self._bytes + sum(made.nbytes for made in self._answers.values())

    def _sizes(self, *kept: Any) -> dict[int, int]:
        """The bytes of arrays that are not held, by their identities: those in tuples and terms, too.

        Of a view, they are those of its array.
        """
        found: dict[int, int] = {}
        waiting = [*kept]
        for one in waiting:  # which grows
            if isinstance(one, np.ndarray):
                while isinstance(one.base, np.ndarray):
                    one = one.base
                if id(one) not in self._held:
                    found[id(one)] = one.nbytes
            elif isinstance(one, tuple):
                waiting += one
            elif isinstance(one, ScoreTerm):
                waiting += one.arrays
        return found


@dataclass(frozen=True, eq=False)
class Sample:
    """Batch entries, heads and queries (rows) of which answers are compared; every combination of them.

    columns: the keys that are computed, None for all
    kept: what cases that share operands need in common
    """

    batches: np.ndarray
    heads: np.ndarray
    rows: np.ndarray
    columns: slice | None = None
    kept: Kept = field(default_factory=Kept)

    def once(self, room: int, name: str, make: Callable[[], T], *operands: Any) -> T:
        """What `make` returns, an array or several, made once for these operands as long as there is room for it.

        The operands are kept, too. What was needed last is dropped last.
        room: bytes that are kept; one entry may have more
        """
        return self.kept.once(room, name, make, *operands)

    def forget(self) -> None:
        """Drop what was kept: blocks wait in a list until all of them are computed."""
        self.kept.forget()

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


def kept_beside(case: Case) -> Kept:
    """Where to keep what is computed of a case, whose own arrays are there in any case."""
    return Kept((case.query, case.key, case.value, case.past_key, case.past_value, case.terms))


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
                yield Sample(np.array([batch]), sample.heads[head : head + heads], part, columns, kept_beside(case))


def block_counts(sizes: Sizes, *, needs_all_heads: bool) -> tuple[int, int]:
    """How many heads and queries a block has. needs_all_heads: see Case"""
    row, heads, rows = sizes.key_length, sizes.num_heads, sizes.query_length
    width = sizes.head_dim + sizes.value_dim
    most = min(BLOCK, PRODUCTS // width)
    if needs_all_heads:
        return heads, min(rows, max(1, most // (row * heads)))
    rows = min(rows, max(1, most // row))
    return min(heads, max(1, most // (row * rows)), max(1, OPERANDS // (row * width))), rows
