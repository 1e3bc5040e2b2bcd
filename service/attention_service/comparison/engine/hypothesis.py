"""Hypotheses: how well mistakes explain what was sent, and their order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from attention_service.comparison.engine.candidate import Candidate
from attention_service.comparison.rules import CORRECT

# Hypotheses below this share of the error explained are not told.
LEAST: Final = 0.5
ALMOST: Final = 0.9


@dataclass(frozen=True)
class Hypothesis:
    """A mistake, or several, that may explain what was sent.

    also:      names of other mistakes that have the same answer to this request
    explained: 1 - |sent - mistake|² / |sent - right|², or / |sent|² if that is less; for coarse rounding the share of
               the size of the error; the least of the wrong arrays, or of those of `part`
    ratio:     distance of what was sent to the answer of the mistake, in baselines: the mistake's own for the best
               hypotheses
    is_proof:  True if each array is within two baselines of the mistake's, one of them is ten times closer to it than
               to the right one, and no mistake is one of rounding. In a report also: if this holds on all rows, which
               is checked for the first three; after one holds, no other is a proof.
    part:      the wrong arrays that it explains, if it does not explain others; empty if it is one of all
    """

    candidate: Candidate[Any]
    explained: float
    ratio: float
    is_proof: bool
    also: tuple[str, ...] = ()
    part: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The names of its mistakes in words."""
        return " and ".join(self.candidate.names)

    @property
    def is_told(self) -> bool:
        """True if it explains enough, or as much as rounding leaves of a small error."""
        return self.explained >= LEAST or (self.ratio <= CORRECT and self.explained > 0)

    @property
    def is_close(self) -> bool:
        """True if it explains almost all: if it explains less, there is likely another mistake."""
        return self.explained >= ALMOST or self.ratio <= CORRECT

    @property
    def rank(self) -> tuple[bool, bool, bool, int, int, int, float]:
        """The order of hypotheses: proofs, then what explains enough to be told, with fewer mistakes first.

        What was made for all arrays comes before what was made for the wrong ones alone. What explains all wrong arrays
        comes before what explains the output alone, and that before other arrays.

        Rounding explains by chance what is nearly right: it comes after what explains almost all, but before a factor
        of the output that leaves some, as rounding may make all numbers too small, too.
        """
        one = self.candidate
        is_loose = "output.scaled" in one.names and self.ratio > CORRECT
        place = 1 if one.rounds else 0 if self.is_close and not is_loose else 2
        of = 0 if not self.part else 1 if "output" in self.part else 2
        return not self.is_proof, not self.is_told, one.is_restricted, of, len(one.names), place, -self.explained


def explained_part(shares: Mapping[str, float]) -> tuple[str, ...]:
    """The wrong arrays that a mistake explains almost all of, if it does not explain others; none if it is one of all.

    shares: of the error of each wrong array that the mistake explains
    """
    if all(share >= LEAST for share in shares.values()):
        return ()
    return tuple(name for name, share in shares.items() if share >= ALMOST)
