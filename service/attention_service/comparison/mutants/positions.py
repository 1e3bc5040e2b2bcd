"""Mistakes of masks by position: causal, sliding window, chunks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from attention_service.attention.spec import Window
from attention_service.attention.terms.positions import Causal, Chunks, SlidingWindow
from attention_service.comparison.case import Case
from attention_service.comparison.mutants.table import absent, mutant


def _offset(case: Case, offset: np.ndarray, kind: type) -> Mapping[str, Any] | None:
    """How a request says another offset; None if other terms read it, too."""
    if any(term.reads_offset for term in case.terms if type(term) is not kind):
        return None
    return {"query_offset": offset.tolist() if len(offset) > 1 else int(offset[0])}


def _causal(case: Case, offset: int | np.ndarray) -> Iterator[Case]:
    """The case with another offset of its causal mask."""
    if case.term(Causal) is None or case.offset is None:
        return
    moved = np.broadcast_to(offset, case.offset.shape)
    if not np.array_equal(moved, case.offset):
        yield case.with_term(Causal(high=_clipped(case, moved)), _offset(case, moved, Causal))


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
        yield from _causal(case, case.offset - 1)


@mutant("causal.top_left", "The causal mask aligns the first query with the first key.")
def causal_top_left(case: Case) -> Iterator[Case]:
    return _causal(case, 0)


@mutant("causal.bottom_right", "The causal mask aligns the last query with the last key.")
def causal_bottom_right(case: Case) -> Iterator[Case]:
    return _causal(case, case.plan.sizes.key_length - case.plan.sizes.query_length)


@mutant("causal.offset_plus_one", "A query sees the key after its own position.")
def causal_offset_plus_one(case: Case) -> Iterator[Case]:
    if case.offset is not None:
        yield from _causal(case, case.offset + 1)


@mutant("causal.first_offset", "All batch entries have the offset of the first.")
def causal_first_offset(case: Case) -> Iterator[Case]:
    if case.offset is not None:
        yield from _causal(case, case.offset[0])


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
