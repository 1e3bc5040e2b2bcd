"""How to compute batch entries without overflow: bounds on their numbers, and what they allow to leave out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np

from attention_service.attention.arrays import lost_to_underflow
from attention_service.attention.plan import Plan
from attention_service.attention.score_term import Bound
from attention_service.backends.base import Check
from attention_service.backends.dense.library import Array, ArrayLibrary, largest_number
from attention_service.backends.dense.operands import LoadedOperands

# Exponents up to these need no maximum subtracted: e^40 times a million keys is far below the largest float32, and
# e^-80 is a normal number.
MAX_EXPONENT: Final = {np.dtype(np.float32): 40.0, np.dtype(np.float64): 300.0}
# A query times a scale in this range keeps all its digits.
MODERATE_SCALE: Final = (1e-6, 1e6)
# A norm may exceed a bound that is as close in exact arithmetic by its rounding only.
ROOM: Final = 2.0
# Batch entries whose path is chosen before the deadline is checked again.
UNCHECKED: Final = 4096


@dataclass(frozen=True, slots=True)
class NumericPath:
    """Steps that the size of the numbers requires or allows. Every path computes the same; the careful one is slower.

    checks_overflow: each score is checked to be finite
    scales_query:    the query is multiplied by the scale, not each score
    subtracts_max:   the largest score of a row is subtracted before exp, which could overflow or underflow otherwise;
                     True also for the other normalizations, which ignore it
    divides_last:    outputs are divided by the sum of the exponentials, not the exponentials themselves
    """

    checks_overflow: bool
    scales_query: bool
    subtracts_max: bool
    divides_last: bool


class Bounds(NamedTuple):
    """Bounds on magnitudes: of scores, scaled or not; of what goes into exp; of values. inf or NaN if not known.

    As arrays (b,) of each batch entry, else of what a path is chosen for.
    """

    scores: Any
    exponents: Any
    values: Any

    @property
    def largest(self) -> Bounds:
        """The bounds of all entries together."""
        return Bounds(*(bound if isinstance(bound, float) else float(bound.max()) for bound in self))


def choose_paths(
    plan: Plan, lib: ArrayLibrary, loaded: LoadedOperands, check: Check
) -> list[tuple[slice, NumericPath]]:
    """The fastest numeric path that is safe for the numbers of each batch entry: consecutive entries with their path.

    An entry has the path that it would have alone, by bounds from its longest query and key. The norms that loading
    found may do instead if they show, with room for rounding, that these bounds would allow the fastest path of the
    plan. On a GPU they decide unless a score could overflow, because reading a number back waits until the GPU has
    finished.
    """
    every, finite = slice(0, plan.sizes.batch_size), loaded.bad_values is None
    known = _known_bounds(plan, loaded)
    if finite and _suits_fastest(plan, Bounds(*(ROOM * bound for bound in known))):
        return [(every, _allowed(plan, lib, known))]
    if lib.is_asynchronous and not (path := _allowed(plan, lib, known, finite=finite)).checks_overflow:
        return [(every, path)]
    xp = lib.xp
    squares = [xp.vecdot(x, x) for x in (loaded.query, loaded.key)]
    query, key = (math.sqrt(float(xp.max(square)) + _lost(plan)) for square in squares)
    value = max(float(xp.max(loaded.value)), -float(xp.min(loaded.value)))
    together = _bounds(plan, query, key, value).largest
    if finite and _suits_fastest(plan, together):
        return [(every, _allowed(plan, lib, together))]
    paths: list[NumericPath] = []
    known_paths: dict[NumericPath, NumericPath] = {}
    good = np.full(every.stop, True) if finite else _have_finite_values(loaded)
    bounds = _close_bounds(plan, squares, loaded.value, xp)
    for n, (*numbers, is_finite) in enumerate(zip(*(bound.tolist() for bound in bounds), good.tolist(), strict=True)):
        if n % UNCHECKED == 0:
            check()
        path = _allowed(plan, lib, Bounds(*numbers), finite=is_finite)
        paths.append(known_paths.setdefault(path, path))
    starts = [i for i, path in enumerate(paths) if i == 0 or path is not paths[i - 1]]
    return [(slice(*part), paths[part[0]]) for part in pairwise([*starts, every.stop])]


def cannot_overflow(plan: Plan, loaded: LoadedOperands) -> np.ndarray:
    """(b,): True if all values of an entry are finite and no score can overflow, by what is known without a read."""
    limit, finite = largest_number(plan), loaded.bad_values is None
    together = _known_bounds(plan, loaded)
    if finite and together.scores < limit and together.exponents < limit:
        return np.ones(plan.sizes.batch_size, bool)
    query, key, value = loaded.norms
    scores, exponents, _ = _bounds(plan, query, key, value)
    safe: np.ndarray = (scores < limit) & (exponents < limit)
    return safe if finite else safe & _have_finite_values(loaded)


def _have_finite_values(loaded: LoadedOperands) -> np.ndarray:
    """(b,): True if all values of an entry are finite. For operands of which some are not."""
    assert loaded.bad_values is not None
    return np.array([not bad.any() for bad in loaded.bad_values])


def _allowed(plan: Plan, lib: ArrayLibrary, bounds: Bounds, *, finite: bool = True) -> NumericPath:
    """The fastest numeric path that is safe within these bounds. finite: whether all values are"""
    limit, most = largest_number(plan), MAX_EXPONENT[plan.compute_dtype]
    checks = not (finite and bounds.scores < limit and bounds.exponents < limit)
    if plan.normalization != "softmax":
        return NumericPath(checks_overflow=checks, scales_query=False, subtracts_max=True, divides_last=False)
    subtracts_max = checks or not bounds.exponents <= most
    low, high = MODERATE_SCALE
    reads_query = any(term.reads_query for term in plan.terms)
    smallest, largest = _scale_range(plan)
    sums = bounds.values * plan.sizes.key_length * (1.0 if subtracts_max else math.exp(most))
    return NumericPath(
        checks_overflow=checks,
        scales_query=not (checks or reads_query or "scores" in plan.selection.include or plan.gradients is not None)
        and low < smallest <= largest < high,
        subtracts_max=subtracts_max,
        divides_last=plan.entry_scores > lib.tiling.divide_last_above and sums < limit,
    )


def _known_bounds(plan: Plan, loaded: LoadedOperands) -> Bounds:
    """Bounds for all entries, from norms that are known without reading a number."""
    query, key, value = (float(norms.max()) for norms in loaded.norms)
    return _bounds(plan, query, key, value).largest


def _suits_fastest(plan: Plan, bounds: Bounds) -> bool:
    """True if no number within these bounds requires a slower path."""
    limit, most = largest_number(plan), MAX_EXPONENT[plan.compute_dtype]
    sums = bounds.values * plan.sizes.key_length * math.exp(most)
    return bool(bounds.scores < limit and bounds.exponents <= most and sums < limit)


def _close_bounds(plan: Plan, squares: list[Array], value: Array, xp: Any) -> Bounds:
    """Bounds from the longest query and the longest key of each entry, as |q·k| <= |q| |k| (Cauchy-Schwarz).

    squares: of the lengths of queries and keys, (b, h or g, l)
    """
    query, key = (np.sqrt(_in_float64(xp.max(square, axis=(1, 2))) + _lost(plan)) for square in squares)
    low, high = xp.min(value, axis=(1, 2, 3)), xp.max(value, axis=(1, 2, 3))
    return _bounds(plan, query, key, np.maximum(_in_float64(high), -_in_float64(low)))


def _lost(plan: Plan) -> float:
    """What the square of the length of a query or key may lack."""
    return lost_to_underflow(plan.dtype, plan.sizes.head_dim)


def _in_float64(numbers: Array) -> np.ndarray:
    """Numbers (b,) of the library in NumPy."""
    return np.array(numbers.tolist())


def _bounds(plan: Plan, query: Bound, key: Bound, values: Bound) -> Bounds:
    """The bounds of a plan, from bounds on the norms of queries and keys, and one on the values, (b,) or one each."""
    products = query * key
    for term in plan.terms:
        products = products + term.largest_product(query)
    factor = _scale_range(plan)[1]
    exponents = products * factor
    if plan.softcap is not None:
        exponents = np.minimum(exponents, plan.softcap)
    for term in plan.terms:
        exponents = exponents + term.largest_added(plan.sizes)
    if plan.all_sinks is not None:
        exponents = np.maximum(exponents, np.abs(plan.all_sinks).max(axis=(1, 2, 3)))
    return Bounds(products * max(1.0, factor), exponents, values)


def _scale_range(plan: Plan) -> tuple[float, float]:
    """The smallest and largest magnitude of the numbers that scores are multiplied by."""
    if plan.head_scales is None:
        return abs(plan.scale), abs(plan.scale)
    sizes = np.abs(plan.head_scales)
    return float(sizes.min()), float(sizes.max())
