"""The fact that scores are a function of the scaled scores alone, as no wrong mask, key or value makes them: by another
cap, or another scale. Weights and scores tell the curve itself; for an output and a logsumexp some functions are tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

import numpy as np

from attention_service.comparison.estimates import NEAR, least_squares
from attention_service.comparison.problem import Problem, attention
from attention_service.comparison.refitted import Prediction, told
from attention_service.comparison.sample import Sample, blocks, everything
from attention_service.comparison.solve import make_problem
from attention_service.comparison.wrong import Wrong, shown
from attention_service.schemas.compare import Fact

# Arrays of scores, and weights, which tell the scores of a row up to one number.
SCORES: Final = ("scaled_scores", "capped_scores", "masked_scores")
WEIGHTS: Final = ("attention_weights", "weights_without_sinks")
# Arrays with more numbers are not looked at; keys of a row and points of a curve, at least.
MOST: Final = 2**16
OF_ROW: Final = 4
FEWEST: Final = 64
# A score is known if its error is at most this. The curve must be so many times longer than the errors of its points.
ERROR: Final = 0.05
LONGER: Final = 32.0
# How far neighbours may be from telling a point, in parts of the curve, and the points beside a bend, which they do not
# tell; scores that are closer, in parts of the largest, are one.
UNTOLD: Final = 1e-3
BENDS: Final = 8
# How far rows may be shifted from each other on the curve of weights, in parts of it.
UNTOLD_ROWS: Final = 5e-3
SAME: Final = 1e-9
# Steps in which rows are shifted onto one curve, and scores at which it is told.
STEPS: Final = 40
LISTED: Final = 5
# Functions in the place of the hyperbolic tangent, of scores divided by the cap.
CAPS: Final[dict[str, Callable[[np.ndarray], np.ndarray]]] = {
    "min(max(x, -1), 1)": lambda x: np.clip(x, -1, 1),
    "x / (1 + |x|)": lambda x: x / (1 + np.abs(x)),
    "x / √(1 + x²)": lambda x: x / np.sqrt(1 + x * x),
    "arctan(x)": np.arctan,
    "2/π · arctan(π/2 · x)": lambda x: np.arctan(x * np.pi / 2) * 2 / np.pi,
    "2 · sigmoid(x) - 1": lambda x: np.tanh(x / 2),
    "sin(x)": np.sin,
}
ROWS: Final = 32


def score_curve(wrong: Wrong) -> Iterator[Fact]:
    """The scores are one function of the scaled scores in all rows, or capped by another function."""
    case = wrong.case
    if case.plan.normalization == "softmax" and wrong.rows.shape == case.query.shape[:3]:
        is_made = wrong.is_plain_output or (wrong.has_rows and wrong.name in ("logsumexp", "attention_weights"))
        found = list(_other_cap(wrong, case.softcap)) if case.softcap is not None and is_made else []
        yield from found or (_curve(wrong) if wrong.name in (*SCORES, *WEIGHTS) else ())


def _curve(wrong: Wrong) -> Iterator[Fact]:
    for without in (False, True) if wrong.right.size <= MOST else ():
        curve = _on_one_curve(wrong, wrong.actual, without=without)
        if curve is None:
            continue
        x, y, errors = curve
        right = _on_one_curve(wrong, wrong.right, without=without)
        if right is not None and _is_shift_of(curve, right):
            return  # what is wrong is not the scores of visible keys
        chosen = np.unique(np.linspace(0, len(x) - 1, LISTED).astype(int))
        slope, at_0 = (float(one) for one in np.polyfit(x, y, 1))
        left = float(np.abs(y - at_0 - slope * x).max())
        is_line = left <= np.ptp(y) / 1000
        whose = "the scores behind {} are" if wrong.name in WEIGHTS else "{} is"
        left_out = ", the bias left out" * without
        text = f"in the rows that tell it {whose} a function of the scaled scores alone{left_out}"
        least = np.ptp(y) * UNTOLD_ROWS if wrong.name in WEIGHTS else 0.0
        points = zip(x[chosen], y[chosen], np.maximum(errors[chosen], least), strict=True)
        values = ", ".join(f"{shown(told, error)} for {score:.4g}" for score, told, error in points)
        text += f": {f'{shown(slope, 2 * left / np.ptp(x))} times these' if is_line else values}"
        text += ", and a number of the row" if wrong.name in WEIGHTS else ""
        yield wrong.fact("score_curve", text, scores=x[chosen], told=y[chosen])
        return


def _points(wrong: Wrong, array: np.ndarray, *, without: bool) -> np.ndarray:
    """What an array (b, h, q, k) tells of the scores of visible keys, in ascending order of the right ones, (4, n).

    Row, right scaled score, score that is told, and its error. without: True to subtract what is added to scores
    """
    rows, parts = np.arange(wrong.rows.size).reshape(wrong.rows.shape)[..., None], []
    for block in blocks(wrong.case, everything(wrong.case)):
        wrong.case.check()
        problem, told = make_problem(wrong.case, block), array[block.index]
        errors = np.full(told.shape, wrong.tolerance)
        if wrong.name in WEIGHTS:
            errors = np.divide(wrong.tolerance, told, out=np.full(told.shape, np.inf), where=told > 0)
            told = np.log(np.where(told > 0, told, 1))
        if without and problem.added is not None:
            told = told - problem.added
        kept = problem.seen & np.isfinite(told) & (errors <= ERROR)
        kept &= kept.sum(axis=-1, keepdims=True) >= OF_ROW
        every = np.broadcast_arrays(rows[block.index], problem.scores * problem.scale, told, errors)
        parts.append(np.stack([one[kept] for one in every]))
    points = np.concatenate(parts, axis=1)
    points = points[:, np.argsort(points[1], kind="stable")]
    kept = np.diff(points[1], prepend=-np.inf) > SAME * (1 + np.max(np.abs(points[1]), initial=0.0))
    return np.asarray(points[:, kept])


def _on_one_curve(wrong: Wrong, array: np.ndarray, *, without: bool) -> tuple[np.ndarray, ...] | None:
    """The right scaled scores, those that an array tells, where neighbours tell each of them, and the errors of these.

    None if they are not told by their neighbours.
    """
    points = _points(wrong, array, without=without)
    if points.shape[1] < FEWEST:
        return None
    row, x, y, errors = points[0].astype(np.int64), *points[1:]
    inner = np.arange(2, len(x) - 2)
    beside = inner[:, None] + np.array([-2, -1, 1, 2])
    weights = _of_neighbours(x[inner], x[beside])
    slack = errors[inner] + (np.abs(weights) * errors[beside]).sum(axis=1)
    if wrong.name in WEIGHTS:
        y = y + _shifts(row, x, y, inner, beside, weights)[row]
        slack, errors = 2 * slack, 2 * errors  # those of the shifts, which are means of these
    apart = np.abs((weights * y[beside]).sum(axis=1) - y[inner])
    known = slack <= np.std(y) / LONGER
    is_near = apart <= np.maximum(slack, np.ptp(y) * UNTOLD)
    is_curve = known.sum() >= FEWEST and np.count_nonzero(~is_near & known) <= max(BENDS, len(inner) // 1000)
    return (x, y, errors) if is_curve and known.sum() >= len(inner) / 2 else None


def _of_neighbours(x: np.ndarray, beside: np.ndarray) -> np.ndarray:
    """The weights (n, 4) of the values at four neighbours, of which a cubic polynomial makes those at x (n,)."""
    found = np.ones(beside.shape)
    for one in range(4):
        for other in (other for other in range(4) if other != one):
            found[:, one] *= (x - beside[:, other]) / (beside[:, one] - beside[:, other])
    return found


def _shifts(
    row: np.ndarray, x: np.ndarray, y: np.ndarray, inner: np.ndarray, beside: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """What must be added to each row so that it agrees with its neighbours on a curve; first with a line."""
    count = np.maximum(np.bincount(row), 1)

    def means(numbers: np.ndarray) -> np.ndarray:
        return np.bincount(row, numbers) / count

    own_x, own_y = x - means(x)[row], y - means(y)[row]
    square = float(own_x @ own_x)
    found = (float(own_x @ own_y) / square if square else 0.0) * means(x) - means(y)
    trust = 1 / np.square(weights).sum(axis=1)
    total = np.maximum(np.bincount(row[inner], trust, len(count)), 1e-300)
    for _ in range(STEPS):
        shifted = y + found[row]
        left = (weights * shifted[beside]).sum(axis=1) - shifted[inner]
        found = found + np.bincount(row[inner], trust * left, len(count)) / total
    return np.asarray(found)


def _is_shift_of(curve: tuple[np.ndarray, ...], right: tuple[np.ndarray, ...]) -> bool:
    """True if two curves, see `_on_one_curve`, differ by one number."""
    apart = np.interp(curve[0], right[0], right[1]) - curve[1]
    return bool(np.quantile(np.abs(apart - np.median(apart)), 0.9) <= np.std(right[1]) / 1000)


def _other_cap(wrong: Wrong, cap: float) -> Iterator[Fact]:
    """Capped by another function, or with another cap that is fitted to some rows; the closest to these first."""
    tried = {f"the softcap times {name}, with x = score / softcap": (by, cap) for name, by in CAPS.items()}
    left = _errors_of_some(wrong)
    other, error = _fitted(wrong, cap, partial(left, np.tanh))
    tried[f"c · tanh(score / c), with c = {shown(other, error)}"] = np.tanh, other
    for name, (by, limit) in sorted(tried.items(), key=lambda one: float(np.square(left(*one[1])).sum())):
        predict = partial(_capped_by, wrong.name, by, limit)
        if said := told(wrong, predict, math.log2(len(CAPS)) + wrong.sums[3].max() * (limit != cap)):
            yield wrong.fact(
                "score_curve", f"{said} {{}} is right for scores that are capped by another function: {name}"
            )
            return


def _capped_by(
    name: str, function: Callable[[np.ndarray], np.ndarray], cap: float, problem: Problem, _: np.ndarray, __: Sample
) -> Prediction:
    """The output or logsumexp (b, h, r, n) with other capped scores."""
    scores = cap * function(problem.scores * problem.scale / cap)
    answer = attention(problem.changed(scores=scores, scale=1.0, softcap=None))
    assert answer.logsumexp is not None
    assert answer.weights is not None
    arrays = {"output": answer.output, "logsumexp": answer.logsumexp[..., None], "attention_weights": answer.weights}
    return arrays[name], 1.0, 0


def _errors_of_some(wrong: Wrong) -> Callable[[Callable[[np.ndarray], np.ndarray], float], np.ndarray]:
    """The function that returns the errors of some rows that are left beside a function and a cap."""
    batch, head, _ = (int(one[0]) for one in wrong.some(1))
    rows = np.flatnonzero(wrong.rows[batch, head])
    sample = Sample(np.array([batch]), np.array([head]), rows[:: -(-len(rows) // ROWS)])
    problem, sent = make_problem(wrong.case, sample), wrong.actual[sample.index]

    def left(function: Callable[[np.ndarray], np.ndarray], cap: float) -> np.ndarray:
        wrong.case.check()
        found = _capped_by(wrong.name, function, cap, problem, sent, sample)[0]
        return np.nan_to_num(sent - found, nan=0.0, posinf=0.0, neginf=0.0).ravel()

    return left


def _fitted(wrong: Wrong, cap: float, left: Callable[[float], np.ndarray]) -> tuple[float, float]:
    """The cap that leaves the least errors of some rows, and how far it may be from the true one.

    left: from a cap to the errors
    """

    def left_at(power: float) -> np.ndarray:
        return left(cap * 2.0**power)

    power = least_squares(left_at, np.arange(-4, 4.25, 0.5).tolist())
    slope = float(np.abs(left_at(power + NEAR) - left_at(power)).max()) / NEAR
    found = cap * 2.0**power
    return found, found * wrong.tolerance / slope if slope else math.inf
