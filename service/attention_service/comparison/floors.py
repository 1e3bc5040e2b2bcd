"""How far right kernels are apart because they sum in another order: the least baseline of each array.

It is counted in steps of ε/4, where ε is that of the type that is computed in. A sum of n products x · y is right
within (√n + 2) · |x| · |y| steps, where |x| and |y| are the lengths of the vectors: errors add up like random numbers,
and they are those of the products even where the sum itself is small.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from attention_service.attention.arrays import compute_dtype
from attention_service.attention.outputs import row_of
from attention_service.comparison.case import Case
from attention_service.comparison.errors import epsilon, largest
from attention_service.comparison.legal import EXP2_ERROR, TANH_ERROR
from attention_service.comparison.problem import (
    Answer,
    Problem,
    attention,
    masked_scores,
    scaled_scores,
    sigmoid,
    weights_of,
)
from attention_service.comparison.sample import Sample, blocks, everything
from attention_service.comparison.solve import make_problem, operand, spread_of_scores, stepped

# The steps where a sum of scores cannot be told from 0, so that right weights and outputs may have any size.
UNKNOWN: Final = 1e250
# Such a sum has an error of at least this part of itself.
UNTOLD: Final = 1 / 16
# The error of most sums of n products, for each |x| · |y|: only the worst have √n + 2.
TYPICAL: Final = 3.0
# Rows whose rounded weights and scores are looked at: those whose values may be moved most. Right outputs are within
# CORRECT times so many root mean squares of such errors. Few legal ones may all be small by chance.
MOVED_ROWS: Final = 8
# Numbers of their values that are looked at at a time.
MOVED: Final = 2**16
SPREADS: Final = 2.0
# The root mean square of the relative errors of rounding, in ε.
RELATIVE: Final = 0.21
# The error of a sum of equal numbers that are added one after the other, for each of them: all may be rounded the same
# way. The largest is n / 2 steps for n numbers, as that of torch's SDPA of one query on a CPU is.
DRIFT: Final = 1 / 3


@dataclass(frozen=True)
class Tokens:
    """Query, keys or values (b, heads, l) after their steps. steps: the error of a number of each vector"""

    lengths: np.ndarray
    steps: np.ndarray


@dataclass(frozen=True)
class ErrorSteps:
    """The errors of a sample in steps: of visible scores, of weights, of the outputs of heads, and of sums over keys.

    legal: of the logsumexp by the liberties of half types, not in steps, see `_error_of_liberties`
    """

    scores: float
    weights: float
    outputs: float
    sums: float
    legal: float = 0.0


def step(dtype: np.dtype) -> float:
    """One step, for the type of a request."""
    return epsilon(compute_dtype(dtype)) / 4


def floors(
    case: Case, plain: Case, sample: Sample, right: Mapping[str, np.ndarray], weights: np.ndarray | None = None
) -> dict[str, float]:
    """The least baseline of output, logsumexp and weights, as far as they are in `right`.

    The error of the logsumexp is that of the scores, and √k + |logsumexp| for the sum over k keys; in half types at
    least that of the liberties. A gate multiplies that of the output, and so does the longest row of an output map.

    plain: the case in the types of a plain computation; weights: what this has, as of `right_weights`
    """
    found = steps_of(case, plain, sample, of_scores="logsumexp" in right, weights=weights)
    outputs = _error_after_output_steps(case, sample, found.outputs)
    outputs *= 1.0 if case.gate is None else largest(case.gate)
    joins = case.plan.roles.output_map
    if joins is not None and "output" in right:
        longest = max(1.0, float(np.linalg.norm(joins.weight, axis=1).max()))
        outputs = max(outputs * longest, found.weights * largest(right["output"]))
    kept = dict.fromkeys(right, found.weights) | {"output": outputs}
    if "logsumexp" in right:
        kept["logsumexp"] = found.scores + found.sums + largest(right["logsumexp"])
    return {name: _floor(case, name, kept[name], found.legal) for name in right}


def right_weights(case: Case, answer: Answer) -> np.ndarray | None:
    """The weights of an answer if they are those of the softmax of the case's scores; None if they may be others."""
    is_right = case.softmax is attention and case.plan.normalization == "softmax"
    is_right = is_right and not (case.over_queries or case.edits or case.of_whole)
    is_right = is_right and np.array_equal(case.head_order, np.arange(len(case.head_order)))
    return answer.weights if is_right and case.rounding.exponentials is None else None


def _error_after_output_steps(case: Case, sample: Sample, errors: float) -> float:
    """The error of head outputs after their steps. errors: that before; rows that see no key have none"""
    if not case.steps["output"]:
        return errors
    with np.errstate(all="ignore"):
        array = attention(make_problem(case, sample)).output
        after = np.where((array == 0).all(axis=-1), 0, errors)
        for whole in case.steps["output"]:
            step = whole.part(sample.batches, sample.heads, sample.rows)
            after = step.error(array, after, epsilon(compute_dtype(case.dtype)))
            array = stepped([step], array)
    return largest(after)


def floors_of_others(case: Case, reference: Mapping[str, np.ndarray], names: Collection[str]) -> dict[str, float]:
    """The least baselines of arrays that the service computes on its way, by name. reference: of all rows"""
    sizes, scale = case.plan.sizes, float(np.max(np.abs(case.scale)))
    query, key = tokens(case, "query", worst=True), tokens(case, "key", worst=True)
    steps = [steps_of(case, case, block, of_scores=True) for block in blocks(case, everything(case))]
    kinds = ("scores", "weights", "outputs", "sums", "legal")
    scores, weights, outputs, sums, legal = (max(getattr(one, name) for one in steps) for name in kinds)
    lengths = largest(query.lengths), largest(key.lengths)
    products = _sum_steps(case) * (lengths[0] * lengths[1] + _largest_product(case, lengths[0]))
    products += largest(query.steps) * lengths[1] + lengths[0] * largest(key.steps)
    sums += scores
    keys, values = largest(key.steps), largest(_steps_of_tokens(case, "value", worst=True))
    # The part that does not depend on the largest number of the array, and what this number is multiplied by.
    made: dict[str, tuple[float, float]] = {
        "query": (largest(query.steps), 0),
        "key": (keys, 0),
        "present_key": (keys, 0),
        "value": (values, 0),
        "present_value": (values, 0),
        "scores": (products, 0),
        "scaled_scores": (products * scale, 2),
        "capped_scores": (products * scale, 4),
        "masked_scores": (scores, 4),
        "logsumexp": (sums, 1),
        "entropy": (1 + sums, 2 * (1 + sums)),
        "received": (weights, weights + math.sqrt(sizes.query_length)),
        "head_outputs": (outputs, 0),
    }
    of_stages = {"scores": (scores, 4.0), "row_sums": (sums, 4.0), "heads": (outputs, 0.0)}  # those without a row above
    rows = {name: made.get(name, of_stages.get(row_of(name).step, (weights, 0.0))) for name in names}
    return {
        name: _floor(case, name, fixed + factor * largest(reference[name]), legal)
        for name, (fixed, factor) in rows.items()
    }


def _floor(case: Case, name: str, steps: float, legal: float) -> float:
    """The least baseline of an array, from its error in steps. legal: see ErrorSteps"""
    return min(max(steps * step(case.dtype), legal if name == "logsumexp" else 0.0), UNKNOWN)


def steps_of(
    case: Case, plain: Case, sample: Sample, *, of_scores: bool, weights: np.ndarray | None = None
) -> ErrorSteps:
    """The errors of a sample. of_scores: False to leave those of scores out if nothing else needs them

    weights: of the softmax of the plain case, (b, h, r, k), None to compute them

    That of weights is √k + |score| or |q| · |k|, and what they inherit from query and key after their maps and steps,
    as the root of both squares; each counts as `_by_weight` says. That of outputs is the same times max |v| and the
    sum of the weights, which is 1 for a softmax, and the error of the values. Where scores are divided by their sum t,
    its error e counts, too: each weight s/t has an error of that of s, and of |s| · e / |t|, over |t|.
    """
    problem = make_problem(replace(plain, of_whole=None), sample)
    unit, is_softmax = step(case.dtype), problem.normalization == "softmax"
    with np.errstate(all="ignore"):
        scores = scaled_scores(problem)
        if is_softmax and weights is None:
            weights = weights_of(problem, scores.copy())
        scores = _visible_only(problem, scores).astype(np.float64, copy=False)
        products, inherited = _errors_of_scores(case, sample, problem)
        root, value = math.sqrt(case.plan.sizes.key_length), _largest_visible_value(problem)
        root += 0 if weights is None else DRIFT * _equal_neighbours(weights)
        errors, legal = np.zeros(()), 0.0
        if of_scores and case.dtype.itemsize < 4:
            legal = _error_of_liberties(case, sample, problem, weights)
        if of_scores or problem.normalization == "sum":
            errors = _sum_steps(case) * products + inherited + 2 * np.abs(scores)
            errors = _by_weight(errors, weights)
        inexact = largest(_steps_of_tokens(case, "value", worst=False))
        if problem.normalization == "sum":
            return ErrorSteps(largest(errors), *_of_quotients(scores, errors, value, inexact, unit), root, legal)
        total = 1.0
        if problem.normalization == "sigmoid":
            total = max(1.0, largest(np.where(problem.seen, sigmoid(masked_scores(problem)), 0).sum(axis=-1)))
        least = 0.0
        if is_softmax:
            if weights is not None and case.dtype.itemsize < 4:
                least = SPREADS * _moved_outputs(case, problem, weights, products)
            scores = np.abs(scores, out=scores)
            scores, products, inherited = (_by_weight(one, weights) for one in (scores, products, inherited))
        moved = math.hypot(max(root + largest(scores), largest(products)), largest(inherited))
        outputs = max((moved * value + inexact) * total, least / unit)
        return ErrorSteps(largest(errors), moved, outputs, root, legal)


def _moved_outputs(case: Case, problem: Problem, weights: np.ndarray, products: np.ndarray) -> float:
    """The largest root mean square of the errors of outputs by weights that are rounded before the product with the
    values, but the largest, which is 1, and by the query that is rounded after it was multiplied by the scale.

    weights, products: (b, h, r, k), the latter |q| · |k|, scaled. Of the rows whose outputs may be moved most.
    """
    value = problem.value
    if not (value.shape[2] and value.shape[3]):
        return 0.0
    most = np.maximum(value.max(axis=-1), -value.min(axis=-1))[:, :, None]  # b h 1 k
    moved = np.vecdot(np.square(weights), np.square(most))
    chosen = np.unravel_index(np.argsort(moved, axis=None)[-MOVED_ROWS:], moved.shape)
    own = weights[chosen].astype(np.float64)
    squares = np.square(own)
    of_scores = squares * np.square(products[chosen]) / case.plan.sizes.head_dim * ("folded_scale" in case.liberties)
    squares *= "rounded_weights" in case.liberties
    squares[np.arange(len(own)), own.argmax(axis=-1)] = 0
    found, step = 0.0, max(1, MOVED // own.size)
    for start in range(0, value.shape[3], step):
        part = value[chosen[0], chosen[1], :, start : start + step].astype(np.float64)
        apart = part - np.vecmat(own, part)[:, None]
        found = max(found, largest(np.vecmat(squares, np.square(part)) + np.vecmat(of_scores, np.square(apart))))
    return RELATIVE * epsilon(case.dtype) * math.sqrt(found)


def _equal_neighbours(weights: np.ndarray) -> int:
    """The most keys of a row that have a weight, and that of the key before."""
    later = weights[..., 1:]
    return int(np.count_nonzero((later == weights[..., :-1]) & (later > 0), axis=-1).max(initial=0))


def _by_weight(errors: np.ndarray, weights: np.ndarray | None) -> np.ndarray:
    """What the errors of the scores of a row, (b, h, r, k) or one 0, make of its softmax, (b, h, r).

    An error counts by the weight of its key, for the key itself and for the sum: Σ w · (error + Σ w · error). So a bias
    of -1e9, which hides a key, has none. At most the largest error of a key that has a weight.
    """
    if not errors.ndim or weights is None:  # of scores that are not those of a softmax
        return errors
    counted = np.where(weights > 0, errors, 0)
    most = counted.max(axis=-1)
    counted *= weights
    found: np.ndarray = np.minimum(2 * counted.sum(axis=-1), most)
    return found


def _visible_only(problem: Problem, numbers: np.ndarray) -> np.ndarray:
    """Numbers (b, h, r, k), which are overwritten: 0 where a key is hidden."""
    if problem.visible is not None:
        np.copyto(numbers, 0, where=np.logical_not(problem.visible))
    return numbers


def _largest_visible_value(problem: Problem) -> float:
    """The largest number in the values of the keys that some query sees. Values of hidden keys count for nothing."""
    if problem.visible is None:
        return largest(problem.value)
    visible = np.asarray(problem.visible.any(axis=2))
    return largest(problem.value if visible.all() else np.where(visible[..., None], problem.value, 0))


def _error_of_liberties(case: Case, sample: Sample, problem: Problem, weights: np.ndarray | None) -> float:
    """The error of a logsumexp by what right kernels of half types do. weights: of a softmax, else None

    - The query is rounded after it was multiplied by the scale and log2(e): each number by ε/2 of itself, those of a
      score all alike (|score|) or at random (√Σ(q·k)²).
    - Weights are rounded before they are summed up: each by ε/2 of itself at random, but the largest, which is 1.
    - exp2 and tanh are approximated: all weights but the largest, and all capped scores, may be off alike.
    """
    error = 0.0
    if "folded_scale" in case.liberties:
        products = np.maximum(np.abs(problem.scores), spread_of_scores(case, sample))
        error += epsilon(case.dtype) / 2 * largest(np.where(problem.seen, products * np.abs(problem.scale), 0))
    if problem.softcap is not None and "approximate_tanh" in case.liberties:
        error += TANH_ERROR * largest(np.where(problem.seen, scaled_scores(problem.changed(added=None)), 0))
    if weights is not None:
        most = weights.max(axis=-1)
        if "rounded_sum" in case.liberties:
            others = np.square(weights).sum(axis=-1) - np.square(most)
            error += epsilon(case.dtype) / 2 * math.sqrt(max(0.0, largest(others)))
        if "approximate_exp2" in case.liberties:
            error += EXP2_ERROR * largest(np.maximum(weights.sum(axis=-1) - most, 0))
    return error


def _largest_product(case: Case, length: float) -> float:
    """A bound on what terms add to the product of a query of at most this norm and a key."""
    return float(sum(np.max(term.largest_product(length)) for term in case.terms))


def _sum_steps(case: Case) -> float:
    """The error of a product of query and key, for each |q| · |k|."""
    return math.sqrt(case.plan.sizes.head_dim) + 2


def _of_quotients(
    scores: np.ndarray, errors: np.ndarray, value: float, inexact: float, unit: float
) -> tuple[float, float]:
    """The errors of weights and outputs where scores are divided by their sum. inexact: the error of a value"""
    total, sizes = np.abs(scores.sum(axis=-1, keepdims=True)), np.abs(scores).sum(axis=-1, keepdims=True)
    root = math.sqrt(scores.shape[-1])
    all_errors = errors.sum(axis=-1, keepdims=True) + root * sizes
    if (all_errors * unit >= UNTOLD * total)[sizes > 0].any():
        return UNKNOWN, UNKNOWN
    with_sum = np.where(sizes > 0, total, 1)
    weights = (errors + np.abs(scores) * (1 + all_errors / with_sum)) / with_sum
    return largest(weights), value * (largest(weights.sum(axis=-1)) + root * largest(sizes / with_sum)) + inexact * (
        largest(sizes / with_sum)
    )


def _errors_of_scores(case: Case, sample: Sample, problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """|q| · |k| and what the errors of q and k make of it, (b, h, r, k) or one 0, scaled; 0 where no key is visible."""
    query, key = tokens(case, "query", worst=False), tokens(case, "key", worst=False)
    rows, columns = sample.index, np.ix_(sample.batches, case.key_of_head[sample.heads])
    kept = slice(None) if sample.columns is None else sample.columns
    lengths, steps = (array[columns][:, :, None, kept] for array in (key.lengths, key.steps))
    scale = np.abs(case.scale[sample.heads][:, None, None] if isinstance(case.scale, np.ndarray) else case.scale)
    own = query.lengths[rows][..., None] * scale
    added, growth = _largest_product(case, 0.0), _largest_product(case, 1.0)
    growth -= added  # what terms add is linear in the norm of the query
    products = own * (lengths + growth)
    products += added * scale
    products = _visible_only(problem, products)
    query_steps = query.steps[rows][..., None] * scale
    if not (query_steps.any() or steps.any()):
        return products, np.zeros(())
    return products, _visible_only(problem, own * steps + query_steps * (lengths + growth))


def tokens(case: Case, role: str, *, worst: bool) -> Tokens:
    """The tokens of query or key. Those of the past, which no step changes, have no error.

    worst: True for the error of the worst number, False for that of most numbers, whose errors are summed up
    """
    return case.once(f"tokens {role} {worst}", lambda: _tokens(case, role, worst))


def _tokens(case: Case, role: str, worst: bool) -> Tokens:
    with np.errstate(all="ignore"):
        lengths, steps = _lengths(operand(case, role)), _steps_of_tokens(case, role, worst=worst)
        if role == "key" and case.past_length:
            past = _lengths(case.past_key)
            lengths, steps = np.concatenate([past, lengths], axis=2), np.concatenate([0 * past, steps], axis=2)
        return Tokens(lengths, steps)


def _lengths(array: np.ndarray) -> np.ndarray:
    array = array.astype(np.float64, copy=False)
    found: np.ndarray = np.sqrt(np.vecdot(array, array))
    return found


def _steps_of_tokens(case: Case, role: str, *, worst: bool) -> np.ndarray:
    """The error (b, heads, l) of the numbers of each new token. worst: see `tokens`"""
    return case.once(f"steps {role} {worst}", lambda: _errors_after_steps(case, role, worst))


def _errors_after_steps(case: Case, role: str, worst: bool) -> np.ndarray:
    given: np.ndarray = getattr(case, role)
    linear = getattr(case.plan.roles, role).map
    factor = TYPICAL if linear is None or not worst else math.sqrt(linear.weight.shape[1]) + 2
    errors = np.broadcast_to(factor * case.map_steps[role][:, None], given.shape[:3])
    array, steps = given, case.steps[role]
    for done, step in enumerate(steps):
        array = stepped(steps[max(done - 1, 0) : done], array)  # the step before
        errors = step.error(array, errors, epsilon(compute_dtype(case.dtype)))
    return errors
