"""Facts about wrong gradients: where their right numbers are, and which terms of their sums they have."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np

from attention_service.comparison.baseline import CORRECT
from attention_service.comparison.case import Case
from attention_service.comparison.errors import distances
from attention_service.comparison.facts import find_facts
from attention_service.comparison.gradients.judge import GradientTruth
from attention_service.comparison.gradients.terms import (
    MOST_PLACES,
    WHOLE_BITS,
    WrongGradient,
    as_rows,
    settled,
    slices,
    terms_of_heads,
    terms_of_scores,
    terms_of_tiles,
    whole,
    whole_sums,
)
from attention_service.comparison.other_places import MAX_PARTS, nearest_of
from attention_service.comparison.places import plural_of
from attention_service.comparison.wrong import LISTED
from attention_service.schemas.compare import Fact

AXES: Final = ("batch entry", "head", "row", "feature")


def wrong_gradients(truth: GradientTruth, names: Iterable[str], case: Case) -> list[WrongGradient]:
    """The wrong gradients of some names. case: of the forward pass"""
    found = []
    for name in names:
        sent, right, limits = (
            as_rows(truth, name, arrays[name]) for arrays in (truth.sent, truth.case.right, truth.limits.limits)
        )
        axes = tuple("key" if one == "row" and "query" not in name else one for one in AXES)
        most = CORRECT * float(limits.max(initial=0.0))
        found.append(WrongGradient(name, axes, sent, right, most, case, has_rows=False, limits=CORRECT * limits))
    return found


def facts_of_gradients(truth: GradientTruth, arrays: Iterable[WrongGradient]) -> dict[str, list[Fact]]:
    """What is true of wrong gradients, by name."""
    found = {}
    with np.errstate(all="ignore"):
        for wrong in arrays:
            own = list(_summed_places(wrong)) or find_facts([wrong])
            others = itertools.chain(_added_rows(wrong), terms_of_heads(wrong, truth))
            others = itertools.chain(others, terms_of_tiles(wrong, truth), terms_of_scores(wrong, truth))
            found[wrong.name] = own or list(itertools.islice(others, 1))
    return found


def _summed_places(wrong: WrongGradient) -> Iterator[Fact]:
    """Batch entries or heads are the right ones of others, or sums of them."""
    for axes, what in (((1,), "head"), ((0,), "batch entry"), ((0, 1), "batch entry and head")):
        own, right, limits = (slices(array, axes) for array in (wrong.actual, wrong.right, wrong.limits))
        count, numbers = right.shape
        if not 1 < count <= MOST_PLACES or numbers < 2 * count or not np.isfinite(own).all():
            continue
        unit = math.sqrt(float(np.square(right).mean())) or 1.0
        times = settled(whole_sums(own / unit, right / unit), np.eye(count), right, limits)
        if not (times - np.diag(np.diag(times))).any():
            continue
        predicted, widened = (
            whole(product, wrong.right.shape, axes) for product in (times @ right, np.abs(times) @ limits)
        )
        lost = WHOLE_BITS * count * count
        if wrong.agrees(predicted, widened, min(lost, count * math.log2(count + 1) + WHOLE_BITS * times.any(1).sum())):
            differs = np.flatnonzero((times != np.eye(count)).any(axis=1))
            words = [f"{place} is {_sum_in_words(times[place])}" for place in differs[:LISTED]]
            order = "" if len(axes) == 1 else ", counted one after the other"
            text = f"{{}} has its right numbers at other places: {what} {', '.join(words)}{order}"
            yield wrong.fact("places", text, places=differs[:LISTED])
            return


def _sum_in_words(times: np.ndarray) -> str:
    """A sum of right parts: "the right one of 2, and 2 times that of 3"."""
    words = [f"{'' if by == 1 else f'{by:g} times '}that of {place}" for place, by in enumerate(times) if by]
    return " plus ".join(words) if words else "0"


def _added_rows(wrong: WrongGradient) -> Iterator[Fact]:
    """Each wrong row is its right one and that of another row, or the right one of another row."""
    rows, places = wrong.right.reshape(wrong.rows.size, -1), np.argwhere(wrong.rows)
    sent, limits = wrong.actual[wrong.rows], wrong.limits.reshape(rows.shape)
    if not 1 < len(rows) <= MAX_PARTS or not np.isfinite(sent).all():
        return
    own = rows[wrong.rows.ravel()]
    for kept, what in ((own, "the sum of its right one and of that"), (np.zeros_like(own), "the right one")):
        nearest = nearest_of(wrong.case.check, sent - kept, rows)
        # A row that is 0 is as near as one that has nothing to add.
        is_nothing = (distances(sent, kept) <= limits[wrong.rows.ravel()]).all(axis=-1)
        added = np.where(is_nothing[:, None], 0, rows[nearest])
        predicted, widened = wrong.right.copy(), wrong.limits.copy()
        predicted[wrong.rows] = kept + added
        widened[wrong.rows] = limits[wrong.rows.ravel()] + limits[nearest]
        if not is_nothing.all() and wrong.agrees(predicted, widened, len(sent) * math.log2(len(rows) + 1)):
            of = np.stack(np.unravel_index(nearest, wrong.rows.shape), axis=1)
            pairs = zip(places[~is_nothing][:4].tolist(), of[~is_nothing][:4].tolist(), strict=True)
            listed, row = ", ".join(f"{to} of {one}" for to, one in pairs), wrong.axes[2]
            zeros = f", or 0 ({is_nothing.sum()} {plural_of(row)})" if is_nothing.any() else ""
            text = (
                f"every wrong {row} of {{}} is {what} of another {row}{zeros}: [{', '.join(wrong.axes[:3])}] {listed}"
            )
            yield wrong.fact("places", text, rows=(~is_nothing).sum(), zeros=is_nothing.sum())
            return
