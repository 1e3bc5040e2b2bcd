"""The last part of attention, from scores to outputs, for a sample of rows: what a kernel computes in its inner loop.

Axes: b, h, r: batch entries, heads and queries of the sample; k: all keys; e features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

F64: Final = np.dtype(np.float64)
# Keys whose products are summed up before the sum is rounded, as the depth of a matrix instruction of a GPU.
ACCUMULATED: Final = 16
# The largest weight of a row where weights are float8 (FlashAttention 3).
SCALED_WEIGHT: Final = 256


@dataclass(frozen=True, slots=True)
class Rounding:
    """The types that a kernel computes in and rounds to; None does not round.

    computes: of everything between; inputs: of query, key and value as given; operands: of these after norms and
    rotation; scaled_query: of the query, into which the scale times `folded` is folded; products: of query and key;
    scores: what the softmax gets, times `unit`; weights: before they are used; exponentials: before they are summed up;
    sums: of the sums over keys, after each `depth` of them; output: of what is returned; exp, tanh: how the
    exponentials and the softcap are computed
    """

    computes: np.dtype = F64
    inputs: Callable[[np.ndarray], np.ndarray] | None = None
    operands: np.dtype | None = None
    scaled_query: np.dtype | None = None
    folded: float = 1.0
    products: np.dtype | None = None
    scores: np.dtype | None = None
    unit: float = 1.0
    weights: np.dtype | None = None
    exponentials: np.dtype | None = None
    sums: np.dtype | None = None
    depth: int = ACCUMULATED
    output: np.dtype | None = None
    exp: Callable[[np.ndarray], np.ndarray] = np.exp
    tanh: Callable[[np.ndarray], np.ndarray] = np.tanh


@dataclass(frozen=True, eq=False, kw_only=True)
class Problem:
    """Scores and values of a sample, and all that is still to be done with them.

    scores:       (b, h, r, k), unscaled
    visible:      booleans that broadcast to the scores, None if all keys are visible
    added:        numbers that broadcast to the scores, None for none
    value:        (b, h, k, e); bad_values: (b, h, k), see Case
    scale:        one number, or (h, 1, 1)
    sinks:        (h, 1), (b, h, r) or None
    softcap_at:   what is capped: `unscaled`, `scaled` (right), `added` or `masked` scores
    scaled_bias, hidden_score: see Case
    """

    scores: np.ndarray
    visible: np.ndarray | None
    added: np.ndarray | None
    value: np.ndarray
    bad_values: np.ndarray | None
    scale: float | np.ndarray
    softcap: float | None
    softcap_at: str
    scaled_bias: bool
    hidden_score: float
    sinks: np.ndarray | None
    normalization: str
    rounding: Rounding

    @property
    def seen(self) -> np.ndarray:
        """(b, h, r, k), True where a key is visible."""
        return np.broadcast_to(np.array(True) if self.visible is None else self.visible, self.scores.shape)

    @property
    def empty(self) -> np.ndarray:
        """(b, h, r), True where a query sees no key."""
        seen = np.array(True)[None] if self.visible is None else self.visible
        return np.broadcast_to(np.logical_not(seen.any(axis=-1)), self.scores.shape[:-1])

    def changed(self, **fields: Any) -> Problem:
        """This problem with other fields."""
        return replace(self, **fields)


@dataclass(frozen=True, eq=False)
class Answer:
    """What a kernel returns for a sample. output: (b, h, r, e); logsumexp: (b, h, r); weights: (b, h, r, k)

    logsumexp is None for other normalizations than softmax; memo: what its parts add, see `merges`
    """

    output: np.ndarray
    logsumexp: np.ndarray | None = None
    weights: np.ndarray | None = None
    memo: dict[int, tuple[np.ndarray, ...]] = field(default_factory=dict, init=False)

    @property
    def nbytes(self) -> int:
        """The bytes of its arrays, and of what was computed of them."""
        own = (self.output, self.logsumexp, self.weights)
        return sum(array.nbytes for arrays in (own, *self.memo.values()) for array in arrays if array is not None)


# From a problem to its answer: the right one is `attention`.
Softmax = Callable[[Problem], Answer]


def attention(problem: Problem) -> Answer:
    """The right answer: softmax with the largest score subtracted, or what another normalization makes."""
    scores = masked_scores(problem)
    if problem.normalization == "sigmoid":
        weights = sigmoid(scores)
        return Answer(weighted(problem, weights), None, weights)
    if problem.normalization == "sum":
        visible = np.where(np.isneginf(scores), 0, scores)
        total = visible.sum(axis=-1, keepdims=True)
        weights = np.divide(visible, total, out=np.zeros_like(visible), where=total != 0)
        return Answer(weighted(problem, weights), None, weights)
    return softmax(problem, scores)


def without_values(problem: Problem) -> Answer:
    """The right weights and logsumexp; the output is that of the first feature only, which takes little time."""
    return attention(problem.changed(value=problem.value[..., :1], bad_values=None))


def weights_of(problem: Problem, scores: np.ndarray) -> np.ndarray:
    """The right weights of a softmax. scores: (b, h, r, k), of which nothing is hidden yet; they are overwritten"""
    weights = softmax(
        problem.changed(value=problem.value[..., :0], bad_values=None), hidden_scores(problem, scores)
    ).weights
    assert weights is not None
    return weights


def sigmoid(numbers: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)) of each number, also where exp overflows."""
    small = np.exp(-np.abs(numbers))
    return np.where(numbers >= 0, 1, small) / (1 + small)


def softmax(problem: Problem, scores: np.ndarray) -> Answer:
    """The answer from masked scores (b, h, r, k), which are overwritten: softmax with the largest score subtracted."""
    rounding, largest = problem.rounding, row_max(scores, problem.sinks)
    scores -= largest
    exponentials = np.exp(scores, out=scores) if rounding.exp is np.exp else rounding.exp(scores)
    if rounding.exponentials is not None:
        exponentials = rounded(exponentials, rounding.exponentials)
    total = row_sum(exponentials, rounding)
    if problem.sinks is not None:
        total = total + np.exp(problem.sinks[..., None] - largest)
    return finished(problem, exponentials, total, largest)


def finished(problem: Problem, exponentials: np.ndarray, total: np.ndarray, largest: np.ndarray) -> Answer:
    """The answer from exp(scores - largest), their sum and the number that was subtracted, (b, h, r, 1) each.

    The exponentials are overwritten.
    """
    has_sum = total != 0
    weights = np.divide(exponentials, total, out=exponentials, where=True if has_sum.all() else has_sum)
    np.copyto(weights, 0, where=np.logical_not(has_sum))
    with np.errstate(divide="ignore"):
        logsumexp = largest[..., 0] + np.log(total[..., 0])
    return Answer(weighted(problem, weights), logsumexp, weights)


def diluted(count: int | np.ndarray, _: Problem, answer: Answer) -> Answer:
    """The answer with so many more scores and values of 0 in each row, (b, h, r) or the same in all."""
    assert answer.logsumexp is not None
    with np.errstate(divide="ignore"):
        total = np.logaddexp(answer.logsumexp, np.log(count))
    factor = np.where(np.isneginf(answer.logsumexp), 1, np.exp(answer.logsumexp - total))[..., None]
    return Answer(answer.output * factor, total, None if answer.weights is None else answer.weights * factor)


def scaled_scores(problem: Problem) -> np.ndarray:
    """The scores (b, h, r, k), scaled, capped and with everything added, before anything is hidden: a new array."""
    scores, cap, rounding = problem.scores, problem.softcap, problem.rounding
    added, tanh = problem.added, rounding.tanh
    scores = scores if rounding.products is None else rounded(scores, rounding.products)
    if problem.softcap_at == "unscaled":
        scores = capped(scores, cap, tanh)
    if added is not None and problem.scaled_bias:
        scores = scores + added
    scores = scores * np.asarray(problem.scale, scores.dtype)
    if problem.softcap_at == "scaled":
        scores = capped(scores, cap, tanh)
    if added is not None and not problem.scaled_bias:
        scores += added
    if problem.softcap_at == "added":
        scores = capped(scores, cap, tanh)
    return scores if rounding.scores is None else rounded(scores * rounding.unit, rounding.scores) / rounding.unit


def masked_scores(problem: Problem) -> np.ndarray:
    """The scores (b, h, r, k) that the softmax is taken of: a new array."""
    return hidden_scores(problem, scaled_scores(problem))


def hidden_scores(problem: Problem, scores: np.ndarray) -> np.ndarray:
    """The scores that the softmax is taken of, from those that nothing is hidden of, which are overwritten."""
    if problem.visible is not None:
        np.copyto(scores, scores.dtype.type(problem.hidden_score), where=np.logical_not(problem.visible))
    return capped(scores, problem.softcap, problem.rounding.tanh) if problem.softcap_at == "masked" else scores


def capped(scores: np.ndarray, cap: float | None, tanh: Callable[[np.ndarray], np.ndarray] = np.tanh) -> np.ndarray:
    """cap · tanh(scores / cap); the scores themselves if cap is None."""
    if cap is None:
        return scores
    limit = scores.dtype.type(cap)
    found = scores / limit
    found = np.tanh(found, out=found) if tanh is np.tanh else tanh(found)
    found *= limit
    return np.asarray(found)


def row_max(scores: np.ndarray, sinks: np.ndarray | None) -> np.ndarray:
    """The largest score of each row (b, h, r, 1), sinks included; 0 for rows without any."""
    largest = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        largest = np.maximum(largest, sinks[..., None])
    return np.where(np.isneginf(largest), scores.dtype.type(0), largest)


def row_sum(numbers: np.ndarray, rounding: Rounding) -> np.ndarray:
    """The sums of the rows (b, h, r, 1)."""
    if rounding.sums is None:
        return numbers.sum(axis=-1, keepdims=True)
    total = np.zeros((*numbers.shape[:-1], 1), numbers.dtype)
    for start in range(0, numbers.shape[-1], rounding.depth):
        part = numbers[..., start : start + rounding.depth].sum(axis=-1, keepdims=True)
        total = rounded(total + rounded(part, rounding.sums), rounding.sums)
    return total


def weighted(problem: Problem, weights: np.ndarray) -> np.ndarray:
    """The sums of values (b, h, r, e) by weights; NaN where a value that is not finite has a weight."""
    rounding = problem.rounding
    if rounding.weights is not None:
        weights = _rounded_weights(weights, rounding.weights)
    if rounding.sums is None:
        found = weights @ problem.value
    else:
        found = np.zeros((*weights.shape[:-1], problem.value.shape[-1]), weights.dtype)
        for start in range(0, weights.shape[-1], rounding.depth):
            keys = slice(start, start + rounding.depth)
            part = weights[..., keys] @ problem.value[:, :, keys]
            found = rounded(found + rounded(part, rounding.sums), rounding.sums)
    if problem.bad_values is not None:
        poisoned = ((weights != 0) & problem.bad_values[:, :, None]).any(axis=-1)
        found = np.where(poisoned[..., None], np.nan, found)
    return np.asarray(found)


def _rounded_weights(weights: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Weights in a type; of 8 bits in parts of the largest of their row, times a power of two, as kernels have them."""
    if dtype.itemsize > 1:
        return rounded(weights, dtype)
    unit = np.maximum(weights.max(axis=-1, keepdims=True, initial=0), np.finfo(weights.dtype).tiny) / SCALED_WEIGHT
    return rounded(weights / unit, dtype) * unit


def rounded(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The numbers of an array rounded to a type, in the array's own type."""
    return array.astype(dtype).astype(array.dtype)
