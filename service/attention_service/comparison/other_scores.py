"""Facts that the values of a wrong output are right, and their weights are not: rows read a bias or a mask of other
places, or have other weights for whatever reason. What is fitted to one row is checked on all."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from attention_service.attention.terms.additions import Bias
from attention_service.attention.terms.masks import Mask
from attention_service.comparison.errors import distances, largest
from attention_service.comparison.problem import Problem, attention
from attention_service.comparison.refitted import of_case, told
from attention_service.comparison.sample import Sample, blocks, everything
from attention_service.comparison.solve import make_problem, values_of
from attention_service.comparison.wrong import PROBED, Wrong
from attention_service.schemas.compare import Fact

# Numbers of the places of a row that are tried, all of them or else those that are likely; so many at a time.
TRIED: Final = 2**24
NUMBERS: Final = 2**18
# Features by which places are told apart, and how many that fit are checked on all rows.
FEATURES: Final = 8
CHECKED: Final = 4
# A direction of values is none if it is so much shorter than the longest.
FLAT: Final = 1e-9
# Keys or features, of which there are fewer, whose products are looked at: a matrix of so many rows and columns.
MOST: Final = 2**10
# Keys of the largest weights that may be wrong.
COUNTS: Final = (1, 2, 4, 8, 16)


def other_scores(wrong: Wrong) -> Iterator[Fact]:
    """The facts of this module, those first that tell most."""
    if wrong.is_plain_output:
        yield from (fact for find in (_other_tables, _largest_weights, _other_weights) for fact in find(wrong))


def _other_tables(wrong: Wrong) -> Iterator[Fact]:
    """Each row has the bias or the mask of another place of its array, as far away or where an offset wraps."""
    case, rows = wrong.case, np.arange(wrong.rows.shape[2])
    keys = case.plan.sizes.key_length
    places = np.argwhere(wrong.rows)
    batch, head, row = places[places[:, 2].argmin()].tolist()  # an offset that wraps has wrapped once in the first one
    for noun, term, field in (("bias", case.term(Bias), "numbers"), ("mask", case.term(Mask), "booleans")):
        table = getattr(term, field, np.empty((0, 0, 0, 0)))
        if table.shape[2:] != (len(rows), keys) or len(rows) == 1:
            continue
        windows = sliding_window_view(table.reshape(*table.shape[:2], -1), keys, axis=-1)
        sample = Sample(np.array([batch]), np.array([head]), np.array([row]))
        problem = make_problem(case.without(type(term)), sample)  # type: ignore[arg-type]  # no None
        own = windows[batch % len(table), head % table.shape[1]]
        for start in _starts(wrong, problem, own, (batch, head, row)):
            by = row * keys - start
            shift = f"is that of row i{-by // keys:+d} in row i" if by % keys == 0 else ""
            shift = shift or f"begins {abs(by)} numbers {'before' if by > 0 else 'behind'} its own"
            told_as = {shift: rows * keys - by}
            if by > 0 and start < by:  # the remainder of a division, if it is not as far away for all rows
                told_as = {f"begins at number (i · {keys}) mod {by} of its head in row i": rows * keys % by} | told_as
            for what, starts in told_as.items():
                begins = np.clip(starts, 0, windows.shape[2] - 1)
                read = case.with_term(replace(term, **{field: windows[:, :, begins]}))  # type: ignore[arg-type, type-var]
                if said := told(wrong, partial(of_case, read), math.log2(table.size)):
                    yield wrong.fact("other_table", f"{said} {{}} is right for a {noun} that {what}", by=by)
                    return


def _starts(wrong: Wrong, problem: Problem, windows: np.ndarray, place: tuple[int, ...]) -> list[int]:
    """Where the bias or the mask begins that makes the output of a row, the places that fit best first."""
    count, keys = windows.shape
    tried = np.arange(count)
    if windows.size > TRIED:
        powers = 2 ** np.arange(keys.bit_length(), count.bit_length())
        tried = np.unique(np.concatenate([tried[::keys], place[2] * keys % powers]))[: TRIED // keys]
    chosen, errors = np.linspace(0, wrong.right.shape[3] - 1, FEATURES).astype(int), np.empty(len(tried))
    problem = problem.changed(value=problem.value[..., chosen])
    for start in range(0, len(tried), step := max(1, NUMBERS // keys)):
        wrong.case.check()
        part = windows[tried[start : start + step]]
        seen, added = (part, 0.0) if part.dtype == bool else (~np.isneginf(part), np.where(np.isneginf(part), 0, part))
        seen = seen if problem.visible is None else seen & problem.visible
        scores = np.broadcast_to(problem.scores, (1, 1, *part.shape))
        added = added + (0.0 if problem.added is None else problem.added)
        output = attention(problem.changed(scores=scores, visible=seen, added=added)).output[0, 0]
        errors[start : start + step] = distances(wrong.actual[place][chosen], output).max(axis=-1)
    best = np.argsort(errors, kind="stable")[:CHECKED]
    return [int(one) for one in tried[best[errors[best] <= wrong.tolerance]]]


def _largest_weights(wrong: Wrong) -> Iterator[Fact]:
    """Rows are right but for the weights of a few keys, those that have the largest."""
    keys, features = wrong.case.plan.sizes.key_length, wrong.right.shape[3]
    places = np.argwhere(wrong.rows)[:: -(-int(wrong.rows.sum()) // PROBED)]
    rows = [Sample(*place[:, None]) for place in places]
    for count in COUNTS:
        if not 4 * count <= min(features, keys) <= MOST or wrong.case.bad_values is not None:
            return
        if all(_is_near(wrong, row, _with_others(wrong, row, count)) for row in rows):
            predicted, fits = wrong.right.copy(), True
            for block in blocks(wrong.case, everything(wrong.case)):
                wrong.case.check()
                predicted[block.index] = found = _with_others(wrong, block, count)
                fits = fits and _is_near(wrong, block, found)
            if fits and wrong.said(((_spare(wrong) + count) * wrong.sums[3]).sum(), predicted):
                of = f"the {count} keys that have the largest ones" if count > 1 else "the key that has the largest one"
                text = f"every wrong {wrong.axes[2]} of {{}} is right but for the weight{'s' * (count > 1)} of {of}"
                yield wrong.fact("largest_weights", text, keys=count)
                return


def _is_near(wrong: Wrong, sample: Sample, predicted: np.ndarray) -> bool:
    """True if all wrong rows of a sample are what is predicted."""
    apart = distances(wrong.actual[sample.index], predicted).max(axis=-1)
    return bool(np.all(apart[wrong.rows[sample.index]] <= wrong.tolerance))


def _with_others(wrong: Wrong, sample: Sample, count: int) -> np.ndarray:
    """The right output of a sample, in wrong rows with other weights of so many keys that fit best to what was sent."""
    problem, found = make_problem(wrong.case, sample), wrong.right[sample.index].copy()
    weights, errors = attention(problem).weights, wrong.actual[sample.index] - found
    assert weights is not None
    rows = np.argwhere(wrong.rows[sample.index] & np.isfinite(errors).all(axis=-1))
    for start in range(0, len(rows), step := max(1, NUMBERS // (count * found.shape[3]))):
        at = tuple(rows[start : start + step].T)
        largest = np.argpartition(-weights[at], count, axis=-1)[:, :count]
        found[at] += _projected(problem.value[at[0][:, None], at[1][:, None], largest], errors[at])
    return found


def _other_weights(wrong: Wrong) -> Iterator[Fact]:
    """Rows that see few keys are sums of their values with other weights that add up to 1."""
    case, features = wrong.case, wrong.right.shape[3]
    if case.sinks is not None or min(case.plan.sizes.key_length, features) > MOST:
        return
    predicted, lost, most, spare = wrong.actual.copy(), wrong.sums[2].copy(), 0, _spare(wrong)
    for block in blocks(case, everything(case)):
        case.check()
        problem = make_problem(case, block)
        counts = np.where(wrong.rows[block.index], problem.seen.sum(axis=-1), 0)
        for count in np.unique(
            counts[(counts > 0) & (2 * counts <= features) & (counts * features <= NUMBERS)]
        ).tolist():
            heads, rows = (found := np.argwhere(counts[0] == count)).T
            for start in range(0, len(found), step := max(1, NUMBERS // (count * features))):
                at = heads[start : start + step], rows[start : start + step]
                place = block.batches[0], block.heads[at[0]], block.rows[at[1]]
                seen = np.argsort(~problem.seen[0][at], axis=-1, kind="stable")[:, :count]
                values = problem.value[0, at[0][:, None], seen]
                first = values[:, 0]
                nearest = first + _projected(values[:, 1:] - first[:, None], wrong.actual[place] - first)
                # What is no number is nearest to itself.
                if not np.all(np.isfinite(nearest) & (distances(wrong.actual[place], nearest) <= wrong.tolerance)):
                    return
                fitted = count - 1 + spare[place[:2]][:, 0]
                predicted[place], lost[place], most = nearest, fitted * wrong.sums[3][place], max(most, count)
    if most and wrong.said(lost.sum(), predicted):
        row = wrong.axes[2]
        text = f"every wrong {row} of {{}} that sees at most {most} keys is a sum of the values of these, with other"
        text += " weights that add up to 1: look at scores and masks, and at which value belongs to which key"
        yield wrong.fact("other_weights", text, keys=most)


def _spare(wrong: Wrong) -> np.ndarray:
    """(b, h, 1), how many features of an output follow from the others, whatever the weights: no proof of any."""
    case, found = wrong.case, np.empty((*wrong.rows.shape[:2], 1), np.int64)
    for batch, head in np.ndindex(len(found), case.plan.sizes.num_kv_heads):
        case.check()
        values = values_of(case, np.array([batch]), np.array([head]))[0, 0]
        # The smaller of the two products, which have the same eigenvalues but for zeros.
        values = values / (largest(values) or 1.0)
        products = values @ values.T if len(values) < values.shape[1] else values.T @ values
        sizes = np.linalg.eigvalsh(products)
        found[batch, case.value_of_head == head] = values.shape[1] - (sizes > FLAT * sizes.max(initial=0)).sum()
    return found


def _projected(vectors: np.ndarray, sent: np.ndarray) -> np.ndarray:
    """The sums (r, e) of vectors (r, n, e), each times a number, that are nearest to what was sent."""
    directions, sizes = np.linalg.qr(vectors.swapaxes(1, 2))
    sizes = np.abs(np.einsum("rii->ri", sizes))
    directions = directions * (sizes > FLAT * sizes.max(axis=-1, initial=0, keepdims=True))[:, None]
    found: np.ndarray = (directions @ (directions.swapaxes(1, 2) @ sent[..., None]))[..., 0]
    return found
