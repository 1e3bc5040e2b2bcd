"""Mistakes of the softmax and of its tiles."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from attention_service.attention.arrays import compute_dtype
from attention_service.comparison.case import Case
from attention_service.comparison.mutants.table import mutant, tiles
from attention_service.comparison.problem import (
    Answer,
    Problem,
    Rounding,
    diluted,
    finished,
    masked_scores,
    row_max,
    sigmoid,
    softmax,
    weighted,
)
from attention_service.comparison.solve import can_solve_all_queries


def applies(case: Case) -> bool:
    """True if the weights are those of a softmax."""
    return case.plan.normalization == "softmax"


def _by_each_tile(case: Case, wrong: Callable[..., Answer]) -> Iterator[Case]:
    """The case with a wrong softmax for each size of tiles. wrong: takes the size as `tile`"""
    if applies(case):
        for tile in tiles(case):
            yield case.changed(softmax=partial(wrong, tile=tile), tile=tile, detail=f"of {tile} keys")


@mutant("softmax.over_queries", "The softmax is taken over the queries, not over the keys.")
def softmax_over_queries(case: Case) -> Iterator[Case]:
    if applies(case) and case.sinks is None and can_solve_all_queries(case):
        yield case.changed(over_queries=True)


@mutant("softmax.no_max", "The largest score is not subtracted, so that exponentials overflow.")
def softmax_no_max(case: Case) -> Iterator[Case]:
    if applies(case):
        yield case.changed(softmax=no_max, rounding=Rounding(computes=compute_dtype(case.dtype)))


def no_max(problem: Problem) -> Answer:
    """Softmax without subtracting the largest score."""
    scores = masked_scores(problem)
    weights = np.exp(scores, out=scores)
    total = weights.sum(axis=-1, keepdims=True)
    if problem.sinks is not None:
        total = total + np.exp(problem.sinks[..., None])
    weights /= total
    np.copyto(weights, 0, where=problem.empty[..., None])
    return Answer(weighted(problem, weights), np.log(total[..., 0]), weights)


def _by_tiles(problem: Problem, tile: int, *, rescale_sum: bool, rescale_output: bool) -> Answer:
    """Online softmax that does not rescale what earlier tiles of keys added, as the largest score grows."""
    scores = masked_scores(problem)
    largest = np.full((*scores.shape[:-1], 1), -np.inf, scores.dtype)
    if problem.sinks is not None:
        largest = np.maximum(largest, problem.sinks[..., None])
    total = np.zeros_like(largest)
    if problem.sinks is not None:
        total = total + 1  # exp(sink - sink)
    weights = np.zeros_like(scores)
    for start in range(0, scores.shape[-1], tile):
        keys = slice(start, start + tile)
        new = np.maximum(largest, scores[..., keys].max(axis=-1, keepdims=True))
        shift = np.where(np.isneginf(new), 0, new)
        factor = np.exp(np.where(np.isneginf(largest), -np.inf, largest - shift))
        factor = np.where(np.isneginf(largest), 1, factor)  # nothing was added yet
        exponentials = np.exp(scores[..., keys] - shift)
        total = (total * factor if rescale_sum else total) + exponentials.sum(axis=-1, keepdims=True)
        if rescale_output:
            weights[..., :start] *= factor  # the others are 0
        weights[..., keys] = exponentials
        largest = new
    return finished(problem, weights, total, np.where(np.isneginf(largest), 0, largest))


@mutant(
    "softmax.no_rescale",
    "Neither sum nor accumulator is rescaled when a tile of keys has a larger score.",
    by_tile=True,
)
def softmax_no_rescale(case: Case) -> Iterator[Case]:
    return _by_each_tile(case, partial(_by_tiles, rescale_sum=False, rescale_output=False))


@mutant(
    "softmax.accumulator_no_rescale",
    "The accumulator is not rescaled when a tile of keys has a larger score.",
    by_tile=True,
)
def softmax_accumulator_no_rescale(case: Case) -> Iterator[Case]:
    return _by_each_tile(case, partial(_by_tiles, rescale_sum=True, rescale_output=False))


def _in_last_tile(scores: np.ndarray, tile: int) -> np.ndarray:
    """True (b, h, r, k) for the keys of the last tile that has visible ones."""
    keys = scores.shape[-1]
    seen = scores != -np.inf
    last = np.where(seen.any(axis=-1), keys - 1 - seen[..., ::-1].argmax(axis=-1), -1)
    found: np.ndarray = np.arange(keys) // tile == last[..., None] // tile
    return found


def _last_tile(problem: Problem, tile: int) -> Answer:
    """Softmax over the last tile of keys that has visible ones."""
    scores = masked_scores(problem)
    np.copyto(scores, -np.inf, where=np.logical_not(_in_last_tile(scores, tile)))
    return softmax(problem, scores)


@mutant("softmax.last_tile", "The softmax is taken over the last tile of keys only.", by_tile=True)
def softmax_last_tile(case: Case) -> Iterator[Case]:
    return _by_each_tile(case, _last_tile)


def _denominator_last_tile(problem: Problem, tile: int) -> Answer:
    """Softmax whose weights are divided by the sum of the last tile of keys with visible ones."""
    scores = masked_scores(problem)
    largest, is_last = row_max(scores, problem.sinks), _in_last_tile(scores, tile)
    scores -= largest
    exponentials = np.exp(scores, out=scores)
    total = np.where(is_last, exponentials, 0).sum(axis=-1, keepdims=True)
    return finished(problem, exponentials, total, largest)


@mutant(
    "softmax.denominator_last_tile",
    "The weights are divided by the sum over the last tile of keys only.",
    by_tile=True,
)
def softmax_denominator_last_tile(case: Case) -> Iterator[Case]:
    return _by_each_tile(case, _denominator_last_tile)


@mutant("softmax.padded_lanes", "Scores of 0 that fill up the last tile count in the sum.", by_tile=True)
def softmax_padded_lanes(case: Case) -> Iterator[Case]:
    for tile in case.tiles:
        lanes = -case.plan.sizes.key_length % tile
        if lanes and applies(case):
            yield case.edited(partial(diluted, lanes)).changed(tile=tile, detail=f"{lanes} in a tile of {tile} keys")


@mutant("softmax.unnormalized", "The output is not divided by the sum of the exponentials.")
def softmax_unnormalized(case: Case) -> Iterator[Case]:
    if applies(case):
        yield case.changed(softmax=unnormalized)


def unnormalized(problem: Problem) -> Answer:
    """The sums of exponentials times values, not divided."""
    scores = masked_scores(problem)
    largest = row_max(scores, problem.sinks)
    scores -= largest
    exponentials = np.exp(scores, out=scores)
    total = exponentials.sum(axis=-1)
    return Answer(weighted(problem, exponentials), largest[..., 0] + np.log(total), exponentials)


@mutant("softmax.base2", "The exponential is exp2, but the scale does not hold log2(e).")
def softmax_base2(case: Case) -> Iterator[Case]:
    if applies(case):
        yield case.changed(softmax=base2)


def base2(problem: Problem) -> Answer:
    """Softmax with powers of 2."""
    scores = masked_scores(problem)
    largest = row_max(scores, problem.sinks)
    scores -= largest
    exponentials = np.exp2(scores, out=scores)
    total = exponentials.sum(axis=-1, keepdims=True)
    if problem.sinks is not None:
        total = total + np.exp2(problem.sinks[..., None] - largest)
    found = finished(problem, exponentials, total, largest)
    return replace(found, logsumexp=largest[..., 0] + np.log2(total[..., 0]) * math.log(2))


@mutant("sigmoid.softmax", "The weights are the softmax of the scores, not the sigmoid of each.")
def sigmoid_softmax(case: Case) -> Iterator[Case]:
    if case.plan.normalization == "sigmoid":
        yield case.changed(
            {"normalization": "softmax"}, softmax=lambda problem: softmax(problem, masked_scores(problem))
        )


@mutant("sigmoid.biased", "The logarithm of the number of keys is subtracted from the scores before the sigmoid.")
def sigmoid_biased(case: Case) -> Iterator[Case]:
    if case.plan.normalization == "sigmoid" and case.plan.sizes.key_length > 1:
        yield case.changed(softmax=biased)


def biased(problem: Problem) -> Answer:
    """Sigmoid of the scores with -ln k added, which makes the weights of a row of small scores sum to about one."""
    scores = masked_scores(problem)
    weights = sigmoid(scores - math.log(problem.value.shape[2]))
    return Answer(weighted(problem, weights), None, weights)
