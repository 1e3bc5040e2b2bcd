"""The table of mutants: known mistakes of attention kernels, each a function from a case to changed ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from attention_service.attention.score_term import ScoreTerm
from attention_service.comparison.case import Case

# From a case to the wrong ones that this mistake makes of it, best known first; none where it changes no meaning.
Edit = Callable[[Case], Iterator[Case]]
# Numbers of parts that are tried into which keys are split.
SPLITS: Final = (2, 4, 8)


@dataclass(frozen=True, slots=True)
class Mutant:
    """A row of the table.

    name:    stable, part of the contract: group.mistake
    message: what the kernel did, as one sentence
    needs:   the array of the answer that alone shows it; None if the output does
    by_tile: True for a mistake of tiles of keys, whose cases have a `tile`
    """

    name: str
    message: str
    edit: Edit
    needs: str | None = None
    by_tile: bool = False

    @property
    def group(self) -> str:
        """The part of the name before the dot."""
        return self.name.partition(".")[0]


# Keys of a part that kernels of one query compute by itself: mistakes are looked for, but need not be shown.
SPLIT: Final = 512
MUTANTS: Final[dict[str, Mutant]] = {}
# The terms that a mistake with a name of its own leaves out.
LEFT_OUT: Final[set[type[ScoreTerm]]] = set()


def mutant(name: str, message: str, *, needs: str | None = None, by_tile: bool = False) -> Callable[[Edit], Edit]:
    """Put a function into the table, as the mutant of this name. needs, by_tile: see Mutant"""

    def add(edit: Edit) -> Edit:
        assert name not in MUTANTS
        MUTANTS[name] = Mutant(name, message, edit, needs, by_tile)
        return edit

    return add


def absent(name: str, message: str, term: type[ScoreTerm], change: Mapping[str, Any]) -> None:
    """Put the mistake into the table that a term is left out. change: what a request says then"""
    LEFT_OUT.add(term)

    @mutant(name, message)
    def leave_out(case: Case) -> Iterator[Case]:
        if case.term(term):
            yield case.without(term, change=change)


def tiles(case: Case) -> Iterator[int]:
    """The sizes of tiles that cut the keys of a case, and of a split; the smallest one in any case, as kernels have it
    all the same."""
    sizes = (*case.tiles, SPLIT) if SPLIT not in case.tiles else case.tiles
    return (tile for tile in sizes if tile < max(case.plan.sizes.key_length, case.tiles[0] + 1))
