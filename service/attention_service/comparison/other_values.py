"""The fact that the weights are right and the values are not: keys have the value of another key, head or batch entry,
or their own times a factor. Which keys is fitted to a few rows; the sentence is checked on all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Final

import numpy as np

from attention_service.comparison.errors import distances, largest
from attention_service.comparison.places import LISTED, RUNS, in_words, residues_of, runs_of
from attention_service.comparison.problem import attention
from attention_service.comparison.sample import Sample, blocks, everything
from attention_service.comparison.solve import make_problem, values_of
from attention_service.comparison.sources import ENDS, Source, sources
from attention_service.comparison.wrong import Wrong, shown
from attention_service.schemas.compare import Fact

# Groups of keys, by what their index leaves or by blocks, of which each has other values or not.
GROUPS: Final = 64
LEAST_BLOCK: Final = 16
# Rows that groups are fitted to, of so many heads; scores and numbers of these rows.
ROWS: Final = 64
HEADS: Final = 4
SCORES: Final = 2**18
NUMBERS: Final = 512
FEATURES: Final = 16
# The share of the squared errors that the first fit must explain.
FIRST: Final = 0.4
RIDGE: Final = 1e-9
# Bits of the choice of a source and its factor.
SOURCES: Final = 20
# A group is known if it adds so many tolerances to a row; a factor is called 0 if it is as small.
NOTICED: Final = 4.0
ALMOST_0: Final = 0.01


@dataclass(frozen=True, eq=False)
class Probe:
    """Some wrong rows of the heads of a batch entry that share values, each divided by the length of its error.

    weights: (r, k); errors: (r, f); tolerance: (r, 1); own: the values (k, f); features: (f,), those that are looked at
    batch, head: the place of the values
    """

    weights: np.ndarray
    errors: np.ndarray
    tolerance: np.ndarray
    own: np.ndarray
    features: np.ndarray
    batch: np.ndarray
    head: np.ndarray


@dataclass(frozen=True, eq=False)
class Fit:
    """The keys (k,) that have other values, and the factor of the difference."""

    source: Source
    keys: np.ndarray
    by: float

    def values(self, wrong: Wrong, batches: np.ndarray, heads: np.ndarray) -> np.ndarray:
        """The values (b, g, k, e) that these batch entries and key/value heads have."""
        own = values_of(wrong.case, batches, heads)
        changed = -own if self.source.is_own else self.source.values(wrong.case, batches, heads) - own
        found: np.ndarray = own + np.where(self.keys[:, None], changed * (-self.by if self.source.is_own else 1), 0)
        return found


def other_values(wrong: Wrong) -> Iterator[Fact]:
    """Each key has the value of another one, if it is of some keys, and all wrong rows are right so."""
    if not wrong.is_plain_output or wrong.case.plan.sizes.key_length < 2 or (probe := _probe(wrong)) is None:
        return
    for by_blocks in (False, True):
        fits = (fit for source in sources(wrong.case) if (fit := _fit(wrong, probe, source, by_blocks=by_blocks)))
        for _, same in groupby(fits, lambda fit: fit.source.text):
            told = [one for fit in same if (one := _told(wrong, fit)) is not None]
            if told:
                fit, said, unit = told[0]
                # The end is not known if several ones explain the rows.
                yield _fact(wrong, fit, said, unit, ENDS[fit.source.end] if fit.source.end and len(told) == 1 else "")
                return


def _told(wrong: Wrong, fit: Fit) -> tuple[Fit, str, float] | None:
    """A fit, with the gaps in its keys filled if that is as true; where it holds; the most that it changes."""
    keys = np.flatnonzero(fit.keys)
    modulus, residues = residues_of(keys, len(fit.keys)) or (len(fit.keys), keys)
    left = np.arange(len(fit.keys)) % modulus
    filled = replace(fit, keys=(residues[0] <= left) & (left <= residues[-1]))
    is_run = bool((filled.keys == fit.keys).all())
    for one in (filled,) if is_run else (filled, fit):
        said, unit = _checked(wrong, one)
        if said:
            return one, said, unit
    return None


def _probe(wrong: Wrong) -> Probe | None:
    """Rows of the values that most wrong rows read; None if too few are finite."""
    case = wrong.case
    of_heads = wrong.rows.sum(axis=2)
    counts = np.stack(
        [of_heads[:, case.value_of_head == head].sum(axis=1) for head in range(case.plan.sizes.num_kv_heads)], axis=1
    )
    batch, head = (np.array([one]) for one in np.unravel_index(counts.argmax(), counts.shape))
    heads = np.flatnonzero(case.value_of_head == head)
    heads = heads[wrong.rows[batch[0], heads].any(axis=1)][:HEADS]
    rows = np.flatnonzero(wrong.rows[batch[0], heads].any(axis=0))
    most = max(1, min(ROWS, SCORES // case.plan.sizes.key_length) // len(heads))
    sample = Sample(batch, heads, rows[:: -(-len(rows) // most)])
    weights = attention(make_problem(case, sample)).weights
    assert weights is not None
    errors = wrong.actual[sample.index] - wrong.right[sample.index]
    kept = wrong.rows[sample.index] & np.isfinite(errors).all(axis=-1)
    if not kept.any():
        return None
    length = errors.shape[-1]
    count = min(length, max(FEATURES, NUMBERS // int(kept.sum())))
    features = np.unique(np.linspace(0, length - 1, count).astype(int))
    errors = errors[kept][:, features]
    sizes = np.maximum(np.linalg.norm(errors, axis=1, keepdims=True), wrong.tolerance)
    own = values_of(case, batch, head)[0, 0][:, features]
    return Probe(weights[kept] / sizes, errors / sizes, wrong.tolerance / sizes, own, features, batch, head)


def _fit(wrong: Wrong, probe: Probe, source: Source, *, by_blocks: bool) -> Fit | None:
    """The groups of keys whose values a source changes; None if that explains too few rows."""
    wrong.case.check()
    changed = probe.own
    if not source.is_own:
        changed = source.values(wrong.case, probe.batch, probe.head)[0, 0][:, probe.features] - probe.own
    sums = _sums(probe.weights, changed, by_blocks=by_blocks)
    flat, errors = sums.reshape(len(sums), -1), probe.errors.ravel()
    square, products = flat @ flat.T, flat @ errors
    square[np.diag_indices(len(sums))] += RIDGE * max(np.trace(square), RIDGE) / len(sums)
    each = np.linalg.solve(square, products)
    if not products @ each >= FIRST * (errors @ errors):
        return None
    by = _factor(each, flat, errors) if source.is_own else 1.0
    explained = each / by > 0.5
    apart = np.abs(probe.errors - by * np.tensordot(explained, sums, 1))
    if not explained.any() or not (apart <= probe.tolerance).all():
        return None
    known = np.max(np.abs(sums) / probe.tolerance, axis=(1, 2)) > NOTICED
    keys = _keys(explained, known, len(changed), by_blocks=by_blocks)
    moves = np.full(len(changed), True) if source.is_own else changed.any(axis=1)
    keys = keys | ~moves if keys[moves].all() else keys & moves  # others read their own in either case
    says_little = source.is_own and keys.all()
    return None if says_little or not _is_short(np.flatnonzero(keys), len(keys)) else Fit(source, keys, by)


def _factor(each: np.ndarray, flat: np.ndarray, errors: np.ndarray) -> float:
    """One number in the place of those of the groups that are not 0; -1 if it is about that."""
    most = each[np.abs(each).argmax()]
    added = (each / (most or 1.0) > 0.5) @ flat
    by = float(errors @ added / max(float(added @ added), RIDGE))
    return -1.0 if abs(by + 1) <= ALMOST_0 else by or 1.0


def _sums(weights: np.ndarray, changed: np.ndarray, *, by_blocks: bool) -> np.ndarray:
    """What each group of keys adds to rows (groups, r, f). weights: (r, k); changed: (k, f)"""
    inner = _block(len(changed)) if by_blocks else GROUPS
    width = -len(changed) % inner
    weights, changed = np.pad(weights, ((0, 0), (0, width))), np.pad(changed, ((0, width), (0, 0)))
    weights = weights.reshape(len(weights), -1, inner)
    changed = changed.reshape(-1, inner, changed.shape[1])
    if by_blocks:
        return np.asarray(weights.transpose(1, 0, 2) @ changed)
    return np.asarray(weights.transpose(2, 0, 1) @ changed.transpose(1, 0, 2))


def _block(keys: int) -> int:
    """The keys of a block: a power of two, so that there are at most GROUPS."""
    return max(LEAST_BLOCK, 1 << (-(-keys // GROUPS) - 1).bit_length())


def _keys(explained: np.ndarray, known: np.ndarray, count: int, *, by_blocks: bool) -> np.ndarray:
    """The keys (k,) whose values a source explains: those of blocks, or of residues of the index.

    explained, known: (groups,), of which groups it is true, and of which that is known. Of the powers of 2 the smallest
    modulus is taken that agrees with all known groups.
    """
    keys = np.arange(count)
    if by_blocks:
        return np.asarray(explained[keys // _block(count)])
    for modulus in (2**power for power in range(GROUPS.bit_length())):
        every = explained[known], np.flatnonzero(known) % modulus
        chosen = np.isin(np.arange(modulus), every[1][every[0]])
        if (chosen[every[1]] == every[0]).all():
            return np.asarray(chosen[keys % modulus])
    return np.asarray(explained[keys % GROUPS])


def _checked(wrong: Wrong, fit: Fit) -> tuple[str, float]:
    """Where all wrong rows are right with the values of a fit, "" if they are not, or if that says little; and the
    most that the values change."""
    predicted = np.empty_like(wrong.right)
    for block in blocks(wrong.case, everything(wrong.case)):
        wrong.case.check()
        problem = make_problem(wrong.case, block)
        value = fit.values(wrong, block.batches, wrong.case.value_of_head[block.heads])
        predicted[block.index] = attention(problem.changed(value=value)).output
        if not (distances(wrong.actual[block.index], predicted[block.index]) <= wrong.tolerance)[
            wrong.rows[block.index]
        ].all():
            return "", 0.0
    return wrong.said(GROUPS + SOURCES, predicted), largest(predicted - wrong.right)


def _fact(wrong: Wrong, fit: Fit, said: str, unit: float, end: str) -> Fact:
    where = "" if fit.keys.all() else f", {_in_words(np.flatnonzero(fit.keys), len(fit.keys))}"
    text = f"the weights are right, the values are not: key j is multiplied by {fit.source.text}"
    if fit.source.is_own:
        adds = f"adds {shown(1 + fit.by, wrong.tolerance * abs(fit.by) / unit)} times what is right"
        text = f"key j {'adds nothing, but its weight is in the sum of all' if fit.by == -1 else adds}"
    message = f"{said} of {{}} {text}{where}" + (f"; {end}" if end else "")
    return wrong.fact("other_values", message, keys=np.flatnonzero(fit.keys)[:LISTED])


def _is_short(indices: np.ndarray, length: int) -> bool:
    """True if there are some, and few words say which: what is fitted to noise has no order."""
    if not len(indices):
        return False
    return len(runs_of(indices)) <= RUNS or residues_of(indices, length) is not None


def _in_words(keys: np.ndarray, length: int) -> str:
    """Which keys, in the shortest way that is exact."""
    runs = runs_of(keys)
    if len(runs) > 1 and (found := residues_of(keys, length)):
        return f"where j mod {found[0]} is {in_words(runs_of(found[1]), 'or')}"
    return f"for keys j = {in_words(runs, 'and')}"
