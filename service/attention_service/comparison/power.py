"""Power: which mistakes a request can show, and which it cannot tell from the truth or from each other."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np

from attention_service.backends.base import Check
from attention_service.comparison.baseline import CORRECT, Arrays, arrays_of
from attention_service.comparison.candidates import Candidate, ratio
from attention_service.comparison.case import Case
from attention_service.comparison.errors import distance
from attention_service.comparison.evidence import Evidence
from attention_service.comparison.mutants import MUTANTS
from attention_service.comparison.row_errors import RowErrors, judges_rows, legal_rows, mean_squares, rows_show
from attention_service.comparison.sample import Sample, blocks, everything
from attention_service.comparison.samples import is_whole
from attention_service.comparison.solve import solve
from attention_service.comparison.tolerances import Tolerance

# Requests of at most so many scores, and products for them and for the outputs, are looked at whole before a mistake is
# called invisible.
CONFIRMED_SCORES: Final = 2**23
CONFIRMED_PRODUCTS: Final = 2**31
# Coarse rounding shows if it is so many times as far off as needed: by its largest error, and in the mean.
SURE: Final = 2.0
SURE_MEAN: Final = 1.15
# Numbers of two answers that are held against each other before all are.
PROBED: Final = 16


@dataclass(frozen=True)
class Power:
    """What a request can show. All are names of mutants.

    killed:    those whose answers differ from the truth by more than legal rounding, whatever their details
    survivors: the others that apply to the request
    indistinguishable: groups of killed mutants whose answers do not differ from each other
    missed:    by the name of a test with a tolerance, the mutants that pass it
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


@dataclass(frozen=True)
class Known:
    """The right arrays of all rows, their baselines, and the legal mean squares of the rows that are judged."""

    right: Arrays
    limits: Mapping[str, float]
    legal: Mapping[str, np.ndarray]


def power(
    evidence: Evidence,
    found: list[Candidate],
    check: Check,
    tolerances: Collection[Tolerance] = (),
    known: Known | None = None,
) -> Power:
    """The power of a request. found: the mutants' answers for the sample; check: raises to end the computation

    known: what is right on all rows, None to compute it
    """
    case, right, limits = evidence.case, evidence.right, evidence.baselines
    rounding = [one for one in found if one.rounds]
    legal = legal_rows(case, evidence.sample, evidence.squares, right) if found else {}
    alive = [one for one in found if not (one.rounds or ratio(one.arrays, right, limits) > CORRECT)]
    alive = [one for one in alive if not rows_show(_squares_of(one.arrays, right, legal), legal)]
    if alive and not is_whole(case, evidence.sample) and _can_confirm(case):
        alive = _alive(case, alive, right, check, known)
    alive += _unseen_roundings(evidence, rounding, legal)
    shown = _shown_tiles(case, found, alive)
    survive = {one.names[0] for one in alive if one.case.tile is None or one.case.tile in case.tiles}
    survive |= {name for name, kept in shown.items() if kept != case.tiles}
    survivors = tuple(dict.fromkeys(one.names[0] for one in found if one.names[0] in survive))
    killed = [one for one in found if one.names[0] not in survive]
    missed = {
        tolerance.name: tuple(dict.fromkeys(one.names[0] for one in found if _passes(one, right, tolerance)))
        for tolerance in tolerances
    }
    names = tuple(dict.fromkeys(one.names[0] for one in killed))
    return Power(names, survivors, groups(killed, limits), missed, shown)


def _squares_of(arrays: Arrays, right: Arrays, names: Collection[str]) -> dict[str, np.ndarray]:
    """The mean squares of the differences of the rows of some arrays, by name."""
    return {name: mean_squares(arrays[name], right[name]) for name in names}


def _unseen_roundings(evidence: Evidence, found: list[Candidate], legal: Mapping[str, np.ndarray]) -> list[Candidate]:
    """The candidates whose coarse rounding may not show: that of a kernel has other errors, larger or smaller ones.

    In the mean of many rows they are alike; where only the largest error is judged, it must be far from legal.
    """
    right = evidence.right

    def shows(one: Candidate) -> bool:
        if not legal:
            return ratio(one.arrays, right, evidence.baselines) > SURE * CORRECT
        means = (RowErrors(mean_squares(one.arrays[name], right[name], 0.0), legal[name]).mean for name in legal)
        return max(means) > SURE_MEAN

    return [one for one in found if not shows(one)]


def _can_confirm(case: Case) -> bool:
    """True if all rows of a request are few enough to be computed for each mistake that the sample does not show."""
    sizes, scores = case.plan.sizes, case.plan.score_count
    return scores <= CONFIRMED_SCORES and scores * (sizes.head_dim + sizes.value_dim) <= CONFIRMED_PRODUCTS


def _shown_tiles(case: Case, found: list[Candidate], alive: list[Candidate]) -> dict[str, tuple[int, ...]]:
    """By the name of a mistake of tiles, the sizes of tiles for which it changes the answer."""
    names = dict.fromkeys(one.names[0] for one in found if MUTANTS[one.names[0]].by_tile)
    changed = {(one.names[0], one.case.tile) for one in found} - {(one.names[0], one.case.tile) for one in alive}
    return {name: tuple(tile for tile in case.tiles if (name, tile) in changed) for name in names}


def _passes(one: Candidate, right: Arrays, tolerance: Tolerance) -> bool:
    return all(tolerance.passes(array, right[name]) for name, array in one.arrays.items())


def _alive(
    case: Case, found: list[Candidate], names: Collection[str], check: Check, known: Known | None
) -> list[Candidate]:
    """The candidates whose answers do not differ from the truth on any row, nor in the mean of rows."""
    apart = [dict.fromkeys(names, 0.0) for _ in found]
    limits = dict.fromkeys(names, 0.0)
    whole, sizes = everything(case), case.plan.sizes
    shape = sizes.batch_size, sizes.num_heads, sizes.query_length
    judged = [name for name in names if judges_rows(case, name)]
    legal = {name: np.zeros(shape) for name in judged} if known is None else known.legal
    squares = [{name: np.zeros(shape) for name in judged} for _ in found]
    for block in blocks(case, whole):
        check()
        if known is None:
            of_block = Evidence.of(case, block, None, names)
            right, here = of_block.right, of_block.baselines
            for name, own in legal_rows(case, block, of_block.squares, right).items():
                block.put(legal[name], own)
        else:
            right, here = {name: block.of(known.right[name]) for name in names}, dict(known.limits)
        limits.update({name: max(limits[name], limit) for name, limit in here.items()})
        errors = case.each(partial(_errors, block, right, judged), found)
        for largest, rows, (distances, of_rows) in zip(apart, squares, errors, strict=True):
            largest.update({name: max(largest[name], distance) for name, distance in distances.items()})
            for name, own in of_rows.items():
                block.put(rows[name], own)
    return [
        one
        for one, largest, rows in zip(found, apart, squares, strict=True)
        if all(largest[name] <= CORRECT * limits[name] for name in one.arrays) and not rows_show(rows, legal)
    ]


def _errors(
    block: Sample, right: Arrays, judged: Collection[str], one: Candidate
) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """How far the answer of a candidate is from the truth in a block, and the rows of the arrays that they judge."""
    arrays = arrays_of(solve(one.case, block), one.arrays)
    return {name: distance(array, right[name]) for name, array in arrays.items()}, _squares_of(arrays, right, judged)


def groups(killed: list[Candidate], limits: Mapping[str, float]) -> tuple[tuple[str, ...], ...]:
    """Groups of names whose first answers do not differ."""
    found: list[tuple[_Probe, list[Candidate]]] = []
    for one in {one.names[0]: one for one in reversed(killed)}.values():
        probe = _probe(one, limits)
        for other, group in found:
            if not _differ(probe, other) and ratio(one.arrays, group[0].arrays, limits) <= CORRECT:
                group.append(one)
                break
        else:
            found.append((probe, [one]))
    return tuple(tuple(sorted(one.names[0] for one in group)) for _, group in found if len(group) > 1)


# Some numbers of each array of a candidate, with its baseline.
_Probe = list[tuple[float, list[float]]]


def _probe(one: Candidate, limits: Mapping[str, float]) -> _Probe:
    return [
        (limits[name], array.ravel()[:: -(-array.size // PROBED) or 1].tolist()) for name, array in one.arrays.items()
    ]


def _differ(one: _Probe, other: _Probe) -> bool:
    """True if some numbers tell two answers with the same arrays apart, which most do."""
    return any(
        abs(mine - its) / limit > CORRECT
        for (limit, numbers), (_, others) in zip(one, other, strict=True)
        for mine, its in zip(numbers, others, strict=True)
    )
