"""All that is learned of a subject, step by step, so that the end of the time leaves what was learned before."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from attention_service.backends.base import Check
from attention_service.comparison.engine.hypothesis import Hypothesis
from attention_service.comparison.engine.power import Power, power
from attention_service.comparison.engine.search import is_proved, search
from attention_service.comparison.engine.subject import Subject
from attention_service.comparison.engine.suggestion import Suggestion, best_of
from attention_service.comparison.tolerances import Tolerance
from attention_service.schemas.compare import Fact


@dataclass
class Learned:
    """What is known of the mistakes of a subject so far."""

    power: Power
    hypotheses: list[Hypothesis] = field(default_factory=list)
    facts: tuple[Fact, ...] = ()
    suggestion: Suggestion | None = None


def learn(
    learned: Learned,
    subject: Subject[Any],
    check: Check,
    tolerances: Collection[Tolerance] = (),
    *,
    suggests: bool = True,
) -> None:
    """Search for the mistakes that explain what is wrong, then for those that the request can show.

    suggests: True to make an input that shows the mistakes that are still possible

    Errors: what `check` raises, with what is known until then in `learned`.
    """
    candidates = list(subject.candidates(check))
    if subject.wrong:
        for hypotheses in search(subject, candidates, check):
            learned.hypotheses = subject.told(hypotheses)
    if not is_proved(learned.hypotheses):
        learned.facts = subject.facts()
    learned.power = power(subject, candidates, check, tolerances)
    candidates.clear()  # the next input takes as much memory as they do
    subject.forget()
    if suggests:
        learned.suggestion = _suggestion(subject, learned, check)


def _suggestion(subject: Subject[Any], learned: Learned, check: Check) -> Suggestion | None:
    """A request that shows the mistakes that are still possible, or tells those apart that explain what was sent."""
    best = learned.hypotheses[0] if learned.hypotheses else None
    is_known = best is not None and best.is_proof
    if best is not None and is_known:
        if not best.also:
            return None
        wanted: tuple[str, ...] = (*best.candidate.names, *best.also)
    else:
        wanted = learned.power.survivors
    wanted = tuple(name for name in wanted if not name.startswith("precision."))
    return best_of(subject.suggestions(wanted, check, apart=is_known), wanted) if wanted else None
