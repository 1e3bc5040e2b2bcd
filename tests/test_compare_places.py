"""Where an output is wrong, and the order of what may explain it, by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from attention_service.comparison.candidates import Candidate
from attention_service.comparison.evidence import Hypothesis
from attention_service.comparison.places import places, worst


def messages(rows: list[int], length: int) -> list[str]:
    """What is said of rows that are wrong by 2 where 1 is allowed, in both of two columns."""
    expected = np.zeros((length, 2))
    actual = expected.copy()
    actual[rows] = 2
    return [place.message for place in places(actual, expected, 1, ("row", "feature"))]


@pytest.mark.parametrize("tile", [16, 32, 64, 128, 256])
def test_the_tail_of_the_largest_tile_is_named(tile: int) -> None:
    for count in (2, tile - 1):
        assert messages(list(range(tile, tile + count)), tile + count)[1:] == [
            f"rows {tile} to {tile + count - 1} only: the tail of a tile of {tile}"
        ]
    assert messages([tile, tile + 1], tile + 3)[1:] == [f"rows {tile} to {tile + 1} only"], "no end of the rows"
    assert "tail" not in messages([tile + 1, tile + 2], tile + 3)[1]


def test_wrong_indices_are_said_in_the_shortest_way() -> None:
    assert messages([3], 8) == ["2 of 16 elements (12.5%) are wrong", "row 3 only"]
    assert messages([1, 3, 5], 8)[1:] == ["rows 1 to 5 only in steps of 2"]
    assert messages([0, 1, 5], 8)[1:] == ["rows 0, 1, 5 only"]
    assert messages(list(range(8)), 8) == ["16 of 16 elements (100.0%) are wrong"]
    rows = [*range(16), 20, 30]
    assert messages(rows, 40)[1:] == [f"rows {', '.join(map(str, range(16)))} and 2 more only"]
    assert places(np.ones((2, 2)), np.zeros((2, 2)), 1, ("row", "feature")) == []


def test_the_worst_elements_come_first() -> None:
    found = worst(np.array([[1.0, -5, 2], [0, 3, 1.5]]), np.zeros((2, 3)))
    assert [(one.index, one.actual, one.reference) for one in found] == [
        ([0, 1], -5, 0),
        ([1, 1], 3, 0),
        ([0, 2], 2, 0),
    ]
    assert len(worst(np.array([0.0, 1]), np.zeros(2))) == 1


def test_the_order_of_hypotheses() -> None:
    """Proofs; what is told; fewer mistakes; what explains almost all, rounding, the rest; the larger share."""
    case: Any = None

    def hypothesis(*names: str, explained: float, ratio: float = 100.0, is_proof: bool = False) -> Hypothesis:
        return Hypothesis(Candidate(names, case, {}), explained, ratio, is_proof)

    ordered = [
        hypothesis("two", "mistakes", explained=0.7, is_proof=True),
        hypothesis("nearly", explained=0.98),
        hypothesis("all", explained=0.9),
        hypothesis("small", explained=0.3, ratio=2.0),
        hypothesis("precision.scores", explained=0.8),
        hypothesis("much", explained=0.85),
        hypothesis("half", explained=0.5),
        hypothesis("more", "mistakes", explained=0.99),
        hypothesis("close, but no better", explained=0.0, ratio=1.0),
        hypothesis("little", explained=0.49),
    ]
    turned = ordered[::-1]
    assert sorted(turned, key=lambda one: one.rank) == ordered
