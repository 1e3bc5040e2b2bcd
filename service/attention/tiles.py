"""How the scores (b, h, q, k) are cut into tiles that are computed one at a time, or several at once by threads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from service.attention.plan import Plan

# Products of fewer rows than this are slow, so a tile of a long key may be larger than asked for: up to so many scores.
FAST_ROWS = 64
LARGEST_TILE = 2**22


@dataclass(frozen=True, slots=True)
class Tile:
    """Some batch entries, key/value heads with their query heads, queries, and the keys that these can see at all."""

    batch: slice
    kv_heads: slice
    heads: slice
    rows: slice
    columns: slice


def tiles(plan: Plan, scores: int) -> Iterator[Tile]:
    """Tiles of about so many scores, or of one query over one group of heads if that is more.

    Keys that nobody in a tile can see, for where they stand, are left out of it, unless their scores are returned.
    """
    sizes = plan.sizes
    group = sizes.num_heads // sizes.num_kv_heads
    one_row = group * sizes.key_length
    rows = _fit(max(scores // one_row, FAST_ROWS * (FAST_ROWS * one_row <= LARGEST_TILE)), sizes.query_length)
    if plan.visibility.band is not None and plan.skips_hidden:  # the lower a tile, the more of it is left out
        rows = min(rows, max(FAST_ROWS, sizes.query_length // 8))
    kv_heads = _fit(scores // (group * rows * sizes.key_length), sizes.num_kv_heads)
    if rows < sizes.query_length:
        kv_heads = 1
    if plan.selection.average_heads:  # all heads of a query meet in its tile
        kv_heads = sizes.num_kv_heads
        rows = _fit(scores // (sizes.num_heads * sizes.key_length), sizes.query_length)
    whole = kv_heads == sizes.num_kv_heads and rows == sizes.query_length
    batch = _fit(scores // (sizes.num_heads * rows * sizes.key_length), sizes.batch_size) if whole else 1
    for b in _cut(sizes.batch_size, batch):
        for g in _cut(sizes.num_kv_heads, kv_heads):
            for r in _cut(sizes.query_length, rows):
                columns = _columns(plan, r)
                yield Tile(b, g, slice(g.start * group, g.stop * group), r, columns)


def _fit(wanted: int, most: int) -> int:
    return max(1, min(wanted, most))


def _cut(length: int, step: int) -> Iterator[slice]:
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def _columns(plan: Plan, rows: slice) -> slice:
    """The keys that some of these queries may see. At least one, so that every row has a largest score."""
    start, stop = 0, plan.sizes.key_length
    band = plan.visibility.band
    if band is not None and plan.skips_hidden:
        if band.low is not None:
            start = max(start, rows.start + int(band.low.min()))
        if band.high is not None:
            stop = min(stop, rows.stop + int(band.high.max()))
        start = min(start, plan.sizes.key_length - 1)
        stop = max(stop, start + 1)
    return slice(start, stop)
