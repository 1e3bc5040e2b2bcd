"""Mistakes of merging parts of the keys, whose attention was computed apart: split-KV, cascades, rings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

import numpy as np

from attention_service.comparison.case import TILES, Case
from attention_service.comparison.mutants.softmax import applies
from attention_service.comparison.mutants.table import SPLITS, mutant
from attention_service.comparison.problem import Answer, Problem, diluted

# Keys are cut into at most so many parts.
MAX_PARTS: Final = 16


def _parts(problem: Problem, answer: Answer, size: int) -> tuple[np.ndarray, ...]:
    """What parts of so many keys add to an answer, kept with it.

    The sums of values by their weights (b, h, p, r, e); the sums of the weights (b, h, p, r), that of the sink in the
    first part; True where a query sees no key
    """
    if size in answer.memo:
        return answer.memo[size]
    assert answer.weights is not None
    (b, h, r, k), e = answer.weights.shape, problem.value.shape[-1]
    count = -(-k // size)
    cut = [(0, 0), (0, 0), (0, 0), (0, count * size - k)]
    weights = np.pad(answer.weights, cut).reshape(b, h, r, count, size).swapaxes(2, 3)
    value = np.pad(problem.value, [cut[0], cut[1], cut[3], cut[0]]).reshape(b, h, count, size, e)
    totals = weights.sum(axis=-1)
    if problem.sinks is not None:
        totals[:, :, 0] += np.maximum(0, 1 - totals.sum(axis=2))
    seen = np.pad(problem.seen, cut).reshape(b, h, r, count, size).any(axis=-1)
    return answer.memo.setdefault(size, (weights @ value, totals, np.logical_not(seen).swapaxes(2, 3)))


def _merged(case: Case, weigh: Callable[..., np.ndarray], detail: str = "", base: float = 0.0) -> Iterator[Case]:
    """The case whose parts are merged by other weights.

    weigh: from weights (b, h, p, r) to those of the mistake
    base: c if the logsumexp is ln Σ exp(c x) / c of those x of the parts, else 0
    """

    def edit(size: int, problem: Problem, answer: Answer) -> Answer:
        assert answer.logsumexp is not None
        sums, weights, _ = _parts(problem, answer, size)
        shares, found = weigh(weights), answer.logsumexp
        total = shares.sum(axis=2)
        factors = np.divide(shares, weights * total[:, :, None], out=np.zeros_like(shares), where=weights > 0)
        output = np.einsum("bhpr,bhpre->bhre", factors, sums)
        if base:
            found = np.where(total > 0, found + np.log(total) / base, found)
        return Answer(np.where(np.isnan(answer.output), np.nan, output), found, answer.weights)

    return _of_each_size(case, edit, detail)


def _of_each_size(case: Case, edit: Callable[[int, Problem, Answer], Answer], detail: str = "") -> Iterator[Case]:
    """The case edited for parts of each size that is tried: equal parts, then tiles."""
    keys = case.plan.sizes.key_length
    for size in dict.fromkeys((*(-(-keys // splits) for splits in SPLITS), *reversed(TILES))):
        if applies(case) and size < keys <= MAX_PARTS * size:
            yield case.edited(partial(edit, size)).changed(detail=f"of {size} keys{detail}")


@mutant("merge.base2", "Parts of the keys are merged by logsumexps that are taken for those of another base.")
def merge_base2(case: Case) -> Iterator[Case]:
    for base, detail in ((math.log(2), ", powers of 2"), (math.log2(math.e), ", powers of e")):
        yield from _merged(case, lambda weights, base=base: weights**base, detail, base)


@mutant("merge.unweighted", "The outputs of parts of the keys are averaged, whatever their logsumexps.")
def merge_unweighted(case: Case) -> Iterator[Case]:
    yield from _merged(case, np.ones_like)
    if case.terms:
        yield from _merged(case, lambda weights: np.where(weights > 0, 1.0, 0.0), ", those with a visible key")


@mutant("merge.empty_part", "A part of the keys of which a query sees none is merged as if its logsumexp were 0.")
def merge_empty_part(case: Case) -> Iterator[Case]:
    def edit(size: int, problem: Problem, answer: Answer) -> Answer:
        return diluted(_parts(problem, answer, size)[2].sum(axis=2), problem, answer)

    if case.terms:
        yield from _of_each_size(case, edit)
