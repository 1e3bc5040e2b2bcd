"""What all terms of a plan together hide of a tile of scores, and why; and what they add to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from attention_service.attention.array_functions import Array
from attention_service.attention.score_term import Load, ScoreTerm
from attention_service.attention.tile import Tile


class Cause(NamedTuple):
    """A field of a request that hides keys, as outputs, pictures, the page and its documentation show it.

    bit: in `hidden_by`; clients rely on it: it never changes
    tint: the colour of what it hides, sRGB
    reason: on the page, about one query and key; names between braces are filled in by `whyHidden` of page/row.js
    hides: which keys, as the end of a sentence that begins with "hides a key"
    """

    bit: int
    tint: str
    reason: str
    hides: str


# By the field that hides a key.
CAUSES: Final[Mapping[str, Cause]] = {
    "mask": Cause(1, "#b5466f", "false for this query and key", "where it is false"),
    "key_mask": Cause(2, "#2f81a8", "false for this key", "where it is false"),
    "key_lengths": Cause(4, "#3b6ea8", "the key is padding", "that is padding"),
    "query_lengths": Cause(8, "#5b8db8", "the query is padding", "every key of a query that is padding"),
    "segment_ids": Cause(16, "#1a7f64", "query and key are in different segments", "with another id than the query"),
    "window": Cause(32, "#b0762b", "from position {place} only {keys}", "outside the window"),
    "chunk_size": Cause(
        64, "#8250df", "position {place} and key {key} are in different chunks of {chunk}", "of another chunk"
    ),
    "is_causal": Cause(128, "#6e7781", "key {key} comes after position {place}", "after the query"),
    "bias": Cause(256, "#a0522d", "minus infinity is added", "where it is −∞"),
    "selected_keys": Cause(
        512, "#6f8f1f", "the key is not one of those selected for this query", "that is not selected for the query"
    ),
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

    A term with `visible` needs a `cause`, a row of CAUSES.
    """
    found = load(np.zeros((1, 1, 1, 1), np.int32))
    for term in terms:
        seen = term.visible(tile, load)
        if seen is not None:
            found = found + ~seen * load(np.full(1, CAUSES[term.cause].bit, np.int32))
    return found


def causes(terms: Iterable[ScoreTerm]) -> dict[str, int]:
    """The fields of a request that may hide keys, by its terms, with their bits in `hidden_by`."""
    present = {term.cause for term in terms}
    return {name: cause.bit for name, cause in CAUSES.items() if name in present}


def additions(terms: Iterable[ScoreTerm], tile: Tile, load: Load) -> list[Array]:
    """What terms add to the scores of a tile; each array broadcasts to them."""
    return [added for term in terms if (added := term.added(tile, load)) is not None]
