"""What all terms of a plan together hide of a tile of scores, and why; and what they add to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from attention_service.attention.score_term import Array, Load, ScoreTerm
from attention_service.attention.tiles import Tile

# The bits of `hidden_by`, by the field of a request that hides a key. Clients rely on them: they never change.
BITS: Final[Mapping[str, int]] = {
    "mask": 1,
    "key_mask": 2,
    "key_lengths": 4,
    "query_lengths": 8,
    "segment_ids": 16,
    "window": 32,
    "chunk_size": 64,
    "is_causal": 128,
    "bias": 256,
    "selected_keys": 512,
}


def visible(terms: Iterable[ScoreTerm], tile: Tile, load: Load) -> Array | None:
    """Booleans that broadcast to the scores of a tile, True where all terms let a key be seen; None if all keys are."""
    found = None
    for term in terms:
        seen = term.visible(tile, load)
        if seen is not None:
            found = seen if found is None else found & seen
    return found


def hidden_parts(terms: Iterable[ScoreTerm], tile: Tile, load: Load) -> Iterator[tuple[slice, Array]]:
    """The columns of a tile in which keys may be hidden, counted from its first, each with `visible` for them.

    Bands hide only at their edges: the columns that all queries of the tile see are left out, if they are consecutive.
    """
    start, whole = tile.columns.start, []
    for term in terms:
        clear = slice(0, 0) if tile.gathered is not None else term.visible_columns(tile.rows, tile.columns)
        if clear.start == clear.stop:
            whole.append(term)
            continue
        for part in (slice(start, clear.start), slice(clear.stop, tile.columns.stop)):
            if part.start < part.stop:
                seen = term.visible(replace(tile, columns=part), load)
                yield slice(part.start - start, part.stop - start), seen
    seen = visible(whole, tile, load)
    if seen is not None:
        yield slice(None), seen


def hiding_bits(terms: Iterable[ScoreTerm], tile: Tile, load: Load) -> Array:
    """int32 that broadcast to the scores of a tile: the sum of the bits of all terms that hide a key, 0 if it is seen.

    A term with `visible` needs a `cause`, whose bit is that of BITS.
    """
    found = load(np.zeros((1, 1, 1, 1), np.int32))
    for term in terms:
        seen = term.visible(tile, load)
        if seen is not None:
            found = found + ~seen * load(np.full(1, BITS[term.cause], np.int32))
    return found


def causes(terms: Iterable[ScoreTerm]) -> dict[str, int]:
    """The fields of a request that may hide keys, by its terms, with their bits in `hidden_by`."""
    present = {term.cause for term in terms}
    return {name: bit for name, bit in BITS.items() if name in present}


def additions(terms: Iterable[ScoreTerm], tile: Tile, load: Load) -> list[Array]:
    """What terms add to the scores of a tile; each array broadcasts to them."""
    return [added for term in terms if (added := term.added(tile, load)) is not None]
