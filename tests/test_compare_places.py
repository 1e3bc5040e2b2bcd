"""Where an output is wrong, and the order of what may explain it, by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from attention_service.comparison.engine.candidate import Candidate
from attention_service.comparison.engine.hypothesis import Hypothesis
from attention_service.comparison.places import places, worst


def messages(rows: list[int], length: int) -> list[str]:
    """What is said of rows that are wrong by 2 where 1 is allowed, in both of two columns."""
    expected = np.zeros((length, 2))
    actual = expected.copy()
    actual[rows] = 2
    return [place.message for place in places("output", actual, expected, 1, ("row", "feature"))]


@pytest.mark.parametrize("tile", [16, 32, 64, 128, 256])
def test_the_tail_of_the_largest_tile_is_named(tile: int) -> None:
    for count in (2, tile - 1):
        assert messages(list(range(tile, tile + count)), tile + count)[1:] == [
            f"rows {tile} to {tile + count - 1} only: the tail of a tile of {tile}"
        ]
    assert messages([tile, tile + 1], tile + 3)[1:] == [f"rows {tile} to {tile + 1} only"], "no end of the rows"
    assert "tail" not in messages([tile + 1, tile + 2], tile + 3)[1]


def test_wrong_indices_are_said_in_the_shortest_way() -> None:
    assert messages([3], 8) == ["2 of 16 elements of the output (12.5%) are wrong", "row 3 only"]
    assert messages([1, 3, 5], 8)[1:] == ["rows 1 to 5 only in steps of 2"]
    assert messages([0, 1, 5], 8)[1:] == ["rows 0 to 1 and 5 only"]
    assert messages(list(range(8)), 8) == ["16 of 16 elements of the output (100.0%) are wrong"]
    assert messages([*range(16), 20, 30], 40)[1:] == ["rows 0 to 15, 20 and 30 only"]
    assert messages([1, 4, 6, 9, 13], 40)[1:] == ["rows 1, 4, 6, 9 and 13 only"]
    assert places("output", np.ones((2, 2)), np.zeros((2, 2)), 1, ("row", "feature")) == []


@pytest.mark.parametrize(
    ("residues", "modulus", "words"),
    [([1], 4, "1"), ([0], 2, "0"), ([1, 2, 5], 8, "1 to 2 or 5"), (list(range(32, 64)), 64, "32 to 63")],
)
def test_wrong_indices_are_said_by_what_a_division_leaves(residues: list[int], modulus: int, words: str) -> None:
    for length in (4 * modulus, 4 * modulus + 3):
        rows = [row for row in range(length) if row % modulus in residues]
        assert messages(rows, length)[1:] == [f"rows whose index mod {modulus} is {words} only"]
        assert "mod" not in messages(rows[:-1], length)[1], "not all of them"


def test_many_wrong_indices_without_order_are_said_by_their_share() -> None:
    rows = np.random.default_rng(0).choice(np.arange(128, 256), 78, replace=False)
    expected, actual = np.zeros((300, 1)), np.zeros((300, 1))
    actual[[128, 255, *rows]] = 2
    count = int(actual.sum()) // 2
    [place] = places("output", actual, expected, 1, ("row", "feature"))[1:]
    assert place.message == f"rows 128 to 255 only, {count} of these 128 ({count * 100 // 128}%)"
    assert (place.start, place.stop, place.share) == (128, 256, count / 128)
    assert place.indices == np.flatnonzero(actual)[:16].tolist()


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
        return Hypothesis(Candidate(names, case, {}, ""), explained, ratio, is_proof)

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
