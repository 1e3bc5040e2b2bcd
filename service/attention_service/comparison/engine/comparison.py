"""Comparisons: what is asked of an answer, and all that is known of it afterwards."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Generic, TypeVar

import numpy as np

from attention_service.attention.result import Metadata
from attention_service.backends.base import Check
from attention_service.comparison.engine.hypothesis import Hypothesis
from attention_service.comparison.engine.learn import Learned, learn
from attention_service.comparison.engine.power import Power, no_power
from attention_service.comparison.engine.subject import Judgement
from attention_service.comparison.engine.suggestion import Suggestion
from attention_service.comparison.errors import distance
from attention_service.comparison.judged import Judged
from attention_service.comparison.rules import CORRECT, Arrays, status_of
from attention_service.comparison.time_limit import TimeIsUp, limited
from attention_service.comparison.tolerances import Tolerance
from attention_service.schemas.compare import Fact, Place


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is asked. A kind of comparison is a subclass, which has the request.

    actual: what a kernel returned, arrays by name; None to ask for the power of the request only
    against: what another kernel returned for the same request; None for no other
    reference: True if the report shall have what is right
    time_limit: seconds after which the search for mistakes ends; None for no limit
    suggests: False if no input is made that shows more
    """

    actual: Arrays | None = None
    against: Arrays | None = None
    reference: bool = False
    time_limit: float | None = None
    suggests: bool = True

    @property
    def type_name(self) -> str:
        """The type whose rounding is legal."""
        return "float64"

    @property
    def units(self) -> Mapping[str, float]:
        """The factor from an array that was sent to the reference, by the name of the array, where it is not one."""
        return {}

    @property
    def weak(self) -> tuple[str, ...]:
        """Why the inputs hide mistakes, in sentences."""
        return ()

    @property
    def showing(self) -> tuple[str, ...]:
        """The names of the arrays that show mistakes; empty if all do."""
        return ()

    def shows(self, name: str) -> bool:
        """True if an array shows mistakes."""
        return not self.showing or name in self.showing

    def unseen_options(self, power: Power) -> tuple[str, ...]:
        """The options of the request that a kernel could ignore unseen."""
        return ()

    @property
    def note(self) -> str | None:
        """How inputs that are suggested differ from the request; None if they are alike."""
        return None


A = TypeVar("A", bound=Asked)


@dataclass(frozen=True)
class Comparison(Generic[A]):
    """All that a report tells.

    judged: by the name of the array; passes: what each test says, None without arrays
    unknown: options of the request that the comparison does not compute, so that nothing was judged
    metadata: of the reference; None if only some rows were computed
    reference: what is right, float64 arrays by the names of those that were sent; the output if none was
    against: that of the other answer
    rows: how many rows of each head were judged; None for all, and for the mistakes that they can show
    ended_early: True if the time limit ended the search
    """

    question: A
    metadata: Metadata | None
    judged: Mapping[str, Judged]
    passes: Mapping[str, bool]
    tolerances: tuple[Tolerance, ...]
    where: list[Place]
    hypotheses: list[Hypothesis]
    power: Power
    suggestion: Suggestion | None
    unknown: tuple[str, ...] = ()
    reference: Mapping[str, np.ndarray] = field(default_factory=dict)
    facts: tuple[Fact, ...] = ()
    against: Comparison[A] | None = None
    rows: int | None = None
    ended_early: bool = False

    @property
    def differences(self) -> dict[str, float]:
        """The largest difference to the other answer of each array that both have, in baselines."""
        one, other = self.question.actual or {}, self.question.against or {}
        units = self.question.units
        return {
            name: distance(one[name].astype(np.float64), other[name].astype(np.float64)) * units.get(name, 1) / it.limit
            for name, it in self.judged.items()
            if name in other
        }

    @property
    def ratio(self) -> float:
        """The ratio of the worst array."""
        return max((one.ratio for one in self.judged.values()), default=0.0)

    @property
    def rank(self) -> tuple[bool, float]:
        """Larger for a worse answer: a local error is wrong whatever its ratio."""
        return self.place is not None, self.ratio

    @property
    def place(self) -> Judged | None:
        """The first array with a local error, whatever its size; None if there is none."""
        return next((one for one in self.judged.values() if one.place is not None), None)

    @property
    def status(self) -> str:
        """correct, imprecise, wrong or inconclusive."""
        if self.question.actual is None or self.unknown:
            return "inconclusive"
        if self.place is not None:
            return "wrong"
        shows = any(map(self.question.shows, self.judged))
        return status_of(self.ratio, is_weak=self.power.is_weak or self.ended_early or not shows)


def judge(
    asked: A,
    judgements: Sequence[Judgement],
    check: Check,
    end: float | None = None,
    tolerances: Collection[Tolerance] = (),
) -> Comparison[A]:
    """The comparison of what was sent, which may be judged in parts, as outputs and gradients are.

    Of several parts the first that is wrong says which mistake was made. check: raises to end it all; end: of the
    search for mistakes, see `limited`

    Errors: what `check` raises.
    """
    learned, is_complete, in_time = [Learned(no_power(tolerances)) for _ in judgements], False, limited(check, end)
    with suppress(TimeIsUp):
        for one, of_one in zip(judgements, learned, strict=True):
            learn(of_one, one.subject(in_time), in_time, tolerances, suggests=asked.suggests)
        is_complete = True
    parts = [_part(asked, *pair, tolerances) for pair in zip(judgements, learned, strict=True)]
    return replace(reduce(_joined, parts), ended_early=not is_complete)


def _part(asked: A, one: Judgement, learned: Learned, tolerances: Collection[Tolerance]) -> Comparison[A]:
    """What there is to say of one part."""
    return Comparison(
        asked,
        metadata=one.metadata,
        judged=one.judged,
        passes={tolerance.name: one.passes(tolerance) for tolerance in tolerances if one.judged},
        tolerances=tuple(tolerances),
        where=one.where(),
        hypotheses=learned.hypotheses,
        power=learned.power,
        suggestion=learned.suggestion,
        reference=one.reference,
        facts=learned.facts,
    )


def _joined(first: Comparison[A], other: Comparison[A]) -> Comparison[A]:
    """Two parts as one. Mistakes of the first stand alone if it is wrong."""
    is_wrong, power, more = first.ratio > CORRECT, first.power, other.power
    passes = {name: first.passes.get(name, True) and passes for name, passes in other.passes.items()}
    return replace(
        first,
        judged={**first.judged, **other.judged},
        passes=passes or first.passes,
        where=first.where or other.where,
        hypotheses=first.hypotheses if is_wrong else other.hypotheses,
        power=replace(
            power,
            killed=power.killed + more.killed,
            survivors=power.survivors + more.survivors,
            indistinguishable=power.indistinguishable + more.indistinguishable,
        ),
        suggestion=first.suggestion if is_wrong else other.suggestion or first.suggestion,
        reference={**first.reference, **other.reference},
        facts=first.facts if is_wrong else first.facts + other.facts,
    )
