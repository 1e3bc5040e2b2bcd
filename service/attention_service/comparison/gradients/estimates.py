"""Mistakes of masks that are estimated from some tokens of a wrong gradient, before all gradients are computed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np

from attention_service.attention.gradients import PREFIX
from attention_service.attention.score_term import ScoreTerm
from attention_service.attention.terms.additions import Bias
from attention_service.attention.terms.positions import Band
from attention_service.comparison.errors import distances
from attention_service.comparison.gradients.case import MOST_TERMS, GradientCase
from attention_service.comparison.gradients.judge import GradientTruth
from attention_service.comparison.gradients.mutants.table import Recomputed, Variant, is_softmax
from attention_service.comparison.gradients.mutants.views import OtherBias, viewed, views
from attention_service.comparison.gradients.terms import Blocks, WrongGradient, has_plain_sums

# Offsets that are tried, at most, and sums for offsets that are made at a time.
TRIED: Final = 4
AT_A_TIME: Final = 512
# Tokens that are looked at.
SAMPLE: Final = 8
# The sum of a token may be so many limits off, as its terms are other ones.
ROOM: Final = 4.0


class RecordedTerms(Blocks, Recomputed):
    """Keeps each term of the gradient of one token, also those that the right masks hide."""


@dataclass(frozen=True, eq=False)
class Tokens:
    """Some wrong tokens of a gradient, of the batch entry and head that is most wrong.

    tokens: (s,); sent: (s, features), their numbers; limits: of the right ones; sizes: (s, 1), the largest right number
    """

    case: GradientCase
    role: str
    entry: int
    head: int
    tokens: np.ndarray
    sent: np.ndarray
    limits: np.ndarray
    sizes: np.ndarray

    @classmethod
    def of(cls, wrong: WrongGradient, truth: GradientTruth) -> Tokens:
        """Some wrong tokens of a gradient, from the first to the last."""
        bits = wrong.sums[2].sum(axis=-1)
        entry, head = (int(at) for at in np.unravel_index(int(bits.argmax()), bits.shape))
        every = np.flatnonzero(wrong.rows[entry, head])
        tokens = every[np.unique(np.linspace(0, len(every) - 1, SAMPLE).astype(int))]
        sent, right, limits = (array[entry, head, tokens] for array in (wrong.actual, wrong.right, wrong.limits))
        sizes = np.abs(right).max(axis=-1, keepdims=True)
        return cls(truth.case, wrong.name.removeprefix(PREFIX), entry, head, tokens, sent, limits, sizes)

    @property
    def heads(self) -> slice:
        """The query heads whose terms the gradient sums up."""
        group = self.case.group
        is_query = self.role == "query"
        return slice(self.head, self.head + 1) if is_query else slice(self.head * group, (self.head + 1) * group)

    @property
    def count(self) -> int:
        """The numbers of all terms."""
        sizes = self.case.plan.sizes
        length = sizes.key_length if self.role == "query" else sizes.query_length
        return (self.heads.stop - self.heads.start) * length * self.sent.size

    def terms_without(self, *hiding: ScoreTerm) -> np.ndarray:
        """(heads, rows or keys, s, features), all terms of the sums if some terms of the plan hide and add nothing."""
        case, sizes = self.case, self.case.plan.sizes
        length = sizes.key_length if self.role == "query" else sizes.query_length
        found = np.zeros((self.heads.stop - self.heads.start, length, *self.sent.shape))
        nothing = np.zeros((1, 1, 1, 1))
        terms = [(term, any(term is one for one in hiding)) for term in case.plan.terms]
        kept = tuple(
            OtherBias(nothing, term) if is_gone and isinstance(term, Bias) else term
            for term, is_gone in terms
            if not is_gone or isinstance(term, Bias)
        )
        free = replace(case, plan=replace(case.plan, terms=kept))
        place = self.entry, self.head
        free.run(partial(RecordedTerms, case=case, place=place, tokens=self.tokens, size=1, kept={self.role: found}))
        return found

    def part(self, array: np.ndarray) -> np.ndarray:
        """What an array (b, h, q, k), each axis full or 1, has for each term; it broadcasts to (heads, l, s)."""
        own = array[min(self.entry, len(array) - 1)]
        own = own[self.heads] if own.shape[0] > 1 else own
        own = own.swapaxes(-1, -2) if self.role == "query" else own
        found: np.ndarray = own[..., self.tokens] if own.shape[-1] > 1 else own
        return found

    def is_near(self, sums: np.ndarray) -> np.ndarray:
        """True for sums (..., s, features) that may be those that were sent; larger ones may be further off."""
        larger = np.maximum(1, np.abs(sums).max(axis=-1, keepdims=True) / self.sizes)
        return np.asarray((distances(sums, self.sent) <= ROOM * self.limits * larger).all(axis=(-1, -2)))


def other_views(wrong: WrongGradient, truth: GradientTruth) -> Iterator[Variant]:
    """The forms of `grad.mask_view` that explain some wrong tokens.

    Each term of their sums is computed once without the mask or bias, and counts as another view of that says.
    """
    tokens, terms = Tokens.of(wrong, truth), dict[int, np.ndarray]()
    if tokens.count > MOST_TERMS:
        return
    for view in views(truth.case):
        if id(view.term) not in terms:
            terms[id(view.term)] = tokens.terms_without(view.term)
        part, own = tokens.part(view.array), terms[id(view.term)]
        counts = np.broadcast_to(part if part.dtype == bool else np.exp(part), own.shape[:3])[..., None]
        if tokens.is_near(np.where(counts != 0, counts * own, 0.0).sum(axis=(0, 1))):
            yield viewed(truth.case, view)


def shifted_masks(wrong: WrongGradient, truth: GradientTruth) -> Iterator[Variant]:
    """The forms of `grad.causal_shifted` with any offset that explain some wrong tokens.

    A mask by positions shows each key a run of rows, and each row a run of keys: a sum of consecutive terms for each
    offset.
    """
    case = truth.case
    bands = [term for term in case.plan.terms if isinstance(term, Band)]
    is_alone = all(isinstance(term, Band) or not term.reads_offset for term in case.plan.terms)
    if not (case.spec.is_causal and is_alone and is_softmax(case)):
        return
    found = Tokens.of(wrong, truth)
    if found.count > MOST_TERMS:
        return
    terms = found.terms_without(*bands).sum(axis=0)  # l s features
    sums = np.concatenate([np.zeros((1, *terms.shape[1:])), terms.cumsum(axis=0)])
    far = case.plan.sizes.query_length + case.plan.sizes.key_length
    shifts = np.array(sorted(range(-far, far + 1), key=abs)[1:])
    tried = itertools.islice(_shifts_that_fit(found, sums, shifts, _edges(bands, found.entry, 2 * far)), TRIED)
    own = case.spec.query_offset
    own = np.asarray(case.plan.roles.past_length) if own is None else own
    for by in tried:
        other = case.changed({"query_offset": own + by})
        detail = f"{abs(by)} keys {'more' if by > 0 else 'less'}"
        yield Variant(partial(other.run, partial(Recomputed, case=case)), detail)


def _shifts_that_fit(found: Tokens, sums: np.ndarray, shifts: np.ndarray, edges: tuple[int, int]) -> Iterator[int]:
    """The shifts of what a query sees that explain wrong tokens. sums: (l + 1, s, features), of the first terms"""
    (low, high), columns = edges, np.arange(len(found.tokens))
    first, last, sign = (low, high, 1) if found.role == "query" else (-high, -low, -1)
    for start in range(0, len(shifts), AT_A_TIME):
        some = shifts[start : start + AT_A_TIME]
        centre = found.tokens + sign * some[:, None]
        stops = np.clip(centre + last + 1, 0, len(sums) - 1)
        starts = np.minimum(np.clip(centre + first, 0, len(sums) - 1), stops)
        yield from some[found.is_near(sums[stops, columns] - sums[starts, columns])].tolist()


def _edges(bands: list[Band], entry: int, unbounded: int) -> tuple[int, int]:
    """The first and the last key that all bands show query 0 of a batch entry. unbounded: in the place of no edge"""
    lows = [int(band.low[min(entry, len(band.low) - 1)]) for band in bands if band.low is not None]
    highs = [int(band.high[min(entry, len(band.high) - 1)]) for band in bands if band.high is not None]
    return max(lows, default=-unbounded), min(highs, default=unbounded)


# The mistakes that are estimated, by name.
ESTIMATED: Final[dict[str, Callable[[WrongGradient, GradientTruth], Iterator[Variant]]]] = {
    "grad.causal_shifted": shifted_masks,
    "grad.mask_view": other_views,
}


def estimated(truth: GradientTruth, arrays: list[WrongGradient]) -> Iterator[tuple[str, Variant]]:
    """The forms of mistakes that explain some tokens of the first gradient that tiles alone make, by name."""
    for wrong in [wrong for wrong in arrays if has_plain_sums(wrong, truth)][:1]:
        for name, estimate in ESTIMATED.items():
            yield from ((name, variant) for variant in estimate(wrong, truth))
