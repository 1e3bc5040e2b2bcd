"""How to compute a plan without overflow: bounds on its numbers, and what they allow to leave out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from attention_service.attention.arrays import lost_to_underflow
from attention_service.attention.plan import Plan
from attention_service.backends.dense.library import ArrayLibrary, largest_number
from attention_service.backends.dense.operands import LoadedOperands

# Exponents up to these need no maximum subtracted: e^40 times a million keys is far below the largest float32, and
# e^-80 is a normal number.
MAX_EXPONENT: Final = {np.dtype(np.float32): 40.0, np.dtype(np.float64): 300.0}
# A query times a scale in this range keeps all its digits.
MODERATE_SCALE: Final = (1e-6, 1e6)


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
    """Bounds on magnitudes: of scores, scaled or not; of what goes into exp; of values. inf or NaN if not known."""

    scores: float
    exponents: float
    values: float


def choose_path(plan: Plan, lib: ArrayLibrary, loaded: LoadedOperands) -> NumericPath:
    """The fastest numeric path that is safe for these numbers, by bounds on them.

    It is chosen by the norms that loading found. If it then has `subtracts_max`, closer bounds are computed from the
    arrays, and it is chosen again; on a GPU only if a score could overflow, because reading a number back waits until
    the GPU has finished.
    """
    path = _allowed(plan, lib, loaded, _known_bounds(plan, loaded))
    if not path.subtracts_max or (lib.is_asynchronous and not path.checks_overflow):
        return path
    return _allowed(plan, lib, loaded, _close_bounds(plan, lib, loaded))


def cannot_overflow(plan: Plan, loaded: LoadedOperands) -> bool:
    """True if all values are finite, and no score can overflow, by what is known without reading a number."""
    return _excludes_overflow(_known_bounds(plan, loaded), plan, loaded)


def _excludes_overflow(bounds: Bounds, plan: Plan, loaded: LoadedOperands) -> bool:
    limit = largest_number(plan)
    return loaded.bad_values is None and bounds.scores < limit and bounds.exponents < limit


def _allowed(plan: Plan, lib: ArrayLibrary, loaded: LoadedOperands, bounds: Bounds) -> NumericPath:
    """The fastest numeric path that is safe within these bounds."""
    checks = not _excludes_overflow(bounds, plan, loaded)
    if plan.normalization != "softmax":
        return NumericPath(checks_overflow=checks, scales_query=False, subtracts_max=True, divides_last=False)
    exponent = max(bounds.exponents, 0.0 if plan.all_sinks is None else float(np.max(np.abs(plan.all_sinks))))
    subtracts_max = checks or not exponent <= MAX_EXPONENT[plan.compute_dtype]
    low, high = MODERATE_SCALE
    reads_query = any(term.reads_query for term in plan.terms)
    smallest, largest = _scale_range(plan)
    sums = bounds.values * plan.sizes.key_length * math.exp(0.0 if subtracts_max else exponent)
    return NumericPath(
        checks_overflow=checks,
        scales_query=not (checks or reads_query or "scores" in plan.selection.include)
        and low < smallest <= largest < high,
        subtracts_max=subtracts_max,
        divides_last=plan.score_count > lib.tiling.divide_last_above and sums < largest_number(plan),
    )


def _known_bounds(plan: Plan, loaded: LoadedOperands) -> Bounds:
    """Bounds from norms that are known without reading a number."""
    query, key, value = loaded.norms
    return _bounds(plan, query, key, value)


def _close_bounds(plan: Plan, lib: ArrayLibrary, loaded: LoadedOperands) -> Bounds:
    """Bounds from the longest query and the longest key, as |q·k| <= |q| |k| (Cauchy-Schwarz)."""
    xp, lost = lib.xp, lost_to_underflow(plan.dtype, plan.sizes.head_dim)
    longest = [math.sqrt(float(xp.max(xp.vecdot(x, x))) + lost) for x in (loaded.query, loaded.key)]
    values = max(float(xp.max(loaded.value)), -float(xp.min(loaded.value)))
    return _bounds(plan, longest[0], longest[1], values)


def _bounds(plan: Plan, query: float, key: float, values: float) -> Bounds:
    """The bounds of a plan, from bounds on the norms of each query and key, and one on the values."""
    products = query * key + sum(term.largest_product(query) for term in plan.terms)
    scaled = exponents = products * _scale_range(plan)[1]
    if plan.softcap is not None:
        exponents = min(exponents, plan.softcap)
    exponents += sum(term.largest_added(plan.sizes) for term in plan.terms)
    return Bounds(max(products, scaled), exponents, values)


def _scale_range(plan: Plan) -> tuple[float, float]:
    """The smallest and largest magnitude of the numbers that scores are multiplied by."""
    if plan.head_scales is None:
        return abs(plan.scale), abs(plan.scale)
    sizes = np.abs(plan.head_scales)
    return float(sizes.min()), float(sizes.max())
