"""Power: which mistakes a request can show, and which it cannot tell from what is right or from each other."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from attention_service.backends.base import Check
from attention_service.comparison.engine.candidate import Candidate, W, ratio
from attention_service.comparison.engine.subject import Subject
from attention_service.comparison.rules import CORRECT
from attention_service.comparison.tolerances import Tolerance

# Numbers of two answers that are held against each other before all are.
PROBED: Final = 16


@dataclass(frozen=True)
class Power:
    """What a request can show. All are names of mistakes.

    killed:    those whose answers differ from what is right by more than legal rounding, whatever their details
    survivors: the others that apply to the request
    indistinguishable: groups of killed mistakes whose answers do not differ from each other
    missed:    by the name of a test with a tolerance, the mistakes that pass it
    tiles:     by the name of a mistake of tiles, the sizes of tiles for which it is killed; it survives unless all are
    """

    killed: tuple[str, ...]
    survivors: tuple[str, ...]
    indistinguishable: tuple[tuple[str, ...], ...]
    missed: Mapping[str, tuple[str, ...]]
    tiles: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def ignored(self) -> tuple[str, ...]:
        """Names of mistakes that leave an option of the request out, and that it cannot show."""
        return tuple(filter(is_left_out, self.survivors))

    @property
    def is_weak(self) -> bool:
        """True if more than half of the mistakes, those of rounding left out, are invisible."""
        survivors, killed = (
            sum(not name.startswith("precision.") for name in names) for names in (self.survivors, self.killed)
        )
        return survivors > killed


def is_left_out(name: str) -> bool:
    """True for the name of a mistake that leaves an option of the request out."""
    return name.endswith((".absent", ".ignored")) and name != "scale.absent"


def no_power(tolerances: Collection[Tolerance]) -> Power:
    """The power of a request whose mistakes were not looked for."""
    return Power((), (), (), {one.name: () for one in tolerances})


def power(
    subject: Subject[W], candidates: list[Candidate[W]], check: Check, tolerances: Collection[Tolerance] = ()
) -> Power:
    """The power of a request. candidates: the answers of known mistakes; check: raises to end the computation"""
    candidates = [one for one in candidates if one.in_power]
    alive = subject.alive(candidates, check)
    shown = _shown_tiles(subject, candidates, alive)
    survive = {one.names[0] for one in alive if one.case.tile is None or one.case.tile in subject.tiles}
    survive |= {name for name, tiles in shown.items() if tiles != subject.tiles}
    survivors = tuple(dict.fromkeys(one.names[0] for one in candidates if one.names[0] in survive))
    killed = [one for one in candidates if one.names[0] not in survive]
    missed = {
        tolerance.name: tuple(dict.fromkeys(one.names[0] for one in candidates if subject.misses(one, tolerance)))
        for tolerance in tolerances
    }
    names = tuple(dict.fromkeys(one.names[0] for one in killed))
    return Power(names, survivors, groups(killed, subject.baselines), missed, shown)


def _shown_tiles(
    subject: Subject[W], candidates: list[Candidate[W]], alive: list[Candidate[W]]
) -> dict[str, tuple[int, ...]]:
    """By the name of a mistake of tiles, the sizes of tiles for which it changes the answer."""
    names = dict.fromkeys(one.names[0] for one in candidates if subject.is_by_tile(one.names[0]))
    changed = {(one.names[0], one.case.tile) for one in candidates} - {(one.names[0], one.case.tile) for one in alive}
    return {name: tuple(tile for tile in subject.tiles if (name, tile) in changed) for name in names}


def groups(killed: list[Candidate[W]], baselines: Mapping[str, float]) -> tuple[tuple[str, ...], ...]:
    """Groups of names whose first answers do not differ."""
    kept: list[tuple[_Probe, list[Candidate[W]]]] = []
    for one in {one.names[0]: one for one in reversed(killed)}.values():
        probe = _probe(one, baselines)
        for other, group in kept:
            if not _differ(probe, other) and ratio(one.arrays, group[0].arrays, baselines) <= CORRECT:
                group.append(one)
                break
        else:
            kept.append((probe, [one]))
    return tuple(tuple(sorted(one.names[0] for one in group)) for _, group in kept if len(group) > 1)


# Some numbers of each array of a candidate, with its baseline.
_Probe = list[tuple[float, list[float]]]


def _probe(one: Candidate[Any], baselines: Mapping[str, float]) -> _Probe:
    return [
        (baselines[name], array.ravel()[:: -(-array.size // PROBED) or 1].tolist())
        for name, array in one.arrays.items()
    ]


def _differ(one: _Probe, other: _Probe) -> bool:
    """True if some numbers tell two answers with the same arrays apart, which most do."""
    return any(
        abs(mine - its) / baseline > CORRECT
        for (baseline, numbers), (_, others) in zip(one, other, strict=True)
        for mine, its in zip(numbers, others, strict=True)
    )
