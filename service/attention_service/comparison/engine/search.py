"""The search for the mistakes that explain what is wrong: known ones, estimated ones, then pairs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Final

from attention_service.backends.base import Check
from attention_service.comparison.engine.candidate import Candidate, W, ratio
from attention_service.comparison.engine.hypothesis import Hypothesis
from attention_service.comparison.engine.subject import Subject
from attention_service.comparison.rules import CORRECT

# Hypotheses that are told, and proofs that are confirmed on all rows.
TOLD: Final = 5
CONFIRMED: Final = 3
# Hypotheses whose own baselines are computed.
REFINED: Final = 8


def search(subject: Subject[W], candidates: list[Candidate[W]], check: Check) -> Iterator[list[Hypothesis]]:
    """The hypotheses that explain what is wrong, best first, after each step of the search; a proof stands alone.

    candidates: the answers of known mistakes
    """
    possible = _possible(subject, candidates)
    singles = _ranked(subject, possible)
    best = _confirmed(subject, joined(subject, singles), check)
    yield _told(best)
    if is_proved(best):
        return
    singles = _ranked(subject, _possible(subject, subject.estimated(check)), singles)
    best = _confirmed(subject, joined(subject, singles), check)
    yield _told(best)
    if is_proved(best):
        return
    pairs = _possible(subject, subject.combined(singles, candidates, check))
    pairs = [one for one in pairs if not any(_adds_nothing(subject, one, other) for other in possible)]
    judged = _confirmed(subject, joined(subject, _ranked(subject, pairs)), check)
    most = max((one.explained for one in best if not one.part), default=0.0)
    # Two mistakes explain more than one of them by chance, too.
    best += [one for one in judged if one.is_proof or not (one.part or 1 - one.explained >= (1 - most) / 4)]
    yield _told(sorted(best, key=lambda one: one.rank))


def is_proved(hypotheses: Iterable[Hypothesis]) -> bool:
    """True if one of the hypotheses is a proof."""
    return any(one.is_proof for one in hypotheses)


def _possible(subject: Subject[W], candidates: Iterable[Candidate[W]]) -> list[Candidate[W]]:
    return [one for one in candidates if not subject.contradicts(one)]


def _told(hypotheses: list[Hypothesis]) -> list[Hypothesis]:
    """The proof, or the hypotheses that explain enough, the best of each mistake."""
    proofs = [one for one in hypotheses if one.is_proof]
    by_names = {one.candidate.names: one for one in reversed(hypotheses) if one.is_told}
    return proofs or sorted(by_names.values(), key=lambda one: one.rank)[:TOLD]


def _adds_nothing(subject: Subject[W], pair: Candidate[W], one: Candidate[W]) -> bool:
    """True if the answer of two mistakes is that of one of them."""
    return one.names[0] in pair.names and ratio(pair.arrays, one.arrays, subject.baselines) <= CORRECT


def _ranked(
    subject: Subject[W], candidates: Iterable[Candidate[W]], judged: Iterable[Hypothesis] = ()
) -> list[Hypothesis]:
    """The hypotheses that candidates are, and others that are judged, best first; the best by their own baselines."""
    made = subject.each(subject.judge, candidates)
    # What was made for the wrong arrays alone must explain almost all.
    ranked = sorted(
        (one for one in (*judged, *made) if one.is_close or not one.candidate.is_restricted), key=lambda one: one.rank
    )
    if not is_proved(ranked):
        ranked = [*subject.each(subject.refined, ranked[:REFINED]), *ranked[REFINED:]]
    return sorted(ranked, key=lambda one: one.rank)


def _confirmed(subject: Subject[Any], hypotheses: list[Hypothesis], check: Check) -> list[Hypothesis]:
    """The hypotheses in order, after the first proofs among them were checked on all rows, until one holds."""
    checked, tried, is_done = [], 0, False
    for one in hypotheses:
        if one.is_proof and not is_done:
            tried += 1
            is_done = tried <= CONFIRMED and subject.confirms(one, check)
            checked.append(replace(one, is_proof=is_done))
        else:
            checked.append(replace(one, is_proof=False))
    return sorted(checked, key=lambda one: one.rank)


def joined(subject: Subject[Any], hypotheses: list[Hypothesis], count: int = TOLD) -> list[Hypothesis]:
    """The best of ranked hypotheses, those joined whose answers differ by no more than legal rounding.

    Of one mistake that only resembles in several ways, the best way is kept.
    Of joined ones that of rows that see no key stands first: a finite mask is only found where other rows show it.
    """
    kept: list[Hypothesis] = []
    for one in hypotheses:
        if not one.is_proof and any(other.candidate.names == one.candidate.names for other in kept):
            continue
        for place, other in enumerate(kept):
            if ratio(one.candidate.arrays, other.candidate.arrays, subject.baselines) <= CORRECT:
                known = (other.name, *other.also)
                if one.name.startswith("empty.") > other.name.startswith("empty.") and one.is_proof == other.is_proof:
                    kept[place] = replace(one, also=known)
                elif one.name not in known:
                    kept[place] = replace(other, also=(*other.also, one.name))
                break
        else:
            if len(kept) == count:
                break
            kept.append(one)
    return kept
