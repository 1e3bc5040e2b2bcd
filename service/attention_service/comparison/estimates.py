"""Mistakes with a number or an order that is estimated from the output."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np

from attention_service.attention.terms.positions import Causal
from attention_service.backends.base import Check
from attention_service.comparison.case import Case
from attention_service.comparison.evidence import Evidence
from attention_service.comparison.mutants.heads import permuted
from attention_service.comparison.mutants.positions import causal_at
from attention_service.comparison.mutants.scores import scaled
from attention_service.comparison.mutants.softmax import applies
from attention_service.comparison.problem import masked_scores, row_max
from attention_service.comparison.rules import Arrays
from attention_service.comparison.sample import Sample
from attention_service.comparison.solve import make_problem, solve

# Factors of the scale that are tried first, as powers of two, and steps of the search around the best of them.
POWERS: Final = np.arange(-10, 10.25, 0.5)
STEPS: Final = 40
# Steps of Gauss and Newton after it, and a small change of a power of two, which tells how an answer changes with it.
NEWTON: Final = 2
NEAR: Final = 2.0**-16
# Features by which offsets are told apart, and how far errors of offsets may be apart that are the same.
FEATURES: Final = 4
CLOSE: Final = 1e-6
# Rows by which heads are told apart.
HEAD_ROWS: Final = 8
# Fewer numbers of a head may be near to those of another by chance.
HEAD_NUMBERS: Final = 4
# With more heads their order is not looked for: all are compared with all.
MAX_HEADS: Final = 512


def estimated(evidence: Evidence, actual: Arrays, check: Check) -> Iterator[tuple[tuple[str, ...], Case]]:
    """The names and cases of the other scale, size, offset, and order of heads that are closest to an output."""
    yield from ((("causal.other_offset",), case) for case in _other_offset(evidence))
    yield from ((("output.scaled",), case) for case in _other_size(evidence))
    yield ("scale.other",), _other_scale(evidence, check)
    if isinstance(evidence.case.scale, np.ndarray):  # no factor of it is the same for all heads
        yield ("scale.other",), scaled(evidence.case, 1 / math.sqrt(evidence.case.plan.sizes.head_dim))
    if "output" in actual:
        order = _order_of_heads(evidence, actual["output"])
        if order is not None:
            case = permuted(evidence.case, order).changed(detail=f"head n is that of {order.tolist()}[n]")
            yield ("heads.permuted",), case
        order = _key_heads(evidence, actual["output"])
        if order is not None:
            case = evidence.case.changed(
                key_of_head=order, value_of_head=order, detail=f"head n reads {order.tolist()}[n]"
            )
            yield ("heads.regrouped",), case


def _other_scale(evidence: Evidence, check: Check) -> Case:
    """The case with the scale whose answer leaves the least squared error."""

    scale = evidence.case.scale
    start = scale if np.any(scale) else 1 / math.sqrt(evidence.case.plan.sizes.head_dim)

    def case(power: float, sign: float) -> Case:
        return scaled(evidence.case, sign * start * 2.0**power)

    def left(power: float, sign: float) -> np.ndarray:
        check()
        arrays = evidence.answer(("scale.other",), case(power, sign)).arrays
        return np.concatenate(
            [
                _finite(evidence.actual[name] - arrays[name])
                / (evidence.baselines[name] * math.sqrt(arrays[name].size))
                for name in evidence.wrong
            ]
        )

    def error(power: float, sign: float) -> float:
        check()
        return evidence.unexplained(evidence.answer(("scale.other",), case(power, sign)).arrays)

    middle, sign = min(
        ((power, sign) for power in POWERS.tolist() for sign in (1.0, -1.0)), key=lambda one: error(*one)
    )
    best = minimum(lambda power: error(power, sign), middle - 0.5, middle + 0.5)
    best = middle if error(middle, sign) <= error(best, sign) else best
    return case(improved(partial(left, sign=sign), best), sign)


def _finite(array: np.ndarray) -> np.ndarray:
    """The numbers of an array, 0 for those that are not finite."""
    found: np.ndarray = np.nan_to_num(array, nan=0.0, posinf=0.0, neginf=0.0).ravel()
    return found


def least_squares(left: Callable[[float], np.ndarray], tried: list[float]) -> float:
    """The number that leaves the least squares, near the best of those that are tried, half a unit apart."""

    def error(number: float) -> float:
        return float(np.square(left(number)).sum())

    middle = min(tried, key=error)
    best = minimum(error, middle - 0.5, middle + 0.5)
    return improved(left, middle if error(middle) <= error(best) else best)


def improved(left: Callable[[float], np.ndarray], number: float) -> float:
    """The number that leaves the least squares, by Gauss and Newton: a search finds half of its digits."""
    for _ in range(NEWTON):
        here = left(number)
        slope = (here - left(number + NEAR)) / NEAR
        squares = float(np.dot(slope, slope))
        step = float(np.dot(slope, here)) / squares if squares else 0.0
        number += step if abs(step) < NEAR else 0.0
    return number


def _other_size(evidence: Evidence) -> Iterator[Case]:
    """The case with the multiple of the output that leaves the least squared error."""
    case = evidence.case
    linear = case.plan.roles.output_map
    if "output" not in evidence.actual or case.steps["output"] or (linear is not None and linear.bias is not None):
        return
    sent, right = evidence.actual["output"], evidence.right["output"]
    if sent.any() and (right.any(axis=-1) & ~sent.any(axis=-1)).any():
        return  # no other factor makes a row 0
    finite = np.isfinite(sent) & np.isfinite(right)
    sent, right = sent[finite].astype(np.float64), right[finite]
    if size := float(np.dot(right, right)):
        factor = float(np.dot(sent, right)) / size
        multiplied = case.edited(lambda _, answer: replace(answer, output=answer.output * factor))
        yield multiplied.changed(detail=f"by {factor:.6g}")


def _other_offset(evidence: Evidence) -> Iterator[Case]:
    """The case whose causal mask has the offset that leaves the least squared error, tried for all offsets at once."""
    case, sample = evidence.case, evidence.sample
    is_plain = not (case.needs_all_heads or case.steps["output"]) and case.gate is None and applies(case)
    if case.term(Causal) is None or case.offset is None or "output" not in evidence.actual or not is_plain:
        return
    errors = _errors_of_prefixes(evidence).sum(axis=1)  # b r k+1
    keys, tried = case.plan.sizes.key_length, np.arange(-case.plan.sizes.query_length, case.plan.sizes.key_length)
    seen = np.clip(sample.rows[:, None] + tried + 1, 0, keys)
    left = np.take_along_axis(errors, np.broadcast_to(seen, (len(errors), *seen.shape)), axis=2).sum(axis=1)
    given = np.broadcast_to(case.offset, case.plan.sizes.batch_size)
    # Of offsets that differ in nothing, that which is closest to the right one.
    apart = np.abs(tried - given[sample.batches][:, None])
    best = tried[np.where(left <= left.min(axis=1, keepdims=True) * (1 + CLOSE), apart, np.inf).argmin(axis=1)]
    shifts = best - given[sample.batches]
    if len(best) == len(case.offset):
        yield from causal_at(case, best)
    elif (shifts == shifts[0]).all():
        yield from causal_at(case, case.offset + shifts[0])
    elif (best == best[0]).all():
        yield from causal_at(case, best[:1])


def _errors_of_prefixes(evidence: Evidence) -> np.ndarray:
    """The squared errors (b, h, r, k+1) of some features of an output if a row sees only so many of the first keys."""
    problem = make_problem(evidence.case.without(Causal), evidence.sample)
    scores = masked_scores(problem)
    top = row_max(scores, problem.sinks)
    sink = 0.0 if problem.sinks is None else np.exp(problem.sinks[..., None] - top)
    weights = np.exp(scores - top)
    total = np.cumsum(weights, axis=-1) + sink
    sent = evidence.actual["output"]
    errors = np.zeros((*scores.shape[:3], scores.shape[3] + 1))
    for feature in np.linspace(0, sent.shape[-1] - 1, min(FEATURES, sent.shape[-1])).astype(int):
        sums = np.cumsum(weights * problem.value[:, :, None, :, feature], axis=-1)
        outputs = np.divide(sums, total, out=np.zeros_like(sums), where=total > 0)
        errors += np.square(np.pad(outputs, [(0, 0), (0, 0), (0, 0), (1, 0)]) - sent[..., feature, None])
    return np.nan_to_num(errors, nan=0.0, posinf=0.0)


def minimum(function: Callable[[float], float], low: float, high: float) -> float:
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
    sample = _of_all_heads(evidence)
    right, sent = (array[0].reshape(sizes.num_heads, -1) for array in (solve(case, sample).output, sample.of(actual)))
    if not np.isfinite(sent).all():
        return None
    # |a - b|² = |a|² + |b|² - 2ab, of which |a|² is the same for all b.
    nearest = np.argmin(np.square(right).sum(axis=1) - 2 * (sent @ right.T), axis=1)
    is_order = len(set(nearest.tolist())) == sizes.num_heads
    return nearest if is_order and (nearest != np.arange(sizes.num_heads)).any() else None


def _of_all_heads(evidence: Evidence) -> Sample:
    """A few rows of all heads."""
    rows = evidence.sample.rows[:: -(-len(evidence.sample.rows) // HEAD_ROWS)]
    return Sample(evidence.sample.batches[:1], np.arange(evidence.case.plan.sizes.num_heads), rows)


def _key_heads(evidence: Evidence, actual: np.ndarray) -> np.ndarray | None:
    """The key/value head (h,) by which each head is closest to the output; None if there is none, or the right one."""
    case, (heads, kv_heads, *_) = evidence.case, evidence.case.plan.sizes
    sample = _of_all_heads(evidence)
    sent = sample.of(actual)
    is_tried = not case.needs_all_heads and 2 <= kv_heads <= MAX_HEADS // heads and sent[:, 0].size >= HEAD_NUMBERS
    if not is_tried or not np.isfinite(sent).all():
        return None
    errors = []
    for head in range(kv_heads):
        all_one = np.full(heads, head)
        found = solve(case.changed(key_of_head=all_one, value_of_head=all_one), sample).output
        errors.append(np.square(found - sent).sum(axis=(0, 2, 3)))
    order = np.argmin(errors, axis=0)
    return order if (order != case.key_of_head).any() else None
