"""Numbers of mistakes that are estimated from wrong gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np

from attention_service.attention.gradients import PREFIX
from attention_service.attention.terms.positions import Band
from attention_service.comparison.errors import distances
from attention_service.comparison.gradients.judge import GradientTruth
from attention_service.comparison.gradients.mutants.table import Recomputed, Variant, is_softmax
from attention_service.comparison.gradients.terms import Blocks, WrongGradient, has_plain_sums

# Offsets that are tried, at most.
TRIED: Final = 4
# The sum of a token may be so many limits off, as its rows are other ones.
ROOM: Final = 4.0


class Free(Blocks, Recomputed):
    """Keeps each term of the gradient of one token, also those that the right masks hide."""


def shifted_masks(wrong: WrongGradient, truth: GradientTruth) -> Iterator[Variant]:
    """The forms of a causal mask with another offset that explain the gradient of the most wrong token.

    A mask by positions shows each key a run of rows, and each row a run of keys: one sum of consecutive terms for each
    offset. It is found among these sums, and the gradients are then computed as a whole.
    """
    case, role, sizes = truth.case, wrong.name.removeprefix(PREFIX), truth.case.plan.sizes
    bands = [term for term in case.plan.terms if isinstance(term, Band)]
    is_alone = all(isinstance(term, Band) or not term.reads_offset for term in case.plan.terms)
    if not (case.spec.is_causal and is_alone and is_softmax(case) and has_plain_sums(wrong, truth)):
        return
    at = np.unravel_index(int((distances(wrong.actual, wrong.right) / wrong.limits).argmax()), wrong.right.shape)
    entry, head, token = (int(place) for place in at[:3])
    length, heads = (sizes.key_length, 1) if role == "query" else (sizes.query_length, case.group)
    terms = np.zeros((heads, length, 1, wrong.right.shape[3]))
    free = replace(case, plan=replace(case.plan, terms=tuple(term for term in case.plan.terms if term not in bands)))
    kind = partial(Free, case=case, place=(entry, head), tokens=np.array([token]), size=1, kept={role: terms})
    free.run(kind)
    sums = np.concatenate([np.zeros((1, terms.shape[3])), terms.sum(axis=0)[:, 0].cumsum(axis=0)])
    lows = [int(term.low[entry % len(term.low)]) for term in bands if term.low is not None]
    highs = [int(term.high[entry % len(term.high)]) for term in bands if term.high is not None]
    low, high = max(lows, default=-length - token), min(highs, default=length + token)
    shifts = np.arange(-length - sizes.query_length, length + sizes.query_length + 1)
    first, last = (token + low, token + high) if role == "query" else (token - high, token - low)
    signed = shifts if role == "query" else -shifts
    ends = np.clip(last + signed + 1, 0, length)
    starts = np.minimum(np.clip(first + signed, 0, length), ends)
    apart = distances(sums[ends] - sums[starts], wrong.actual[entry, head, token])
    is_near = (apart <= ROOM * wrong.limits[entry, head, token]).all(axis=-1) & (shifts != 0)
    own = case.spec.query_offset
    own = np.asarray(case.plan.roles.past_length) if own is None else own
    for by in shifts[is_near][:TRIED].tolist():
        other = case.changed({"query_offset": own + by})
        yield Variant(
            partial(other.run, partial(Recomputed, case=case)), f"{abs(by)} keys {'more' if by > 0 else 'less'}"
        )
