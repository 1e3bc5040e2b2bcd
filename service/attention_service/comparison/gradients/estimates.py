"""Mistakes of masks that are estimated from one token of wrong gradients, before gradients are computed as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np

from attention_service.attention.gradients import PREFIX
from attention_service.attention.score_term import ScoreTerm
from attention_service.attention.terms.positions import Band
from attention_service.comparison.errors import distances
from attention_service.comparison.gradients.case import GradientCase
from attention_service.comparison.gradients.judge import GradientTruth
from attention_service.comparison.gradients.mutants.table import Recomputed, Variant, is_softmax
from attention_service.comparison.gradients.mutants.views import viewed, views
from attention_service.comparison.gradients.terms import Blocks, WrongGradient, has_plain_sums

# Offsets that are tried, at most.
TRIED: Final = 4
# The sum of a token may be so many limits off, as its terms are other ones.
ROOM: Final = 4.0


class Free(Blocks, Recomputed):
    """Keeps each term of the gradient of one token, also those that the right masks hide."""


@dataclass(frozen=True, eq=False)
class Token:
    """The most wrong token of a gradient. place: batch entry, head and token; sent: its numbers; limits: of right ones

    size: the largest right number
    """

    case: GradientCase
    role: str
    place: tuple[int, int, int]
    sent: np.ndarray
    limits: np.ndarray
    size: float

    @classmethod
    def of(cls, wrong: WrongGradient, truth: GradientTruth) -> Token:
        """The most wrong token of a gradient."""
        apart = distances(wrong.actual, wrong.right) / wrong.limits
        entry, head, token, _ = (int(at) for at in np.unravel_index(int(apart.argmax()), apart.shape))
        place = entry, head, token
        role, size = wrong.name.removeprefix(PREFIX), float(np.abs(wrong.right[place]).max())
        return cls(truth.case, role, place, wrong.actual[place], wrong.limits[place], size)

    @property
    def heads(self) -> slice:
        """The query heads whose terms the gradient sums up."""
        head, group = self.place[1], self.case.group
        return slice(head, head + 1) if self.role == "query" else slice(head * group, (head + 1) * group)

    def terms_without(self, *hiding: ScoreTerm) -> np.ndarray:
        """(heads, rows or keys, features), all terms of the sum if some terms of the plan hide and add nothing."""
        case, sizes = self.case, self.case.plan.sizes
        length = sizes.key_length if self.role == "query" else sizes.query_length
        found = np.zeros((self.heads.stop - self.heads.start, length, 1, len(self.sent)))
        kept = tuple(term for term in case.plan.terms if not any(term is one for one in hiding))
        free = replace(case, plan=replace(case.plan, terms=kept))
        place, token = self.place[:2], np.array(self.place[2:])
        free.run(partial(Free, case=case, place=place, tokens=token, size=1, kept={self.role: found}))
        return found[:, :, 0]

    def part(self, array: np.ndarray) -> np.ndarray:
        """What an array (b, h, q, k), each axis full or 1, has for each term, which broadcasts to (heads, l)."""
        entry, _, token = self.place
        own = array[min(entry, len(array) - 1)]
        own = own[self.heads] if own.shape[0] > 1 else own
        axis = 1 if self.role == "query" else 2
        found: np.ndarray = own.take(min(token, own.shape[axis] - 1), axis=axis)
        return found

    def is_near(self, sums: np.ndarray) -> np.ndarray:
        """True for sums (..., features) that may be those that were sent; larger ones may be further off."""
        larger = np.maximum(1, np.abs(sums).max(axis=-1, keepdims=True) / self.size)
        return np.asarray((distances(sums, self.sent) <= ROOM * self.limits * larger).all(axis=-1))


def other_views(wrong: WrongGradient, truth: GradientTruth) -> Iterator[Variant]:
    """The forms of `grad.mask_view` that explain the gradient of the most wrong token.

    Each term of its sum is computed once without the mask or bias, and counts as another view of that says.
    """
    token, terms = Token.of(wrong, truth), dict[int, np.ndarray]()
    for view in views(truth.case):
        if id(view.term) not in terms:
            terms[id(view.term)] = token.terms_without(view.term)
        part = token.part(view.array)
        counts = np.broadcast_to(part if part.dtype == bool else np.exp(part), terms[id(view.term)].shape[:2])[
            ..., None
        ]
        if token.is_near(np.where(counts != 0, counts * terms[id(view.term)], 0.0).sum(axis=(0, 1))):
            yield viewed(truth.case, view)


def shifted_masks(wrong: WrongGradient, truth: GradientTruth) -> Iterator[Variant]:
    """The forms of `grad.causal_shifted` with any offset that explain the gradient of the most wrong token.

    A mask by positions shows each key a run of rows, and each row a run of keys: a sum of consecutive terms for each
    offset.
    """
    case = truth.case
    bands = [term for term in case.plan.terms if isinstance(term, Band)]
    is_alone = all(isinstance(term, Band) or not term.reads_offset for term in case.plan.terms)
    if not (case.spec.is_causal and is_alone and is_softmax(case)):
        return
    token = Token.of(wrong, truth)
    terms = token.terms_without(*bands).sum(axis=0)
    sums = np.concatenate([np.zeros((1, terms.shape[1])), terms.cumsum(axis=0)])
    length, (entry, _, place) = len(terms), token.place
    far = length + case.plan.sizes.query_length + case.plan.sizes.key_length

    def edge(array: np.ndarray | None, unbounded: int) -> int:
        return unbounded if array is None else int(array[min(entry, len(array) - 1)])

    low, high = max(edge(band.low, -far) for band in bands), min(edge(band.high, far) for band in bands)
    shifts = np.arange(-far, far + 1)
    signed, first, last = (shifts, low, high) if token.role == "query" else (-shifts, -high, -low)
    ends = np.clip(place + last + signed + 1, 0, length)
    starts = np.minimum(np.clip(place + first + signed, 0, length), ends)
    is_near = token.is_near(sums[ends] - sums[starts]) & (shifts != 0)
    own = case.spec.query_offset
    own = np.asarray(case.plan.roles.past_length) if own is None else own
    for by in shifts[is_near][:TRIED].tolist():
        other = case.changed({"query_offset": own + by})
        detail = f"{abs(by)} keys {'more' if by > 0 else 'less'}"
        yield Variant(partial(other.run, partial(Recomputed, case=case)), detail)


# The mistakes that are estimated, by name.
ESTIMATED: Final[dict[str, Callable[[WrongGradient, GradientTruth], Iterator[Variant]]]] = {
    "grad.causal_shifted": shifted_masks,
    "grad.mask_view": other_views,
}


def estimated(truth: GradientTruth, arrays: list[WrongGradient]) -> Iterator[tuple[str, Variant]]:
    """The forms of mistakes that explain a token of the first gradient that tiles alone make, by name."""
    for wrong in [wrong for wrong in arrays if has_plain_sums(wrong, truth)][:1]:
        for name, estimate in ESTIMATED.items():
            yield from ((name, variant) for variant in estimate(wrong, truth))
