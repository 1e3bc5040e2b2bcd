"""Mistakes of masks by position: causal, sliding window, chunks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np

from attention_service.attention.array_functions import Array
from attention_service.attention.score_term import Load, ScoreTerm
from attention_service.attention.spec import Window
from attention_service.attention.terms.positions import Causal, Chunks, SlidingWindow
from attention_service.attention.tile import Tile, part_of
from attention_service.comparison.case import TILES, Case
from attention_service.comparison.mutants.table import absent, mutant

# Rows that a thread or a matrix instruction has.
GROUPS: Final = (4, 8)


@dataclass(frozen=True, slots=True)
class _Edges(ScoreTerm):
    """The causal mask of a mistake: a query sees the keys up to `last`, (b or 1, h or 1, q, 1)."""

    last: np.ndarray
    reads_offset: ClassVar[bool] = True

    def visible(self, tile: Tile, load: Load) -> Array | None:
        seen: Array = load(tile.keys) <= load(part_of(self.last, tile))
        return seen


@dataclass(frozen=True, slots=True)
class _InRows(ScoreTerm):
    """A term that is applied in all rows but those of a slice."""

    term: ScoreTerm
    left_out: slice
    reads_offset: ClassVar[bool] = True

    def visible(self, tile: Tile, load: Load) -> Array | None:
        rows = np.arange(tile.rows.start, tile.rows.stop)[:, None]
        seen = self.term.visible(tile, load)
        return None if seen is None else seen | load((self.left_out.start <= rows) & (rows < self.left_out.stop))


def _offset(case: Case, offset: np.ndarray, kind: type) -> Mapping[str, Any] | None:
    """How a request says another offset; None if other terms read it, too."""
    if any(term.reads_offset for term in case.terms if type(term) is not kind):
        return None
    return {"query_offset": offset.tolist() if len(offset) > 1 else int(offset[0])}


def causal_at(case: Case, offset: int | np.ndarray, detail: str = "") -> Iterator[Case]:
    """The case with another offset of its causal mask. detail: see Case"""
    if case.term(Causal) is None or case.offset is None:
        return
    moved, right = np.broadcast_arrays(offset, case.offset)
    if not np.array_equal(moved, right):
        yield case.with_term(Causal(high=_clipped(case, moved)), _offset(case, moved, Causal), detail=detail)


absent("causal.absent", "The causal mask is not applied.", Causal, {"is_causal": False})


@mutant("causal.added", "A causal mask is applied that was not asked for.")
def causal_added(case: Case) -> Iterator[Case]:
    sizes = case.plan.sizes
    if case.term(Causal):
        return
    if case.offset is not None:
        yield case.with_term(Causal(high=_clipped(case, case.offset)), {"is_causal": True})
    else:
        for offset in (0, sizes.key_length - sizes.query_length):
            change = {"is_causal": True, "query_offset": offset}
            yield case.with_term(Causal(high=np.array([offset])), change)


@mutant("causal.strict", "A query does not see the key at its own position: j < i.")
def causal_strict(case: Case) -> Iterator[Case]:
    if case.offset is not None:
        yield from causal_at(case, case.offset - 1)


@mutant("causal.top_left", "The causal mask aligns the first query with the first key.")
def causal_top_left(case: Case) -> Iterator[Case]:
    return causal_at(case, 0)


@mutant("causal.bottom_right", "The causal mask aligns the last query with the last key.")
def causal_bottom_right(case: Case) -> Iterator[Case]:
    queries, keys, spec = case.plan.sizes.query_length, case.plan.sizes.key_length, case.spec
    if spec.query_lengths is None and spec.key_lengths is None:
        yield from causal_at(case, keys - queries)
        return
    own = (keys if spec.key_lengths is None else spec.key_lengths) - (
        queries if spec.query_lengths is None else spec.query_lengths
    )
    yield from causal_at(case, own)
    yield from causal_at(case, keys - queries, f"of the padded batch, {queries} queries and {keys} keys")


@mutant("causal.offset_plus_one", "A query sees the key after its own position.")
def causal_offset_plus_one(case: Case) -> Iterator[Case]:
    if case.offset is not None:
        yield from causal_at(case, case.offset + 1)


@mutant("causal.first_offset", "All batch entries have the offset of the first.")
def causal_first_offset(case: Case) -> Iterator[Case]:
    if case.offset is not None:
        yield from causal_at(case, case.offset[0])


def _edges(case: Case, right: np.ndarray, last: np.ndarray, detail: str) -> Iterator[Case]:
    """The case whose queries see the keys up to others than the right ones, (b or 1, h or 1, q) each."""
    seen, right = (np.clip(edges, -1, case.plan.sizes.key_length - 1) for edges in (last, right))
    if (seen != right).any():
        yield case.without(Causal, detail=detail).with_term(_Edges(seen[..., None]))


@mutant("causal.by_tile", "The causal mask treats the tile of keys on the diagonal as a whole.")
def causal_by_tile(case: Case) -> Iterator[Case]:
    if case.term(Causal) and case.offset is not None:
        rows, start = np.arange(case.plan.sizes.query_length), case.offset[:, None, None]
        for tile in (tile for tile in (*GROUPS, *TILES) if tile < case.plan.sizes.key_length):
            # Tiles begin at the first key; small ones, of the rows that a thread has, at the first row.
            ends = {"keys": (rows + start) // tile * tile}
            if tile in GROUPS and (start % tile).any():
                ends["rows"] = rows // tile * tile + start
            for what, first in ends.items():
                yield from _edges(case, rows + start, first + tile - 1, f"of {tile} {what}, visible")
                yield from _edges(case, rows + start, first - 1, f"of {tile} {what}, hidden")


@mutant("causal.last_row", "The last query sees every key.")
def causal_last_row(case: Case) -> Iterator[Case]:
    if case.term(Causal) and case.offset is not None:
        right = np.arange(case.plan.sizes.query_length) + case.offset[:, None, None]
        last = right.copy()
        last[..., -1] = case.plan.sizes.key_length - 1
        yield from _edges(case, right, last, "")


@mutant("causal.packed_group", "The heads of a group are packed into rows, which the causal mask takes for queries.")
def causal_packed_group(case: Case) -> Iterator[Case]:
    sizes = case.plan.sizes
    size = sizes.num_heads // sizes.num_kv_heads
    if case.term(Causal) and case.offset is not None and size > 1:
        rows, start = np.arange(sizes.query_length), case.offset[:, None, None]
        member = np.arange(sizes.num_heads)[:, None] % size
        told = {"of queries, then heads": rows * size + member, "of heads, then queries": rows + member * len(rows)}
        for detail, row in (told | {"of one head, divided as if of all": rows // size}).items():
            yield from _edges(case, rows + start, row + start, f"rows {detail}")


def _window(case: Case, left: int, right: int) -> Iterator[Case]:
    """The case with each bounded side of its window changed by so many keys."""
    window, offset = case.spec.window, case.offset
    if case.term(SlidingWindow) is None or window is None or offset is None:
        return
    if (left and window.left is None) or (right and window.right is None):
        return
    if right and _is_covered(case, window, right):
        return
    sides = Window(
        None if window.left is None else window.left + left, None if window.right is None else window.right + right
    )
    named = {"left": sides.left, "right": sides.right}
    change = {"window": {side: width for side, width in named.items() if width is not None}}
    legal = all(width is None or width >= 0 for width in named.values())
    yield case.with_term(_band(case, sides, offset), change if legal else None)


def _band(case: Case, window: Window, offset: np.ndarray) -> SlidingWindow:
    low = None if window.left is None else _clipped(case, offset, -window.left)
    return SlidingWindow(low, None if window.right is None else _clipped(case, offset, window.right))


def _clipped(case: Case, offset: np.ndarray, shift: int = 0) -> np.ndarray:
    """offset + shift, no further out than where all or nothing is visible, so that nothing overflows."""
    sizes = case.plan.sizes
    return np.array([max(-sizes.query_length, min(sizes.key_length, int(x) + shift)) for x in offset])


def _is_covered(case: Case, window: Window, right: int) -> bool:
    """True if the causal mask hides all that another right side of the window would show or hide."""
    return case.term(Causal) is not None and window.right is not None and window.right + min(right, 0) >= 0


absent("window.absent", "The window is not applied.", SlidingWindow, {"window": None})


@mutant("window.left_plus_one", "The window reaches one key further to the left.")
def window_left_plus_one(case: Case) -> Iterator[Case]:
    return _window(case, 1, 0)


@mutant("window.left_minus_one", "The window ends one key too early on the left.")
def window_left_minus_one(case: Case) -> Iterator[Case]:
    return _window(case, -1, 0)


@mutant("window.right_plus_one", "The window reaches one key further to the right.")
def window_right_plus_one(case: Case) -> Iterator[Case]:
    return _window(case, 0, 1)


@mutant("window.right_minus_one", "The window ends one key too early on the right.")
def window_right_minus_one(case: Case) -> Iterator[Case]:
    return _window(case, 0, -1)


@mutant("window.one_sided", "The right side of the window is ignored.")
def window_one_sided(case: Case) -> Iterator[Case]:
    window = case.spec.window
    if case.term(SlidingWindow) and window and window.right is not None and case.offset is not None:
        if _is_covered(case, window, 1):
            return
        if window.left is None:
            yield case.without(SlidingWindow, change={"window": None})
        else:
            yield case.with_term(_band(case, Window(window.left), case.offset), {"window": {"left": window.left}})


@mutant("window.missing_rows", "The window is not applied in the rows of some tiles.")
def window_missing_rows(case: Case) -> Iterator[Case]:
    term, window, queries = case.term(SlidingWindow), case.spec.window, case.plan.sizes.query_length
    if term is None or window is None or case.offset is None:
        return
    low, high = int(case.offset.min()), int(case.offset.max())
    for tile in TILES:
        last = (queries - 1) // tile * tile
        parts = {(last, queries): "in the last", (tile, queries): "after the first", (0, tile): "in the first"}
        for (start, stop), detail in parts.items() if tile < queries else ():
            hides = window.right is not None and start + low + window.right < case.plan.sizes.key_length - 1
            hides = hides and not _is_covered(case, window, 1)
            if hides or (window.left is not None and stop - 1 + high > window.left):
                missing = case.without(SlidingWindow, detail=f"{detail} tile of {tile} rows")
                yield missing.with_term(_InRows(term, slice(start, stop)))


@mutant("window.offset_ignored", "The window leaves out the offset of the queries.")
def window_offset_ignored(case: Case) -> Iterator[Case]:
    window, offset = case.spec.window, case.offset
    if case.term(SlidingWindow) and window and offset is not None and offset.any():
        nowhere = np.zeros_like(offset)
        yield case.with_term(_band(case, window, nowhere), _offset(case, nowhere, SlidingWindow))


absent("chunk.absent", "The chunks are not applied.", Chunks, {"chunk_size": None})


@mutant("chunk.no_offset", "The chunks leave out the offset of the queries.")
def chunk_no_offset(case: Case) -> Iterator[Case]:
    chunks = case.term(Chunks)
    if chunks and chunks.offset.any():
        nowhere = np.zeros_like(chunks.offset)
        yield case.with_term(Chunks(chunks.size, nowhere), _offset(case, nowhere, Chunks))
