"""The table of mutants: known mistakes of attention kernels, each a function from a case to changed ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from attention_service.attention.score_term import ScoreTerm
from attention_service.comparison.case import Case

# From a case to the wrong ones that this mistake makes of it, best known first; none where it changes no meaning.
Edit = Callable[[Case], Iterator[Case]]
# Tiles of keys that are tried.
TILES: Final = (16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class Mutant:
    """A row of the table.

    name:    stable, part of the contract: group.mistake
    message: what the kernel did, as one sentence
    needs:   the array of the answer that alone shows it; None if the output does
    survives: tells by the number of keys if the mistake changes nothing for a usual tile; None if it has no tiles
    """

    name: str
    message: str
    edit: Edit
    needs: str | None = None
    survives: Callable[[int], bool] | None = None

    @property
    def group(self) -> str:
        """The part of the name before the dot."""
        return self.name.partition(".")[0]


MUTANTS: Final[dict[str, Mutant]] = {}


def mutant(
    name: str, message: str, *, needs: str | None = None, survives: Callable[[int], bool] | None = None
) -> Callable[[Edit], Edit]:
    """Put a function into the table, as the mutant of this name. needs, survives: see Mutant"""

    def add(edit: Edit) -> Edit:
        assert name not in MUTANTS
        MUTANTS[name] = Mutant(name, message, edit, needs, survives)
        return edit

    return add


def absent(name: str, message: str, term: type[ScoreTerm], change: Mapping[str, Any]) -> None:
    """Put the mistake into the table that a term is left out. change: what a request says then"""

    @mutant(name, message)
    def leave_out(case: Case) -> Iterator[Case]:
        if case.term(term):
            yield case.without(term, change=change)


def tiles(case: Case) -> Iterator[int]:
    """The sizes of tiles that cut the keys of a case; the smallest one in any case, as kernels have it all the same."""
    return (tile for tile in TILES if tile < max(case.plan.sizes.key_length, TILES[0] + 1))


def is_one_tile(keys: int) -> bool:
    """True if so many keys do not fill the largest of the tiles twice: a kernel with that tile may show no mistake."""
    return keys < 2 * TILES[-1]


def has_no_tail(keys: int) -> bool:
    """True if one of the tiles divides so many keys."""
    return keys % TILES[0] == 0
