"""Random calls of attention engines, and what they return by their definitions: loops over sequences, heads, queries.

A draw begins with the tokens of each sequence. They are written into slots and pages token by token, and their
attention is computed from the tokens themselves: nothing here is gathered by the code under test.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

FLOATS = (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)
CODES = (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fnuz, np.int8)
Array = np.ndarray


@dataclass
class Options:
    """What all sequences of a call have. visible: may query i see key j, of q queries and k keys?"""

    scale: float | None = None
    softcap: float = 0.0
    sinks: Array | None = None
    slopes: Array | None = None  # (b, h)
    visible: Callable[[int, int, int, int], bool] = lambda i, j, q, k: True
    masks: list[Array] | None = None  # (q, k) of each sequence
    biases: list[Array] | None = None  # (h, q, k) of each sequence


@dataclass
class Sequence:
    """Queries (q, h, d), keys (k, hk, d), values (k, hk, e), as stored, and their factors (tokens, heads)."""

    query: Array
    key: Array
    value: Array
    factors: tuple[Array, Array, Array]

    @property
    def arrays(self) -> list[Array]:
        named = zip((self.query, self.key, self.value), self.factors, strict=True)
        return [array.astype(np.float64) * factor[..., None] for array, factor in named]


@dataclass
class Drawn:
    """A call, and the tokens and options that it stands for. form: the axes of its answer; about: where its rows are"""

    function: str
    arguments: dict[str, Any]
    version: int | None
    sequences: list[Sequence]
    options: Options
    base: float = math.e
    form: str = "ragged"
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def query(self) -> Array:
        """The queries, of two parts the first."""
        found = next(self.arguments[name] for name in ("q", "query", "q_nope") if name in self.arguments)
        first: Array = found[0] if isinstance(found, tuple) else found
        return first

    def expected(self) -> list[tuple[Array, Array, Array]]:
        """Output (q, h, e), logsumexp (q, h) and weights (h, q, k) of each sequence."""
        return [attention(one, n, self.options, self.base) for n, one in enumerate(self.sequences)]


def attention(one: Sequence, n: int, options: Options, base: float) -> tuple[Array, Array, Array]:
    """The attention of a sequence, query by query."""
    query, key, value = one.arrays
    (q, h, d), (k, hk, e) = query.shape, value.shape
    output, sums, weights = np.zeros((q, h, e)), np.full((q, h), -np.inf), np.zeros((h, q, k))
    scale = 1 / math.sqrt(d) if options.scale is None else options.scale
    for head in range(h):
        shared = head // (h // hk)
        for i in range(q):
            seen = [j for j in range(k) if options.visible(i, j, q, k)]
            if options.masks is not None:
                seen = [j for j in seen if options.masks[n][i, j]]
            scores = key[seen, shared] @ query[i, head] * scale
            if options.softcap > 0:
                scores = options.softcap * np.tanh(scores / options.softcap)
            if options.slopes is not None:
                scores = scores - options.slopes[n, head] * np.abs(i + k - q - np.array(seen, np.float64))
            if options.biases is not None:
                scores = scores + options.biases[n][head, i, seen]
            logits = scores if options.sinks is None else np.append(scores, options.sinks[head])
            if not len(logits) or logits.max() == -np.inf:
                continue
            exponentials = np.exp(logits - logits.max())
            weights[head, i, seen] = (exponentials / exponentials.sum())[: len(seen)]
            sums[i, head] = (logits.max() + np.log(exponentials.sum())) / math.log(base)
            output[i, head] = weights[head, i, seen] @ value[seen, shared]
    return output, sums, weights


def poison(dtype: np.dtype) -> Array:
    """What a free slot holds: NaN, or a large code of a type that has none."""
    return np.array(100 if dtype == np.int8 else np.nan).astype(dtype)


class Draw:
    """The random choices of a call."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.hk, self.group = self.number(1, 3), self.number(1, 3)
        self.h = self.hk * self.group
        self.b, self.d = self.number(1, 4), self.number(1, 8)
        self.e = self.d
        self.page = int(self.random.choice([1, 2, 3, 4, 7, 16, 64, 256]))
        self.integers = np.int32 if self.maybe() else np.int64

    def number(self, low: int, high: int) -> int:
        return int(self.random.integers(low, high + 1))

    def maybe(self, chance: float = 0.5) -> bool:
        return bool(self.random.random() < chance)

    def whole(self, values: Any) -> Array:
        return np.array(values, self.integers)

    def lengths(self, low: int, high: int, b: int | None = None) -> list[int]:
        """Lengths of sequences; some empty, some a multiple of the page."""
        found = [self.number(low, high) for _ in range(self.b if b is None else b)]
        for n in range(len(found)):
            if self.maybe(0.3):
                found[n] = max(low, min(high, found[n] // self.page * self.page))
        return found

    def sequences(self, queries: list[int], keys: list[int], *, codes: bool = False) -> list[Sequence]:
        """Tokens of random numbers, all of one type; some sequences begin with the keys of another."""
        kinds = CODES if codes else FLOATS
        dtype = np.dtype(kinds[self.number(0, len(kinds) - 1)])

        def drawn(*shape: int) -> Array:
            numbers = self.random.normal(size=shape)
            return (numbers * 20 if dtype == np.int8 else numbers).astype(dtype)

        found: list[Sequence] = []
        for q, k in zip(queries, keys, strict=True):
            key, value = drawn(k, self.hk, self.d), drawn(k, self.hk, self.e)
            if found and self.maybe():
                most = min(k, len(found[0].key)) // self.page * self.page
                key[:most], value[:most] = found[0].key[:most], found[0].value[:most]
            ones = (np.ones((q, self.h)), np.ones((k, self.hk)), np.ones((k, self.hk)))
            found.append(Sequence(drawn(q, self.h, self.d), key, value, ones))
        return found

    def pages(
        self, sequences: list[Sequence], *, apart: bool = False
    ) -> tuple[Array, Array, list[list[int]], list[list[int]]]:
        """Caches (pages, page, hk, d) of keys and values, and the pages of each sequence.

        Free slots are NaN, or what else must not be read. Sequences that begin alike share pages. apart: values have a
        table of their own
        """
        counts = [-(-len(one.key) // self.page) for one in sequences]
        total = sum(counts) + self.number(0, 3)
        dtype = sequences[0].key.dtype
        caches = [np.full((total, self.page, self.hk, d), poison(dtype)) for d in (self.d, self.e)]
        tables: list[list[list[int]]] = []
        for cache, name in zip(caches, ("key", "value"), strict=True):
            if tables and not apart:
                order, table = None, tables[0]
            else:
                order, table = (
                    list(map(int, self.random.permutation(total) if self.maybe() else np.arange(total)[::-1])),
                    [],
                )
            for n, one in enumerate(sequences):
                tokens = getattr(one, name)
                row = [] if order is not None else table[n]
                for p in range(counts[n]):
                    if order is not None:
                        low, high = p * self.page, (p + 1) * self.page
                        alike = (
                            n
                            and high <= min(len(one.key), len(sequences[0].key))
                            and all(
                                np.array_equal(x[low:high], y[low:high])
                                for x, y in ((one.key, sequences[0].key), (one.value, sequences[0].value))
                            )
                        )
                        row.append(table[0][p] if alike else order.pop())
                    for t in range(p * self.page, min((p + 1) * self.page, len(tokens))):
                        cache[row[p], t % self.page] = tokens[t]
                if order is not None:
                    table.append(row)
            tables.append(table)
        return caches[0], caches[1], tables[0], tables[1]

    def table(self, rows: list[list[int]]) -> Array:
        """A table with rows, whose free entries are no pages."""
        width = max(map(len, rows)) + self.number(0, 2)
        return self.whole([row + [int(self.random.choice([-1, 10**6]))] * (width - len(row)) for row in rows]).reshape(
            len(rows), width
        )

    def beside(self, arrays: list[Array], *, spare: int = 0) -> Array:
        """Arrays of sequences beside each other, then spare rows of NaN."""
        empty = np.full((spare, *arrays[0].shape[1:]), poison(arrays[0].dtype))
        return np.concatenate([*arrays, empty])

    def slots(
        self, arrays: list[Array], length: int, order: list[int] | None = None, first: list[int] | None = None
    ) -> Array:
        """Arrays of sequences in slots of one length, whose free tokens are NaN."""
        dtype = arrays[0].dtype
        count = len(arrays) if order is None else max(order) + 2
        found = np.full((count, length, *arrays[0].shape[1:]), poison(dtype))
        for n, array in enumerate(arrays):
            start = 0 if first is None else first[n]
            for t in range(len(array)):
                found[n if order is None else order[n], start + t] = array[t]
        return found

    def bounds(self, lengths: list[int]) -> Array:
        return self.whole([sum(lengths[:n]) for n in range(len(lengths) + 1)])

    def factors(self, sequences: list[Sequence], which: int, heads: int) -> Array:
        """Factors of queries (0), keys (1) or values (2) in one of the shapes, which the sequences then have, too."""
        longest = max(len((one.query, one.key, one.value)[which]) for one in sequences)
        shape = [(), (len(sequences),), (len(sequences), heads), (len(sequences), heads, longest + 1)][
            self.number(0, 3)
        ]
        given = self.random.uniform(0.1, 2.0, size=shape)
        for n, one in enumerate(sequences):
            own = np.array(one.factors[which])
            for t in range(len(own)):
                for head in range(own.shape[1]):
                    own[t, head] = given[(n, head // (own.shape[1] // heads), t)[: given.ndim]]
            one.factors = tuple(own if n == which else x for n, x in enumerate(one.factors))  # type: ignore[assignment]
        return given
