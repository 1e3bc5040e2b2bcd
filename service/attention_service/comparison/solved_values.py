"""The order in which a kernel reads values, where no usual one fits: least squares tell which values it used."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import numpy as np

from attention_service.comparison.problem import attention
from attention_service.comparison.sample import BLOCK, Sample
from attention_service.comparison.solve import make_problem, values_of
from attention_service.comparison.sources import Source, with_ends
from attention_service.comparison.wrong import Wrong

# More keys, rows and features are not solved for.
MAX_KEYS: Final = 1024
MAX_ROWS: Final = 2048
FEATURES: Final = 32
# A value is that of a key if it is as close as so many uncertainties, and the next one so many times further away.
CLOSE: Final = 4.0
APART: Final = 4.0
# Orders repeat after so many keys, each seen at least so often; the share of keys of which it must be true.
PERIODS: Final = (1, 2, 4, 8, 16, 32, 64)
SEEN: Final = 2
SHARE: Final = 0.9
# How often rows are solved again without those that fit least.
ROUNDS: Final = 4
LEAST_LEFT: Final = 1e-6


def solved_sources(wrong: Wrong, batch: np.ndarray, head: np.ndarray) -> Iterator[Source]:
    """The order that repeats soonest and is that of the values which the rows of a key/value head were made of."""
    found = _order(wrong, batch, head)
    if found is None:
        return
    keys, read = found
    count = wrong.case.plan.sizes.key_length
    for period in (one for one in PERIODS if one * SEEN <= len(keys)):
        left, steps = keys % period, read - keys
        table = [int(_most_often(steps[left == one])) for one in range(period) if (left == one).any()]
        if len(table) == period and (np.array(table)[left] == steps).mean() >= SHARE:
            everything = np.arange(count)
            step = f" + {table}[j mod {period}]" if period > 1 else f"{table[0]:+d}"
            text = f"the value of key j{step}"
            lost = period * math.log2(2 * count)
            yield from with_ends(text, everything + np.array(table)[everything % period], ("own", "zero"), lost)
            return


def _most_often(numbers: np.ndarray) -> int:
    found, counts = np.unique(numbers, return_counts=True)
    return int(found[counts.argmax()])


def _order(wrong: Wrong, batch: np.ndarray, head: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Keys whose values are certain, and whose values these are. None if there are too few rows, or too many keys."""
    case, sizes = wrong.case, wrong.case.plan.sizes
    heads = np.flatnonzero(case.value_of_head == head)
    most = min(MAX_ROWS, BLOCK // case.workers // sizes.key_length) // len(heads)
    if sizes.key_length > MAX_KEYS or min(most, sizes.query_length) * len(heads) < sizes.key_length:
        return None
    case.check()
    rows = np.unique(np.linspace(0, sizes.query_length - 1, min(most, sizes.query_length)).astype(int))
    sample = Sample(batch, heads, rows)
    weights = attention(make_problem(case, sample)).weights
    assert weights is not None
    features = np.unique(np.linspace(0, sizes.value_dim - 1, min(FEATURES, sizes.value_dim)).astype(int))
    sent = wrong.actual[sample.index][..., features].reshape(-1, len(features))
    used = _solved(weights.reshape(len(sent), -1), sent, wrong.tolerance)
    return None if used is None else _nearest(*used, values_of(case, batch, head)[0, 0][:, features])


def _solved(weights: np.ndarray, sent: np.ndarray, tolerance: float) -> tuple[np.ndarray, np.ndarray] | None:
    """The values (k, f) that rows (r, f) were made of, and the most of their errors (k,); None if rows are too few.

    Rows that fit least are left out: they may have another mistake.
    """
    finite = np.isfinite(sent).all(axis=-1)
    weights, sent = weights[finite], sent[finite]
    triangle = products = np.empty((0, 0))
    for _ in range(ROUNDS):
        if len(weights) < weights.shape[1]:
            break
        orthogonal, triangle = np.linalg.qr(weights)
        products = orthogonal.T @ sent
        # What is left of a row if it has no part in the fit.
        left = np.maximum(1 - np.square(orthogonal).sum(axis=1), LEAST_LEFT)
        apart = np.abs(sent - orthogonal @ products).max(axis=1) / left
        kept = apart <= max(tolerance, float(np.quantile(apart, SHARE)))
        if kept.all():
            break
        weights, sent = weights[kept], sent[kept]
    try:
        inverse = np.linalg.inv(triangle)
    except np.linalg.LinAlgError:
        return None
    unsure = CLOSE * tolerance * (1 + np.linalg.norm(inverse, axis=1))
    return (inverse @ products, unsure) if len(inverse) else None


def _nearest(used: np.ndarray, unsure: np.ndarray, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The keys that are certain, and whose value (k, f) each used one (k, f) is. unsure: (k,), the most of its error"""
    squares = np.square(used).sum(axis=1)[:, None] + np.square(value).sum(axis=1) - 2 * used @ value.T
    squares = np.nan_to_num(squares, nan=np.inf)
    order = np.argpartition(squares, 1, axis=1)[:, :2]
    two = np.sqrt(np.maximum(np.take_along_axis(squares, order, axis=1), 0) / value.shape[1])
    sure = (two[:, 0] <= unsure) & (two[:, 1] > APART * unsure)
    return np.flatnonzero(sure), order[sure, 0]
