"""Rounding that is too coarse. An output may resemble it, but never prove it: the order of rounding cannot be known.

So each has several cases, which round at other places and by other numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np

from attention_service.comparison.case import Case
from attention_service.comparison.errors import largest_number
from attention_service.comparison.floors import tokens
from attention_service.comparison.legal import LOG2E, legal_roundings
from attention_service.comparison.mutants.table import mutant
from attention_service.comparison.problem import ACCUMULATED, Answer, Problem, Rounding, attention, masked_scores

# Keys after which sums are rounded: those of a matrix instruction, and of a tile.
DEPTHS: Final = (ACCUMULATED, 128)
MOST: Final = largest_number(np.dtype(np.float16))
# Sums over fewer keys lose no more if they grow key by key; rows of a problem that such sums are computed for.
LONG: Final = 256
LONGEST: Final = 2**14
ROWS: Final = 4


def _plain(case: Case) -> Rounding:
    return legal_roundings(case.dtype)[0]


@mutant("precision.scores", "Scores are rounded to the type of the operands before the softmax.")
def precision_scores(case: Case) -> Iterator[Case]:
    if case.dtype.itemsize < 4:
        plain = _plain(case)
        yield case.changed(rounding=replace(plain, scores=case.dtype))
        yield case.changed(rounding=replace(plain, scores=case.dtype, unit=LOG2E))
        yield case.changed(rounding=replace(plain, products=case.dtype))


@mutant("precision.accumulate", "Sums over keys are kept in the type of the operands.")
def precision_accumulate(case: Case) -> Iterator[Case]:
    if case.dtype.itemsize < 4:
        for depth in DEPTHS:
            yield case.changed(rounding=replace(_plain(case), sums=case.dtype, depth=depth))
    if (
        case.dtype == np.float16
        and case.plan.normalization == "softmax"
        and LONG <= case.plan.sizes.key_length <= LONGEST
    ):
        yield case.changed(
            rounding=_plain(case), softmax=_running, detail="key by key, of weights that are not divided"
        )


def _running(problem: Problem) -> Answer:
    """Attention whose sum of exponentials times values is kept in float16 and grows key by key, beside that of
    exponentials in float32. A few rows say how large the error is; the others are those of `attention`."""
    answer, chosen = attention(problem), slice(None, None, -(-problem.scores.shape[2] // ROWS))
    scores = np.moveaxis(masked_scores(problem)[:, :, chosen], -1, 0)
    largest = np.maximum.accumulate(scores, axis=0)
    shift = np.where(np.isneginf(largest), 0, largest)
    change = np.exp(np.concatenate([np.full_like(scores[:1], -np.inf), largest[:-1]]) - shift)[..., None]
    changes, powers = (change != 1).any(axis=(1, 2, 3, 4)), np.exp(scores - shift)[..., None]
    values = np.moveaxis(problem.value, 2, 0)[:, :, :, None]
    grown = np.zeros((*scores.shape[1:], values.shape[-1]), scores.dtype)
    sums = grown.astype(np.float16)
    for key in range(len(scores)):
        if changes[key]:
            sums = (sums * change[key]).astype(np.float16)
        np.multiply(powers[key], values[key], out=grown)
        grown += sums
        sums[...] = grown
    total = np.exp(scores - shift[-1]).sum(axis=0)[..., None]
    if problem.sinks is not None:
        sinks = np.broadcast_to(problem.sinks, problem.scores.shape[:3])[..., chosen]
        total = total + np.exp(sinks - shift[-1])[..., None]
    output = answer.output.copy()
    found = np.divide(sums, total, out=np.zeros_like(grown), where=total > 0)
    output[:, :, chosen] = np.where(np.isnan(output[:, :, chosen]), np.nan, found)  # of values that are no numbers
    return replace(answer, output=output)


@mutant("precision.overflow16", "Products of query and key beyond 65504 become infinite, as in float16.")
def precision_overflow16(case: Case) -> Iterator[Case]:
    if case.dtype == np.float16:
        query, key = (tokens(case, role, worst=True).lengths.max() for role in ("query", "key"))
        if query * key > MOST:
            yield case.changed(softmax=_overflowing)


def _overflowing(problem: Problem) -> Answer:
    scores = problem.scores
    return attention(problem.changed(scores=np.where(np.abs(scores) > MOST, scores * np.inf, scores)))


@mutant("precision.float32", "A float64 request is computed in float32.")
def precision_float32(case: Case) -> Iterator[Case]:
    if case.dtype == np.float64:
        yield case.changed(rounding=legal_roundings(np.dtype(np.float32))[0])


@mutant("precision.inputs", "Query, key and value are rounded to 10 bits, as in TF32.")
def precision_inputs(case: Case) -> Iterator[Case]:
    if case.dtype == np.float32:
        yield case.changed(rounding=replace(_plain(case), inputs=tf32))


def tf32(array: np.ndarray) -> np.ndarray:
    """Numbers with the 10 bits after the point of TF32, the input type of matrix products of NVIDIA's GPUs."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    nearest = bits + np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1))
    return (nearest & np.uint32(0xFFFFE000)).view(np.float32)
