"""What all terms of a plan together hide of a tile of scores, and why; and what they add to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from attention_service.attention.array_functions import Array
from attention_service.attention.score_term import Load, ScoreTerm
from attention_service.attention.tile import Tile


def visible(terms: Iterable[ScoreTerm], tile: Tile, load: Load) -> Array | None:
    """Booleans that broadcast to the scores of a tile, True where all terms let a key be seen; None if all keys are."""
    by_all = None
    for term in terms:
        seen = term.visible(tile, load)
        if seen is not None:
            by_all = seen if by_all is None else by_all & seen
    return by_all


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

    A term with `visible` has a `cause`.
    """
    bits = load(np.zeros((1, 1, 1, 1), np.int32))
    for term in terms:
        seen = term.visible(tile, load)
        if seen is not None and term.cause is not None:
            bits = bits + ~seen * load(np.full(1, term.cause.bit, np.int32))
    return bits


def causes(terms: Iterable[ScoreTerm]) -> dict[str, int]:
    """The fields of a request that may hide keys, by its terms, with their bits in `hidden_by`, in ascending order."""
    present = [(term.cause.bit, term.field) for term in terms if term.cause is not None]
    return {field: bit for bit, field in sorted(present)}


def additions(terms: Iterable[ScoreTerm], tile: Tile, load: Load) -> list[Array]:
    """What terms add to the scores of a tile; each array broadcasts to them."""
    return [added for term in terms if (added := term.added(tile, load)) is not None]
