"""Facts about wrong gradients: where their right numbers are, and which terms of their sums they have."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np

from attention_service.comparison.case import Case
from attention_service.comparison.facts import find_facts
from attention_service.comparison.gradients.judge import GradientTruth
from attention_service.comparison.gradients.row_sums import other_row_sums
from attention_service.comparison.gradients.terms import (
    MOST_PLACES,
    WHOLE_BITS,
    WrongGradient,
    as_rows,
    slices,
    terms_of_heads,
    terms_of_scores,
    terms_of_tiles,
    usual_where_any_fits,
    whole,
    whole_sums,
)
from attention_service.comparison.rules import CORRECT
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
            of_tiles = itertools.chain(terms_of_tiles(wrong, truth), terms_of_scores(wrong, truth))
            others = itertools.chain(terms_of_heads(wrong, truth), of_tiles, other_row_sums(wrong, truth))
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
        times = usual_where_any_fits(
            wrong.case.check, whole_sums(own / unit, right / unit), np.eye(count), right, limits
        )
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
