"""How many queries, heads and batch entries a tile has, by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from attention_service.attention.planning import make_plan
from attention_service.attention.spec import AttentionSpec
from attention_service.attention.tiles import Tiling, tile_size, whole


def size(b: int, h: int, g: int, l: int, tiling: Tiling, **options: Any) -> tuple[int, int, int]:  # noqa: E741
    """The tile of a request with as many queries as keys, of one feature."""
    arrays: dict[str, Any] = {
        "query": np.zeros((b, h, l, 1)),
        "key": np.zeros((b, g, l, 1)),
        "value": np.zeros((b, g, l, 1)),
    }
    return tile_size(make_plan(AttentionSpec(**arrays, layout="bhld", **options)), tiling)


@pytest.mark.parametrize(
    ("sizes", "scores", "expected"),
    [
        ((3, 4, 2, 100), 2 * 4 * 10_000, (2, 2, 100)),  # two batch entries of four heads of 10,000 scores each
        ((3, 4, 2, 100), 4 * 10_000 - 1, (1, 1, 100)),  # one group of two heads
        ((3, 4, 2, 100), 2 * 10_000 - 1, (1, 1, 99)),
        ((3, 4, 2, 100), 1, (1, 1, 64)),  # as fewer queries are slow
    ],
)
def test_a_tile_has_about_so_many_scores(
    sizes: tuple[int, int, int, int], scores: int, expected: tuple[int, int, int]
) -> None:
    assert size(*sizes, Tiling(scores)) == expected
    assert size(*sizes, Tiling(scores, max_scores=1)) == (expected if scores > 1 else (1, 1, 1))


@pytest.mark.parametrize(("most", "rows"), [(2**22, 64), (30, 10), (29, 9)])
def test_gathered_keys_and_values_count_as_scores(most: int, rows: int) -> None:
    """Each query has one score, one number of a key and one of a value."""
    selected = np.arange(100)[:, None]
    assert size(1, 1, 1, 100, Tiling(1, max_scores=most), selected_keys=selected, include=()) == (1, 1, rows)


def test_all_heads_of_a_query_are_averaged_in_its_tile() -> None:
    assert size(3, 4, 2, 100, Tiling(4 * 100 * 7), average_heads=True) == (1, 2, 7)


@pytest.mark.parametrize(
    ("queries", "workers", "rows"),
    [
        (6000, 2, 3000),  # a tile each
        (6000, 3, 2000),
        (9001, 2, 4501),
        (6000, 40, 256),  # but no fewer queries
    ],
)
def test_workers_share_the_queries(queries: int, workers: int, rows: int) -> None:
    """Of more than 10**8 operations; a single worker computes all queries at once."""
    assert size(1, 1, 1, queries, Tiling(2**40, workers)) == (1, 1, rows)
    assert size(1, 1, 1, queries, Tiling(2**40)) == (1, 1, queries)
    assert size(1, 1, 1, 1000, Tiling(2**40, workers)) == (1, 1, 1000)


def test_hidden_keys_are_left_out_of_a_sixteenth_of_the_queries() -> None:
    assert size(1, 1, 1, 8000, Tiling(2**40), is_causal=True) == (1, 1, 500)
    assert size(1, 1, 1, 3000, Tiling(2**40), is_causal=True) == (1, 1, 256)


@pytest.mark.parametrize(
    ("sizes", "scores", "workers", "expected"),
    [
        ((1, 8, 8, 1024), 2**19, 2, (1, 2, 256)),  # 16 tiles of two heads, of 256 · 1024 scores each
        ((3, 8, 8, 1024), 2**19, 2, (1, 2, 256)),  # as each entry alone
        ((1, 16, 8, 1024), 2**20, 2, (1, 2, 256)),  # of four heads, two for each of two groups
        ((1, 8, 8, 1024), 2**19, 8, (1, 1, 256)),  # 32 tiles are no more than four for each worker
        ((1, 2, 2, 1024), 2**19, 1, (1, 2, 256)),
        ((1, 1, 1, 1024), 2**19, 1, (1, 1, 256)),
    ],
)
def test_heads_share_what_hides_their_keys_while_there_are_tiles_for_all_workers(
    sizes: tuple[int, int, int, int], scores: int, workers: int, expected: tuple[int, int, int]
) -> None:
    assert size(*sizes, Tiling(scores, workers), is_causal=True) == expected


def test_the_whole_of_a_plan_is_a_tile() -> None:
    arrays: dict[str, Any] = {
        "query": np.zeros((3, 4, 5, 1)),
        "key": np.zeros((3, 2, 6, 1)),
        "value": np.zeros((3, 2, 6, 1)),
    }
    found = whole(make_plan(AttentionSpec(**arrays, layout="bhld", query_offset=np.array(0))))
    parts = (found.batch, found.kv_heads, found.heads, found.rows, found.columns)
    assert parts == (slice(0, 3), slice(0, 2), slice(0, 4), slice(0, 5), slice(0, 6))
