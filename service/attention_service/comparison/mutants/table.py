"""The table of mutants: known mistakes of attention kernels, each a function from a case to changed ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

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
    """

    name: str
    message: str
    edit: Edit
    needs: str | None = None

    @property
    def group(self) -> str:
        """The part of the name before the dot."""
        return self.name.partition(".")[0]


MUTANTS: Final[dict[str, Mutant]] = {}


def mutant(name: str, message: str, *, needs: str | None = None) -> Callable[[Edit], Edit]:
    """Put a function into the table, as the mutant of this name."""

    def add(edit: Edit) -> Edit:
        assert name not in MUTANTS
        MUTANTS[name] = Mutant(name, message, edit, needs)
        return edit

    return add


def tiles(case: Case) -> Iterator[int]:
    """The sizes of tiles that cut the keys of a case."""
    return (tile for tile in TILES if tile < case.plan.sizes.key_length)
