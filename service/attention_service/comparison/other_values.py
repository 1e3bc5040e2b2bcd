"""The fact that the weights are right and the values are not: keys have the value of another key, head or batch entry,
or their own times a factor. Which keys is fitted to a few rows; the sentence is checked on all."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Final

import numpy as np

from attention_service.comparison.errors import distances
from attention_service.comparison.places import LISTED, RUNS, in_words, residues_of, runs_of
from attention_service.comparison.problem import attention
from attention_service.comparison.sample import Sample, blocks, everything
from attention_service.comparison.solve import make_problem, values_of
from attention_service.comparison.solved_values import solved_sources
from attention_service.comparison.sources import ENDS, Source, sources
from attention_service.comparison.wrong import BITS, Wrong
from attention_service.schemas.compare import Fact

# Groups of keys, by what their index leaves or by blocks, of which each has other values or not.
GROUPS: Final = 64
LEAST_BLOCK: Final = 16
# Rows that groups are fitted to, of so many heads, and sources that are tried on all rows; scores and numbers of these
# rows.
ROWS: Final = 64
HEADS: Final = 4
TRIED: Final = 4
SCORES: Final = 2**18
NUMBERS: Final = 512
FEATURES: Final = 16
# The share of rows that must fit: others have another mistake. How often the fit is repeated without these.
SHARE: Final = 0.75
ROUNDS: Final = 3
# The share of the squared errors that the first fit must explain.
FIRST: Final = 0.4
RIDGE: Final = 1e-9
# Of so many wrong rows some may have another mistake. In half types, which fit less well, all must be explained.
MANY: Final = 64
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
    """The keys (k,) that have other values, and the factor of the difference; share: of rows that this explains."""

    source: Source
    keys: np.ndarray
    by: float
    share: float

    def values(self, wrong: Wrong, batches: np.ndarray, heads: np.ndarray) -> np.ndarray:
        """The values (b, g, k, e) that these batch entries and key/value heads have."""
        own = values_of(wrong.case, batches, heads)
        changed = -own if self.source.is_own else self.source.values(wrong.case, batches, heads) - own
        found: np.ndarray = own + np.where(self.keys[:, None], changed * (-self.by if self.source.is_own else 1), 0)
        return found


# How many rows a fit explains, it, and these rows (b, h, q).
Explained = tuple[int, Fit, np.ndarray]


def other_values(wrong: Wrong) -> Iterator[Fact]:
    """Each key has the value of another one, if it is of some keys, and all wrong rows but a few are right so."""
    if not wrong.is_plain_output or wrong.case.plan.sizes.key_length < 2 or (probe := _probe(wrong)) is None:
        return
    best = _best(wrong, probe, partial(sources, wrong.case))
    if best is None:
        solved = list(solved_sources(wrong, probe.batch, probe.head))
        best = _best(wrong, probe, lambda: solved)
    if best is not None:
        yield best


def _best(wrong: Wrong, probe: Probe, make: Callable[[], Iterable[Source]]) -> Fact | None:
    """The fact of the source that explains most rows, of keys by what their index leaves, or else by blocks of them."""
    found = list(_explained(wrong, probe, make(), by_blocks=False))
    if all(fact.numbers["others"] != [0] for _, fact in found):
        found += _explained(wrong, probe, make(), by_blocks=True)
    return max(found, key=lambda one: one[0])[1] if found else None


def _explained(wrong: Wrong, probe: Probe, tried: Iterable[Source], *, by_blocks: bool) -> Iterator[tuple[int, Fact]]:
    """What explains most rows of the fits of sources to groups of keys: how many, and the fact."""
    fits = [fit for source in tried if (fit := _fit(wrong, probe, source, by_blocks=by_blocks))]
    texts = [list(same) for _, same in groupby(fits, lambda fit: fit.source.text)]
    for same in sorted(texts, key=lambda same: -max(fit.share for fit in same))[:TRIED]:
        checked = [one for fit in same if (one := _best_keys(wrong, fit)) is not None]
        most = max((count for count, *_ in checked), default=0)
        best = [(fit, close) for count, fit, close in checked if count == most]
        if best:
            # The end is not known if several ones explain as much.
            fit, close = best[0]
            yield most, _fact(wrong, fit, close, ENDS[fit.source.end] if fit.source.end and len(best) == 1 else "")
            return


def _best_keys(wrong: Wrong, fit: Fit) -> Explained | None:
    """What a fit explains; with the gaps in its keys filled if that explains as much. None if it says little."""
    keys = np.flatnonzero(fit.keys)
    modulus, residues = residues_of(keys, len(fit.keys)) or (len(fit.keys), keys)
    left = np.arange(len(fit.keys)) % modulus
    filled = replace(fit, keys=(residues[0] <= left) & (left <= residues[-1]))
    is_run = bool((filled.keys == fit.keys).all())
    checked = []
    for one in (filled,) if is_run else (filled, fit):
        close = _checked(wrong, one)
        # Gaps may be fitted to noise, which leaves rows that have no other mistake.
        if close is not None and (one is filled or not (wrong.rows & ~close).any()):
            checked.append((int(close.sum()), one, close))
    return max(checked, key=lambda one: one[0], default=None)


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
    if kept.sum() < kept.size * SHARE / 2:
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
    kept, explained, by = np.ones(len(probe.errors), bool), np.zeros(len(sums), bool), 1.0
    for turn in range(ROUNDS):
        flat, errors = sums[:, kept].reshape(len(sums), -1), probe.errors[kept].ravel()
        square, products = flat @ flat.T, flat @ errors
        square[np.diag_indices(len(sums))] += RIDGE * max(np.trace(square), RIDGE) / len(sums)
        each = np.linalg.solve(square, products)
        if turn == 0 and not products @ each >= FIRST * (errors @ errors):
            return None
        by = _factor(each, flat, errors) if source.is_own else 1.0
        explained = each / by > 0.5
        apart = np.abs(probe.errors - by * np.tensordot(explained, sums, 1))
        size = np.max(apart / probe.tolerance, axis=1)
        kept = size <= max(1.0, float(np.quantile(size, SHARE)))
    share = float(np.mean(size <= 1))
    if share < SHARE or not explained.any():
        return None
    known = np.max(np.abs(sums) / probe.tolerance, axis=(1, 2)) > NOTICED
    keys = _keys(explained, known, len(changed), by_blocks=by_blocks)
    says_little = source.is_own and keys.all()
    return None if says_little or not _is_short(np.flatnonzero(keys), len(keys)) else Fit(source, keys, by, share)


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
    """The keys (k,) of these groups; by the smallest modulus of the index that says the same of the known groups."""
    keys = np.arange(count)
    if by_blocks:
        return np.asarray(explained[keys // _block(count)])
    for modulus in (2**power for power in range(GROUPS.bit_length())):
        every = explained[known], np.flatnonzero(known) % modulus
        chosen = np.isin(np.arange(modulus), every[1][every[0]])
        if (chosen[every[1]] == every[0]).all():
            return np.asarray(chosen[keys % modulus])
    return np.asarray(explained[keys % GROUPS])


def _checked(wrong: Wrong, fit: Fit) -> np.ndarray | None:
    """The rows (b, h, q) that are right with the values of a fit; None if it leaves too many wrong, or says little."""
    close, count = np.zeros(wrong.rows.shape, bool), int(wrong.rows.sum())
    most = count * (1 - SHARE) if count >= MANY and wrong.case.dtype.itemsize >= 4 else 0
    for block in blocks(wrong.case, everything(wrong.case)):
        wrong.case.check()
        problem = make_problem(wrong.case, block)
        value = fit.values(wrong, block.batches, wrong.case.value_of_head[block.heads])
        found = attention(problem.changed(value=value)).output
        close[block.index] = distances(wrong.actual[block.index], found).max(axis=-1) <= wrong.tolerance
        if (wrong.rows & ~close)[block.index].sum() > most:
            return None
    rest = int((wrong.rows & ~close).sum())
    lost = GROUPS + SOURCES + fit.source.lost + rest * math.log2(wrong.rows.size + 1)
    return close if rest <= most and wrong.sums[2][wrong.rows & close].sum() - lost >= BITS else None


def _fact(wrong: Wrong, fit: Fit, close: np.ndarray, end: str) -> Fact:
    rest = wrong.rows & ~close
    rows, others = int(wrong.rows.sum()), int(rest.sum())
    said = wrong.every(is_wrong=not close.all())
    said = f"in {rows - others} of {rows} wrong rows" if others else said
    where = "" if fit.keys.all() else f", {_in_words(np.flatnonzero(fit.keys), len(fit.keys), 'j', 'keys j =')}"
    text = f"the weights are right, the values are not: key j is multiplied by {fit.source.text}"
    if fit.source.is_own:
        adds = f"adds {wrong.shown(1 + fit.by)} times what is right"
        text = f"key j {'adds nothing, but its weight is in the sum of all' if fit.by == -1 else adds}"
    message = f"{said} of {{}} {text}{where}"
    message += f"; {end}" if end else ""
    if others:
        places = _in_words(np.flatnonzero(rest.any(axis=(0, 1))), rest.shape[2], "i", "rows i =")
        message += f". The other {'one is' if others == 1 else f'{others} are'} wrong even so, {places}"
    return wrong.fact("other_values", message, keys=np.flatnonzero(fit.keys)[:LISTED], others=others)


def _is_short(indices: np.ndarray, length: int) -> bool:
    """True if there are some, and few words say which: what is fitted to noise has no order."""
    if not len(indices):
        return False
    return len(runs_of(indices)) <= RUNS or residues_of(indices, length) is not None


def _in_words(indices: np.ndarray, length: int, name: str, plural: str) -> str:
    """Which indices, in the shortest way that is exact; else the first ones, and how many there are."""
    runs = runs_of(indices)
    if len(runs) > 1 and (found := residues_of(indices, length)):
        return f"where {name} mod {found[0]} is {in_words(runs_of(found[1]), 'or')}"
    if len(runs) <= RUNS or len(indices) <= LISTED:
        return f"for {plural} {in_words(runs, 'and')}"
    return f"for {len(indices)} {plural} {', '.join(map(str, indices[:LISTED]))} and so on"
