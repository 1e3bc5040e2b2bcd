"""Facts about wrong outputs that another case explains: other keys, other numbers of a head, or a known mistake in the
wrong rows only. What is fitted to a few rows is checked on all."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np

from attention_service.attention.terms.additions import Alibi
from attention_service.comparison.candidates import make_candidate
from attention_service.comparison.case import Case
from attention_service.comparison.errors import distances
from attention_service.comparison.mutants import MUTANTS
from attention_service.comparison.problem import Problem, attention, scaled_scores
from attention_service.comparison.sample import Sample, blocks, everything
from attention_service.comparison.solve import make_problem, solve
from attention_service.comparison.wrong import LISTED, PROBED, Wrong, shown
from attention_service.schemas.compare import Fact

# From a problem, what was sent for it (b, h, r, e), and its sample: what is predicted, how many times larger its errors
# may be than right ones (b, h, r), and how many numbers were fitted to each row.
Prediction = tuple[np.ndarray, np.ndarray | float, np.ndarray | int]
Predict = Callable[[Problem, np.ndarray, Sample], Prediction]

# More keys are not cut into runs; features by which runs are told apart, and runs that are tried.
MAX_KEYS: Final = 2**12
FEATURES: Final = 64
RUNS: Final = 16
# Heads whose numbers are fitted at a time, to so many rows, or to rows of so many scores.
HEADS: Final = 4
ROWS: Final = 32
SCORES: Final = 2**16
# Powers of 2 that are tried, the nearest first, and steps of the search around the best of them.
POWERS: Final = np.array(sorted(np.arange(-8, 8.25, 0.5), key=abs))
STEPS: Final = 40
# A power of 2 that is a small step from a number.
NEAR: Final = 2.0**-8
# Errors that are so close are the same.
SAME: Final = 1e-6
# Groups of mistakes of rounding, or that other facts tell.
LEFT_OUT: Final = ("precision", "output", "empty", "logsumexp")


def refitted(wrong: Wrong) -> Iterator[Fact]:
    """The facts of this module, those first that tell most."""
    if wrong.is_plain_output:
        yield from (fact for find in (_head_numbers, _known_in_part, _other_keys) for fact in find(wrong))


def told(wrong: Wrong, predict: Predict, lost: float) -> str:
    """Where a prediction was sent, see `Wrong.said`; tried for the first few of the wrong rows, then for all."""
    for place in np.argwhere(wrong.rows)[:: -(-int(wrong.rows.sum()) // PROBED)]:
        sample = Sample(*place[:, None])
        sent = wrong.actual[sample.index]
        found, size, _ = predict(make_problem(wrong.case, sample), sent, sample)
        if not np.all(distances(sent, found).max(axis=-1) <= wrong.tolerance * size):
            return ""
    predicted, sizes, fitted = np.empty_like(wrong.right), np.empty(wrong.rows.shape), np.empty(wrong.rows.shape)
    for block in blocks(wrong.case, everything(wrong.case)):
        wrong.case.check()
        sent = wrong.actual[block.index]
        found, size, count = predict(make_problem(wrong.case, block), sent, block)
        predicted[block.index], sizes[block.index] = found, size
        fitted[block.index] = count * wrong.rows[block.index]
    predicted /= sizes[..., None]
    return wrong.said(lost + (fitted * wrong.sums[3]).sum(), predicted, by=sizes)


def _other_keys(wrong: Wrong) -> Iterator[Fact]:
    """Rows are those of one run of keys each, whose ends stay, or move with the row or its visible keys."""
    case, place = wrong.case, tuple(np.array(wrong.some(1))[:, 0])
    if case.sinks is not None or not 2 <= case.plan.sizes.key_length <= MAX_KEYS:
        return
    runs = _runs(wrong, make_problem(case, Sample(*np.array(place)[:, None])), place)
    ends = ends_of_runs(wrong) if runs else ()
    for (low, high), (one, first), (other, last) in itertools.product(runs, ends[:3], ends[:2] + ends[3:]):
        a, b = low - first[place], high - last[place]
        predict = partial(_of_run, first + a, last + b)
        if said := told(wrong, predict, 2 * math.log2(6 * case.plan.sizes.key_length)):
            text = f"{said} {{}} is right for other keys: those from {one.format(a)} to {other.format(b - 1)}"
            yield wrong.fact("other_keys", text, start=a, stop=b)
            return


def ends_of_runs(wrong: Wrong) -> tuple[tuple[str, np.ndarray], ...]:
    """What the ends of runs of keys are told from, (b, h, q) each: nothing, the row, its first and last visible key."""
    rows = np.broadcast_to(np.arange(wrong.rows.shape[2]), wrong.rows.shape)
    first, stop = np.zeros(wrong.rows.shape, np.int64), np.zeros(wrong.rows.shape, np.int64)
    for block in blocks(wrong.case, everything(wrong.case)):
        seen = make_problem(wrong.case, block).seen
        first[block.index], stop[block.index] = seen.argmax(-1), seen.shape[-1] - seen[..., ::-1].argmax(-1)
    names = "{}", "i{:+d} in row i", "the first visible one {:+d}", "the last visible one {:+d}"
    return tuple(zip(names, (np.zeros_like(rows), rows, first, stop - 1), strict=True))


def _of_run(start: np.ndarray, stop: np.ndarray, problem: Problem, _: np.ndarray, sample: Sample) -> Prediction:
    """The output of the keys from start to stop, (b, h, q) each."""
    keys = np.arange(problem.scores.shape[-1])
    seen = (start[sample.index][..., None] <= keys) & (keys < stop[sample.index][..., None])
    return attention(problem.changed(visible=seen)).output, 1.0, 0


def _runs(wrong: Wrong, problem: Problem, place: tuple[int, ...]) -> list[tuple[int, int]]:
    """The runs of keys whose output is closest to that of a wrong row."""
    sent = wrong.actual[place]
    chosen = np.linspace(0, len(sent) - 1, min(FEATURES, len(sent))).astype(int)
    if not np.isfinite(sent).all():
        return []
    scores = scaled_scores(problem)[0, 0, 0]
    powers = np.exp(scores - scores.max())
    errors = powers[:, None] * (problem.value[0, 0][:, chosen] - sent[chosen])
    errors, totals = (np.cumsum(np.pad(one, [(1, 0)] + [(0, 0)] * (one.ndim - 1)), axis=0) for one in (errors, powers))
    found = []
    for start in range(len(powers)):
        most = np.abs(errors[start + 1 :] - errors[start]).max(axis=-1) / (totals[start + 1 :] - totals[start])
        best = int(np.nan_to_num(most, nan=np.inf).argmin())
        if most[best] <= wrong.tolerance:
            found.append((float(most[best]), start, start + 1 + best))
    return [run for _, *run in sorted(found)[:RUNS]]  # type: ignore[misc]  # pairs


def _known_in_part(wrong: Wrong) -> Iterator[Fact]:
    """The wrong rows are those of a known mistake, and it is not in all rows."""
    case, rows = wrong.case, np.argwhere(wrong.rows)
    batch, head = rows[np.argmax(wrong.sums[0][tuple(rows.T)]), :2]
    chosen = np.flatnonzero(wrong.rows[batch, head])
    sample = Sample(np.array([batch]), np.array([head]), chosen[:: -(-len(chosen) // PROBED)])
    sent, tried = wrong.actual[sample.index], 0
    names = [name for name, row in MUTANTS.items() if row.group not in LEFT_OUT and row.needs is None]
    for one in (make_candidate((name,), edited, {}) for name in names for edited in MUTANTS[name].edit(case)):
        if one.case.of_whole is not None or one.case.over_queries or tried >= RUNS:
            continue
        if np.all(distances(sent, solve(one.case, sample).output) <= wrong.tolerance):
            tried += 1
            if told(wrong, partial(of_case, one.case), math.log2(len(MUTANTS))) == wrong.every(is_wrong=True):
                text = (
                    f"every wrong row of {{}} is that of a known mistake, which other rows do not have: {one.message}"
                )
                yield wrong.fact("known_in_part", text.removesuffix("."), rows=wrong.rows.sum())
                return


def of_case(case: Case, _: Problem, __: np.ndarray, sample: Sample) -> Prediction:
    """The output of another case, to which nothing is fitted."""
    return solve(case, sample).output, 1.0, 0


def _head_numbers(wrong: Wrong) -> Iterator[Fact]:
    """Each head is right with another scale, or other slopes, and times a number."""
    case, alibi = wrong.case, wrong.case.term(Alibi)
    makers: dict[str, Callable[[np.ndarray], Case]] = {"scale": lambda by: case.changed(scale=case.scale * by)}
    if alibi:
        makers["slope"] = lambda by: case.with_term(replace(alibi, slopes=alibi.slopes * by))
    for name, make in makers.items():
        numbers = _numbers_of_heads(wrong, make)
        if numbers is None:
            continue
        by, factors, *errors = numbers
        for a, b in ((_simplest(by, errors[0]), _simplest(factors, errors[1])), (by, factors)):
            predict = partial(_times_case, make(a), b)
            if said := told(wrong, predict, 2 * wrong.sums[3].max(axis=(0, 2)).sum()):
                of = f" of heads 0 to {len(a[:LISTED]) - 1}" if np.ptp(a) or np.ptp(b) else ""
                text = f"{said} {{}}{of} is right for the {name} times {_listed(a, errors[0])}"
                text += f", and multiplied by {_listed(b, errors[1])}" if (b != 1).any() else ""
                yield wrong.fact("head_numbers", text, by=a[:LISTED], factors=b[:LISTED])
                return


def _numbers_of_heads(wrong: Wrong, make: Callable[[np.ndarray], Case]) -> np.ndarray | None:
    """What an option and the output of each head are multiplied by, and the errors of both, (4, h) together.

    None where nothing explains some rows.
    """
    case, (_, heads, rows) = wrong.case, wrong.rows.shape
    numbers = np.ones((4, heads))
    by, factors = numbers[:2]
    batch = int(wrong.some(1)[0][0])
    count = max(2, min(ROWS, SCORES // (HEADS * case.plan.sizes.key_length)))
    for start in range(0, heads, HEADS):
        chosen = np.arange(start, min(start + HEADS, heads))
        sample = Sample(np.array([batch]), chosen, np.unique(np.linspace(0, rows - 1, count).astype(int)))
        sent = wrong.actual[sample.index]

        def fitted(powers: np.ndarray, chosen: np.ndarray = chosen, sample: Sample = sample) -> np.ndarray:
            by[chosen] = 2.0**powers
            return solve(make(by), sample).output

        if not np.isfinite(sent).all():
            return None
        powers = _minima(fitted, sent)
        moved, found = fitted(powers + NEAR), fitted(powers)
        factors[chosen] = own = _left(found, sent)[0]
        slack = wrong.tolerance * np.maximum(1, np.abs(own))
        if not np.all(np.abs(sent - found * own[:, None, None]) <= slack[:, None, None]):
            return None
        # What is left of a small step if the factor makes up for it says how well the step is known.
        back = _left(moved, found)[0]
        left = np.abs(own) * np.abs(found - moved * back[:, None, None]).max(axis=(0, 2, 3))
        steps = np.divide(slack, left)
        numbers[2, chosen] = by[chosen] * (2**NEAR - 1) * steps
        numbers[3, chosen] = slack / np.abs(found).max(axis=(0, 2, 3)) + np.abs(own * (back - 1)) * steps
    return numbers


def _left(found: np.ndarray, sent: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The best factor of each head (h,) of outputs (1, h, r, e), and the squared error that it leaves."""
    size = np.square(found).sum(axis=(0, 2, 3))
    factor = np.divide((found * sent).sum(axis=(0, 2, 3)), size, out=np.zeros_like(size), where=size > 0)
    return factor, np.square(sent - found * factor[:, None, None]).sum(axis=(0, 2, 3))


def _minima(fitted: Callable[[np.ndarray], np.ndarray], sent: np.ndarray) -> np.ndarray:
    """The powers of 2 of each head (h,) that leave the least errors, the best of some, then by golden-section search.

    fitted: from powers to outputs (1, h, r, e)
    """

    def errors(powers: np.ndarray) -> np.ndarray:
        return _left(fitted(powers), sent)[1]

    tried = np.stack([errors(np.full(sent.shape[1], power)) for power in POWERS])
    middle = POWERS[np.nan_to_num(tried, nan=np.inf).argmin(axis=0)]
    low, high = middle - 0.5, middle + 0.5
    golden = (math.sqrt(5) - 1) / 2
    for _ in range(STEPS):
        a, b = high - golden * (high - low), low + golden * (high - low)
        is_first = errors(a) < errors(b)
        low, high = np.where(is_first, low, a), np.where(is_first, b, high)
    found = (low + high) / 2
    return np.where(errors(middle) <= errors(found) * (1 + SAME), middle, found)


def _times_case(case: Case, factors: np.ndarray, _: Problem, __: np.ndarray, sample: Sample) -> Prediction:
    own = factors[sample.heads, None]
    return solve(case, sample).output * own[..., None], np.maximum(1, np.abs(own)), 0


def _simplest(numbers: np.ndarray, errors: np.ndarray) -> np.ndarray:
    """One number in the place of those of all heads (h,) if their errors allow it: 1, or the one that is known best."""
    best = 1.0 if (np.abs(numbers - 1) <= errors).all() else numbers[errors.argmin()]
    is_same = (np.abs(numbers - best) <= errors + errors.min()).all()
    return np.full_like(numbers, best) if is_same else numbers


def _listed(numbers: np.ndarray, errors: np.ndarray) -> str:
    if not np.ptp(numbers):
        return shown(float(numbers[0]), float(errors.min()))
    return ", ".join(map(shown, numbers[:LISTED], errors))
