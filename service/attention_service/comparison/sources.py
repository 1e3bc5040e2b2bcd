"""Where a wrong kernel may take the value of a key from: other keys, heads, batch entries, or its own times a factor.

Axes: b batch entries, g key/value heads, k keys, e features.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from attention_service.comparison.case import Case
from attention_service.comparison.solve import values_of

# Keys and the bits of their index by which a value is moved.
MOST_XOR: Final = 64
STEPS: Final = (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 128)
MOST_HEADS: Final = 8
# What is read in the place of a key outside: its name, in a sentence.
ENDS: Final = {
    "own": "keys that this leaves without one keep their own",
    "zero": "keys that this leaves without one have 0",
    "wrap": "what passes the end begins at the start",
    "edge": "what passes the end is that of the first or last key",
}


@dataclass(frozen=True, eq=False)
class Source:
    """Where a kernel takes the values from that it multiplies by the weights of the keys.

    text: in a sentence about key j; keys: (k,), which key's, -1 for none; end: a key of ENDS, "" if all are inside
    heads, batches: what is added to the index of the key/value head and the batch entry
    head: the key/value head, the same for all; None for their own
    is_own: True for the own value times a factor that is fitted
    """

    text: str
    keys: np.ndarray
    end: str = ""
    heads: int = 0
    batches: int = 0
    head: int | None = None
    is_own: bool = False

    def values(self, case: Case, batches: np.ndarray, heads: np.ndarray) -> np.ndarray:
        """The values (b, g, k, e) that are read in the place of those of these batch entries and key/value heads."""
        sizes = case.plan.sizes
        heads = (heads + self.heads) % sizes.num_kv_heads if self.head is None else np.full_like(heads, self.head)
        own = values_of(case, (batches + self.batches) % sizes.batch_size, heads)
        if self.is_own or self.heads or self.batches or self.head is not None:
            return own
        found: np.ndarray = own[:, :, self.keys]
        found[:, :, self.keys < 0] = 0
        return found


def sources(case: Case) -> Iterator[Source]:
    """The sources that are tried, the simplest first."""
    sizes = case.plan.sizes
    keys = np.arange(sizes.key_length)
    yield Source("its own value", keys, is_own=True)
    for by in range(1, min(MOST_XOR, sizes.key_length - 1) + 1):
        yield from _with_ends(f"the value of key j XOR {by}", keys ^ by, ("own", "zero"))
    for by in (by * sign for by in STEPS if by < sizes.key_length for sign in (1, -1)):
        yield from _with_ends(f"the value of key j{by:+d}", keys + by, tuple(ENDS))
    yield from _elsewhere(case, keys)


def _with_ends(text: str, keys: np.ndarray, ends: tuple[str, ...]) -> Iterator[Source]:
    """A source for each way to treat keys outside; one if all are inside, none if most are not.

    text, keys: see Source
    """
    count, own = len(keys), np.arange(len(keys))
    outside = (keys < 0) | (keys >= count)
    if not outside.any():
        yield Source(text, keys)
    elif 2 * outside.sum() <= count:
        read = {"own": own, "zero": np.full(count, -1), "wrap": keys % count, "edge": np.clip(keys, 0, count - 1)}
        for end in ends:
            yield Source(text, np.where(outside, read[end], keys), end)


def _elsewhere(case: Case, keys: np.ndarray) -> Iterator[Source]:
    """The values of other key/value heads, and of other batch entries."""
    heads, batches = case.plan.sizes.num_kv_heads, case.plan.sizes.batch_size
    for by in range(1, min(heads, MOST_HEADS)):
        yield Source(f"its value of key/value head (n{by:+d}) mod {heads} in the place of n", keys, heads=by)
    for head in range(min(heads, MOST_HEADS) if heads > 1 else 0):
        yield Source(f"its value of key/value head {head}", keys, head=head)
    for by in range(1, min(batches, MOST_HEADS)):
        yield Source(f"its value of batch entry (b{by:+d}) mod {batches} in the place of b", keys, batches=by)
