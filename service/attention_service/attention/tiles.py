"""Cutting attention into tiles: blocks of batch entries, heads and queries that are computed one after the other.

What is returned is the same however it is cut, but for rounding. The size of tiles decides how much memory is used and
how fast products are. How a batch entry is cut depends on this entry alone, so that it has the same bits in any batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Final, NamedTuple

from attention_service.attention.outputs import outputs_of
from attention_service.attention.plan import Plan
from attention_service.attention.score_term import ScoreTerm
from attention_service.attention.tile import Tile

# Tiles are not cut below so many queries just to leave hidden keys out: more tiles are more Python.
BAND_ROWS: Final = 256
# Tiles are not cut below so many queries just to give every worker one, and not at all for a plan of fewer operations:
# waking a worker takes as long as computing some rows.
SHARED_ROWS: Final = 256
SHARED_FLOPS: Final = 10**8
# With at least so many tiles for each worker, it costs little that one worker gets one tile more.
PER_WORKER: Final = 4


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a backend cuts a plan.

    scores: about how many scores a tile has; if `streams`, how many a block of its keys has
    workers: threads that compute tiles at the same time
    streams: True if a tile is computed in blocks of keys, one after the other, which needs no memory for whole rows
    fast_rows: least number of queries in a tile (fewer are slow), unless it would then have more than `max_scores`
    fast_columns: least number of keys in a block
    divide_last_above: in a plan of more scores the row sums divide the outputs, not the weights
    """

    scores: int
    workers: int = 1
    streams: bool = False
    fast_rows: int = 64
    fast_columns: int = 512
    max_scores: int = 2**22
    divide_last_above: int = 2**14


class TileSize(NamedTuple):
    """How many batch entries, key/value heads and queries (rows) a full tile has."""

    batch: int
    kv_heads: int
    rows: int


def tiles(plan: Plan, tiling: Tiling, entries: slice | None = None) -> Iterator[Tile]:
    """The tiles of a plan, or of these batch entries, see `tile_size`.

    Keys that no query of a tile can see, by position, are left out of it, unless their scores are returned.
    """
    (h, g, b, q, *_), step = plan.sizes, tile_size(plan, tiling)
    for batch in _slices(slice(0, b) if entries is None else entries, step.batch):
        for kv_heads in _slices(slice(0, g), step.kv_heads):
            heads = slice(kv_heads.start * h // g, kv_heads.stop * h // g)
            for rows in _slices(slice(0, q), step.rows):
                yield Tile(batch, kv_heads, heads, rows, columns_of(plan, batch, rows))


def whole(plan: Plan) -> Tile:
    """The tile that covers a whole plan."""
    h, g, b, q, k, _, _ = plan.sizes
    return Tile(slice(0, b), slice(0, g), slice(0, h), slice(0, q), slice(0, k))


def whole_entries(plan: Plan, tiling: Tiling, entries: slice) -> Iterator[Tile]:
    """Tiles of whole batch entries, with about `tiling.scores` scores each."""
    for batch in _slices(entries, max(1, tiling.scores // plan.entry_scores)):
        yield replace(whole(plan), batch=batch)


def tile_size(plan: Plan, tiling: Tiling) -> TileSize:
    """The size of the full tiles of a plan; each number is at least 1.

    Over all keys, or if `tiling.streams` over one block of `fast_columns` keys, a tile has about `tiling.scores`
    scores; the numbers of gathered keys and values count as scores. It has more if one query, `fast_rows` queries or
    all heads (to average them) have more, and fewer if workers share the queries, or if keys that no query sees are
    left out. Several entries share a tile only if it then has one block of keys, and the same keys for all of them.
    """
    (h, g, b, q, *_), scores = plan.sizes, tiling.scores
    columns = min(plan.computed_keys, tiling.fast_columns) if tiling.streams else plan.computed_keys
    columns += ceil(plan.gathered_numbers / h)
    one_row = h // g * columns
    fast_rows = tiling.fast_rows if tiling.fast_rows * one_row <= tiling.max_scores else 0
    if plan.gathered is not None:  # each row is a product of its own: more of them are not faster, but less Python
        fast_rows = min(tiling.fast_rows, tiling.max_scores // one_row)
    rows = _clamp(max(scores // one_row, fast_rows), q)
    if tiling.workers > 1 and plan.flops // b > SHARED_FLOPS:
        rows = min(rows, max(SHARED_ROWS, _fair(g, q, rows, tiling.workers)))
    if plan.skips_hidden_keys:  # the fewer queries in a tile, the more keys are hidden from all of them
        rows = min(rows, max(BAND_ROWS, q // 16))
    kv_heads = _clamp(scores // (one_row * rows), g)
    if rows < q:  # these share what hides their keys, if there are enough tiles for all workers without them
        spare = g * ceil(q / rows) // (PER_WORKER * tiling.workers)
        kv_heads = max(1, min(kv_heads, spare)) if plan.skips_hidden_keys else 1
    if plan.selection.average_heads:  # all heads of a query meet in its tile
        kv_heads, rows = g, _clamp(scores // (h * columns), q)
    if kv_heads < g or rows < q or plan.entries_differ:
        return TileSize(1, kv_heads, rows)
    columns = plan.computed_keys + ceil(plan.gathered_numbers / h)
    return TileSize(_clamp(scores // (h * rows * columns), b), kv_heads, rows)


def tile_count(plan: Plan, tiling: Tiling) -> int:
    """The number of tiles of a plan whose entries all have the same numeric path."""
    (_, g, b, q, *_), step = plan.sizes, tile_size(plan, tiling)
    return ceil(b / step.batch) * ceil(g / step.kv_heads) * ceil(q / step.rows)


def key_blocks(tile: Tile, tiling: Tiling) -> Iterator[Tile]:
    """A tile in blocks of keys, each of about `tiling.scores` scores; the tile itself if `tiling` does not stream.

    A tile with several entries has one block, as each of them alone has.
    """
    if not tiling.streams:
        yield tile
        return
    one_column = prod(part.stop - part.start for part in (tile.heads, tile.rows))
    for block in _slices(tile.columns, block_columns(tiling, one_column)):
        yield replace(tile, columns=block)


def backward_tiling(plan: Plan, tiling: Tiling) -> Tiling | None:
    """How the backward pass of a plan is cut into blocks of keys, after a forward pass; None for tiles of whole rows.

    Rows are cut if `fast_rows` of them have as many scores as a tile. Only the gradients of a softmax are known for a
    part of a row, from its output and logsumexp.
    """
    matrices = plan.selection.include & outputs_of("scores", "weights", "gradients")
    if plan.gradients is None or plan.normalization != "softmax" or plan.gathered is not None or matrices:
        return None
    one_row = plan.sizes.num_heads // plan.sizes.num_kv_heads * plan.computed_keys
    return None if tiling.fast_rows * one_row < tiling.scores else replace(tiling, streams=True)


def block_columns(tiling: Tiling, rows: int) -> int:
    """How many keys a block has if the tiling streams. rows: of the tile, those of all its heads"""
    return max(tiling.fast_columns, tiling.scores // rows)


def _fair(groups: int, queries: int, rows: int, workers: int) -> int:
    """The most queries for a tile, up to `rows`, with which workers get equally many tiles. More are faster."""
    pieces = ceil(queries / rows)
    while groups * pieces % workers and groups * pieces < PER_WORKER * workers:
        pieces += 1
    return ceil(queries / pieces)


def _clamp(wanted: int, most: int) -> int:
    return max(1, min(wanted, most))


def _slices(part: slice, step: int) -> Iterator[slice]:
    for start in range(part.start, part.stop, step):
        yield slice(start, min(start + step, part.stop))


def columns_of(plan: Plan, batch: slice, rows: slice) -> slice:
    """The keys that are computed for these queries of these entries."""
    length = plan.computed_keys
    return visible_columns(plan.terms, batch, rows, length) if plan.skips_hidden_keys else slice(0, length)


def visible_columns(terms: Iterable[ScoreTerm], batch: slice, rows: slice, key_length: int) -> slice:
    """The keys that some of these queries may see, in some of these entries.

    At least one, so that every row has a largest score.
    """
    seen = slice(0, key_length)
    for term in terms:
        seen = term.columns(batch, rows, seen)
    start = max(0, min(seen.start, key_length - 1))
    return slice(start, max(min(seen.stop, key_length), start + 1))
