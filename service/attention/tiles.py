"""How the scores (b, h, q, k) are cut into tiles that are computed one at a time, or several at once by threads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

from service.attention.roles import Sizes

if TYPE_CHECKING:
    from service.attention.plan import Plan

# Products of fewer rows than this are slow, so a tile of a long key may be larger than asked for: up to so many scores.
FAST_ROWS = 64
LARGEST_TILE = 2**22
# Keys of a tile that are computed at a time where nothing of their scores is kept.
FAST_COLUMNS = 512
# The lowest tile that is made to leave hidden keys out. More tiles are more Python, which one thread runs at a time.
BAND_ROWS = 256
# The lowest tile that is made to occupy all workers, and the operations above which they are shared at all: waking a
# worker takes as long as computing some rows.
SHARED_ROWS = 256
SHARED_FLOPS = 10**8
# Tiles for each worker from which on it does not matter that one has one more.
PER_WORKER = 4


@dataclass(frozen=True, slots=True)
class Tile:
    """Some batch entries, key/value heads with their query heads, queries, and the keys that these can see at all."""

    batch: slice
    kv_heads: slice
    heads: slice
    rows: slice
    columns: slice


@dataclass(frozen=True, slots=True)
class Cut:
    """How to cut.

    scores: of a tile, about; or of what is computed of it at a time, if it streams
    workers: threads that share the tiles
    streams: whether a tile is computed part by part, its keys one after the other
    """

    scores: int
    workers: int
    streams: bool


class Steps(NamedTuple):
    """How many batch entries, key/value heads and queries the largest tiles have."""

    batch: int
    kv_heads: int
    rows: int


def tiles(plan: Plan, cut: Cut) -> Iterator[Tile]:
    """Tiles of about so many scores, or of one query over one group of heads if that is more.

    Keys that nobody in a tile can see, for where they stand, are left out of it, unless their scores are returned.
    """
    sizes, step = plan.sizes, steps(plan, cut)
    group = sizes.num_heads // sizes.num_kv_heads
    for b in _cut(sizes.batch_size, step.batch):
        for g in _cut(sizes.num_kv_heads, step.kv_heads):
            for r in _cut(sizes.query_length, step.rows):
                seen = _columns(plan, r)
                yield Tile(b, g, slice(g.start * group, g.stop * group), r, seen)


def steps(plan: Plan, cut: Cut) -> Steps:
    """The size of tiles of about so many scores."""
    sizes, scores = plan.sizes, cut.scores
    group = sizes.num_heads // sizes.num_kv_heads
    columns = min(sizes.key_length, FAST_COLUMNS) if cut.streams else sizes.key_length
    one_row = group * columns
    rows = _fit(max(scores // one_row, FAST_ROWS * (FAST_ROWS * one_row <= LARGEST_TILE)), sizes.query_length)
    if cut.workers > 1 and plan.flops > SHARED_FLOPS:
        rows = min(rows, max(SHARED_ROWS, _fair(sizes, rows, cut.workers)))
    if plan.visibility.band is not None and plan.skips_hidden:  # the lower a tile, the more of it is left out
        rows = min(rows, max(BAND_ROWS, sizes.query_length // 16))
    kv_heads = _fit(scores // (group * rows * columns), sizes.num_kv_heads)
    if rows < sizes.query_length:
        kv_heads = 1
    if plan.selection.average_heads:  # all heads of a query meet in its tile
        kv_heads = sizes.num_kv_heads
        rows = _fit(scores // (sizes.num_heads * columns), sizes.query_length)
    whole = kv_heads == sizes.num_kv_heads and rows == sizes.query_length
    batch = _fit(scores // (sizes.num_heads * rows * columns), sizes.batch_size) if whole else 1
    return Steps(batch, kv_heads, rows)


def _fair(sizes: Sizes, rows: int, workers: int) -> int:
    """The height of the highest tiles, none above `rows`, that workers can share evenly: the higher, the faster."""
    pieces = ceil(sizes.query_length / rows)
    groups = sizes.batch_size * sizes.num_kv_heads
    while groups * pieces % workers and groups * pieces < PER_WORKER * workers:
        pieces += 1
    return ceil(sizes.query_length / pieces)


def _fit(wanted: int, most: int) -> int:
    return max(1, min(wanted, most))


def _cut(length: int, step: int) -> Iterator[slice]:
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def parts(tile: Tile, cut: Cut) -> Iterator[Tile]:
    """A tile in parts of about `cut.scores`, its keys one after the other."""
    one_column = (tile.batch.stop - tile.batch.start) * (tile.heads.stop - tile.heads.start)
    one_column *= tile.rows.stop - tile.rows.start
    step = max(FAST_COLUMNS, cut.scores // one_column)
    for part in _cut(tile.columns.stop - tile.columns.start, step):
        start = tile.columns.start
        yield replace(tile, columns=slice(start + part.start, start + part.stop))


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
