"""Candidates: mistakes and their answers for a sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from attention_service.comparison.errors import distance
from attention_service.comparison.rules import Arrays


class Wrong(Protocol):
    """A request with a mistake."""

    @property
    def change(self) -> Mapping[str, Any] | None:
        """The fields to change in the request to make the mistake; None if no field can say it."""

    @property
    def detail(self) -> str:
        """What tells this form of the mistake from others, like "of 64 keys"."""

    @property
    def tile(self) -> int | None:
        """The size of its tiles; None for a mistake of no tiles."""


W = TypeVar("W", bound=Wrong)


@dataclass(frozen=True, eq=False)
class Candidate(Generic[W]):
    """A mistake, or several, and its arrays for a sample.

    names: of the mistakes, the first edit first; did: what the kernel did, as a sentence
    is_restricted: True if it was made for the wrong arrays alone: it would change others that are right
    in_power: False if power does not count it
    """

    names: tuple[str, ...]
    case: W
    arrays: Arrays
    did: str
    is_restricted: bool = False
    in_power: bool = True

    @property
    def rounds(self) -> bool:
        """True if a mistake is one of rounding."""
        return any(name.startswith("precision.") and name != "precision.overflow16" for name in self.names)

    @property
    def message(self) -> str:
        """What the kernel did, with the detail."""
        return f"{self.did} ({self.case.detail})" if self.case.detail else self.did


def ratio(one: Arrays, other: Arrays, baselines: Mapping[str, float]) -> float:
    """The largest distance of two answers, in baselines."""
    return max((distance(one[name], other[name]) / baselines[name] for name in one if name in other), default=0.0)
