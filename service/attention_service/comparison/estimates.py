"""Mistakes with a number or an order that is estimated from the output."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from attention_service.backends.base import Check
from attention_service.comparison.baseline import Arrays
from attention_service.comparison.case import Case
from attention_service.comparison.evidence import Evidence
from attention_service.comparison.mutants.heads import permuted
from attention_service.comparison.mutants.scores import scaled
from attention_service.comparison.sample import Sample
from attention_service.comparison.solve import solve

# Factors of the scale that are tried first, as powers of two, and steps of the search around the best of them.
POWERS: Final = np.arange(-10, 10.25, 0.5)
STEPS: Final = 40
# Rows by which heads are told apart.
HEAD_ROWS: Final = 8
# With more heads their order is not looked for: all are compared with all.
MAX_HEADS: Final = 512


def estimated(evidence: Evidence, actual: Arrays, check: Check) -> Iterator[tuple[tuple[str, ...], Case]]:
    """The names and cases of the other scale, and the other order of heads, that are closest to an output."""
    yield ("scale.other",), _other_scale(evidence, check)
    if isinstance(evidence.case.scale, np.ndarray):  # no factor of it is the same for all heads
        yield ("scale.other",), scaled(evidence.case, 1 / math.sqrt(evidence.case.plan.sizes.head_dim))
    if "output" in actual:
        order = _order_of_heads(evidence, actual["output"])
        if order is not None:
            case = permuted(evidence.case, order).changed(detail=f"head n is that of {order.tolist()}[n]")
            yield ("heads.permuted",), case


def _other_scale(evidence: Evidence, check: Check) -> Case:
    """The case with the scale whose answer leaves the least squared error."""

    scale = evidence.case.scale
    start = scale if np.any(scale) else 1 / math.sqrt(evidence.case.plan.sizes.head_dim)

    def case(power: float, sign: float) -> Case:
        return scaled(evidence.case, sign * start * 2.0**power)

    def error(power: float, sign: float) -> float:
        check()
        return evidence.unexplained(evidence.answer(("scale.other",), case(power, sign)).arrays)

    middle, sign = min(
        ((power, sign) for power in POWERS.tolist() for sign in (1.0, -1.0)), key=lambda one: error(*one)
    )
    best = _minimum(lambda power: error(power, sign), middle - 0.5, middle + 0.5)
    return case(middle if error(middle, sign) <= error(best, sign) else best, sign)


def _minimum(function: Callable[[float], float], low: float, high: float) -> float:
    """The place of the minimum of a function of one number, by golden-section search (Kiefer 1953)."""
    golden = (math.sqrt(5) - 1) / 2
    a, b = high - golden * (high - low), low + golden * (high - low)
    at_a, at_b = function(a), function(b)
    for _ in range(STEPS):
        if at_a < at_b:
            high, b, at_b = b, a, at_a
            a = high - golden * (high - low)
            at_a = function(a)
        else:
            low, a, at_a = a, b, at_b
            b = low + golden * (high - low)
            at_b = function(b)
    return (low + high) / 2


def _order_of_heads(evidence: Evidence, actual: np.ndarray) -> np.ndarray | None:
    """The order (h,) in which the right heads are closest to the output; None if there is none, or the right one."""
    case, sizes = evidence.case, evidence.case.plan.sizes
    if case.needs_all_heads or not 2 <= sizes.num_heads <= MAX_HEADS:
        return None
    rows = evidence.sample.rows[:: -(-len(evidence.sample.rows) // HEAD_ROWS)]
    sample = Sample(evidence.sample.batches[:1], np.arange(sizes.num_heads), rows)
    right, sent = (array[0].reshape(sizes.num_heads, -1) for array in (solve(case, sample).output, sample.of(actual)))
    if not np.isfinite(sent).all():
        return None
    # |a - b|² = |a|² + |b|² - 2ab, of which |a|² is the same for all b.
    nearest = np.argmin(np.square(right).sum(axis=1) - 2 * (sent @ right.T), axis=1)
    is_order = len(set(nearest.tolist())) == sizes.num_heads
    return nearest if is_order and (nearest != np.arange(sizes.num_heads)).any() else None
