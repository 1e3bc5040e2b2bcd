"""What all terms of a plan together hide of a tile of scores, and add to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from service.attention.terms import Array, Load, ScoreTerm
from service.attention.tiles import Tile


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

    Bands hide only at their edges: the columns that all queries of the tile see are left out.
    """
    start, whole = tile.columns.start, []
    for term in terms:
        clear = term.visible_columns(tile.rows, tile.columns)
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


def additions(terms: Iterable[ScoreTerm], tile: Tile, load: Load) -> list[Array]:
    """What terms add to the scores of a tile; each array broadcasts to them."""
    return [added for term in terms if (added := term.added(tile, load)) is not None]
