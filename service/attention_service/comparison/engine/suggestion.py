"""Suggestions: made inputs that show mistakes that are still possible."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Final

# How many inputs in a row may show no more than the best before.
IN_VAIN: Final = 2


@dataclass(frozen=True)
class Suggestion:
    """A request that shows mistakes: its seed, its fields, and the names of the mistakes."""

    seed: int
    fields: dict[str, Any]
    kills: tuple[str, ...]


def best_of(suggestions: Iterable[Suggestion], wanted: Collection[str]) -> Suggestion | None:
    """The first suggestion that shows most of the wanted mistakes; None if none shows any."""
    best, in_vain = None, 0
    for one in suggestions:
        in_vain += 1
        if best is None or len(one.kills) > len(best.kills):
            best, in_vain = one, 0
        if len(best.kills) == len(wanted) or in_vain == IN_VAIN:
            break
    return best if best is not None and best.kills else None
