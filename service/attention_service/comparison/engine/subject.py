"""Subjects: what a kernel returned, beside what is right, and what a kind of comparison says of its mistakes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, Generic, TypeVar

import numpy as np

from attention_service.attention.result import Metadata
from attention_service.backends.base import Check
from attention_service.comparison.engine.candidate import Candidate, W, ratio
from attention_service.comparison.engine.hypothesis import LEAST, Hypothesis, explained_part
from attention_service.comparison.engine.suggestion import Suggestion
from attention_service.comparison.errors import distance, measure, square
from attention_service.comparison.judged import Judged
from attention_service.comparison.places import places
from attention_service.comparison.rules import CORRECT, Arrays, is_ten_times_closer
from attention_service.comparison.tolerances import Tolerance
from attention_service.schemas.compare import Fact, Place

FLOAT64: Final = np.dtype(np.float64)
S = TypeVar("S")
T = TypeVar("T")


class Judgement(ABC):
    """What was sent, judged on all of its numbers."""

    @property
    def metadata(self) -> Metadata | None:
        """What the service says of the request; None if it computes none."""
        return None

    @property
    @abstractmethod
    def judged(self) -> Mapping[str, Judged]:
        """The errors of each array that was sent, by name."""

    @property
    @abstractmethod
    def reference(self) -> Arrays:
        """What is right, by name."""

    @abstractmethod
    def passes(self, tolerance: Tolerance) -> bool:
        """True if what was sent passes a test with a tolerance."""

    @abstractmethod
    def where(self) -> list[Place]:
        """Where the first array is wrong that is."""

    @abstractmethod
    def subject(self, check: Check) -> Subject[Any]:
        """What mistakes are searched in. check: raises to end all of its computations"""


@dataclass(frozen=True, eq=False)
class Subject(Judgement, Generic[W]):
    """What is compared, for a sample of its numbers. The engine asks a subject; a kind of comparison is a subclass.

    What is small is judged by its subject alone, which has all numbers.

    actual: what a kernel returned, float64 arrays by name; empty to ask only which mistakes could show
    right: what is right, the same arrays; baselines: of each array, the error that legal rounding explains
    wrong: the names of the arrays that are wrong; the others that were sent are right
    """

    actual: Arrays
    right: Arrays
    baselines: Mapping[str, float]
    wrong: frozenset[str]

    @property
    def judged(self) -> Mapping[str, Judged]:
        """The errors of each array that was sent, by name."""
        judged = {}
        for name, sent in self.actual.items():
            errors, of_right = (measure(one, self.right[name], FLOAT64) for one in (sent, self.right[name]))
            judged[name] = Judged(errors, of_right, self.baselines[name])
        return judged

    @property
    def reference(self) -> Arrays:
        """What is right, by name."""
        return self.right

    def passes(self, tolerance: Tolerance) -> bool:
        """True if what was sent passes a test with a tolerance."""
        return tolerance.passes_all(self.actual, self.right)

    def where(self) -> list[Place]:
        """Where the first array is wrong that is."""
        for name in self.wrong_names:
            most = CORRECT * self.baselines[name]
            return places(name, self.actual[name], self.right[name], most, self.axes(name))
        return []

    @property
    def wrong_names(self) -> list[str]:
        """The names of the arrays that are wrong, in the order in which they were sent."""
        return [name for name in self.actual if name in self.wrong]

    def axes(self, name: str) -> tuple[str, ...]:
        """What each axis of an array counts."""
        return tuple(f"axis {axis}" for axis in range(self.right[name].ndim))

    def subject(self, check: Check) -> Subject[W]:
        """The subject itself."""
        return self

    def candidates(self, check: Check) -> Iterable[Candidate[W]]:
        """Each form of each known mistake, with its arrays. check: called before each"""
        return ()

    def suggestions(self, names: Collection[str], check: Check, *, apart: bool) -> Iterable[Suggestion]:
        """Inputs made one after the other, with those of some mistakes that each shows; empty if none can be made.

        apart: True if the mistakes must also have different answers
        """
        return ()

    def facts(self) -> tuple[Fact, ...]:
        """What is true of the wrong arrays, beside the names of mistakes."""
        return ()

    def estimated(self, check: Check) -> Iterable[Candidate[W]]:
        """Mistakes with a number that is estimated from what was sent. Asked if no known mistake is proved."""
        return ()

    def combined(
        self, singles: list[Hypothesis], candidates: list[Candidate[W]], check: Check
    ) -> Iterable[Candidate[W]]:
        """Pairs of mistakes that may explain what one does not. singles: ranked; candidates: of known mistakes"""
        return ()

    def can_prove(self, candidate: Candidate[W], apart: float) -> bool:
        """False if one of many mistakes may be so close by chance. apart: see `Hypothesis.ratio`"""
        return True

    def confirms(self, hypothesis: Hypothesis, check: Check) -> bool:
        """True if a proof of the sample holds for all numbers."""
        return True

    def told(self, hypotheses: list[Hypothesis]) -> list[Hypothesis]:
        """The hypotheses of these that are told."""
        return hypotheses

    def alive(self, candidates: list[Candidate[W]], check: Check) -> list[Candidate[W]]:
        """The candidates whose answers do not differ from what is right."""
        return [one for one in candidates if not ratio(one.arrays, self.right, self.baselines) > CORRECT]

    def misses(self, candidate: Candidate[W], tolerance: Tolerance) -> bool:
        """True if the answer of a mistake passes a test with a tolerance."""
        return tolerance.passes_all(candidate.arrays, self.right)

    def is_by_tile(self, name: str) -> bool:
        """True for the name of a mistake of tiles."""
        return False

    @property
    def tiles(self) -> tuple[int, ...]:
        """The sizes of tiles that mistakes of tiles are tried for."""
        return ()

    def forget(self) -> None:
        """Drop what was computed for the sample: a made input takes as much memory."""

    def each(self, function: Callable[[S], T], parts: Iterable[S]) -> Iterator[T]:
        """The results of a function for each part, in order."""
        return map(function, parts)

    def distance(self, candidate: Candidate[W], name: str) -> tuple[float, float]:
        """How far an array that was sent is from that of a mistake, and from the right one, in one unit."""
        sent = self.actual[name]
        return distance(sent, candidate.arrays[name]), distance(sent, self.right[name])

    def ratio(self, candidate: Candidate[W]) -> float:
        """The largest distance of what was sent to the answer of a mistake, in baselines."""
        return ratio(self.actual, candidate.arrays, self.baselines)

    def contradicts(self, candidate: Candidate[W]) -> bool:
        """True if a mistake would change an array that is right: the kernel did not make it."""
        return any(
            distance(candidate.arrays[name], self.right[name]) > 2 * CORRECT * self.baselines[name]
            for name in self.actual.keys() - self.wrong
        )

    def judge(self, candidate: Candidate[W]) -> Hypothesis:
        """The hypothesis that a candidate is, by the baselines of what is right."""
        if candidate.rounds:
            return self._judged(candidate, self.share_of_size(candidate), self.ratio(candidate))
        left = self.left(candidate.arrays)
        shares = {name: 1 - left[name] / error if error else 0.0 for name, error in self._errors.items()}
        part = explained_part(shares)
        if part:
            candidate = self.restricted(candidate, part)
        explained = min((shares[name] for name in part or shares), default=0.0)
        return self._judged(candidate, explained, self.ratio(candidate), part)

    def restricted(self, candidate: Candidate[W], part: tuple[str, ...]) -> Candidate[W]:
        """A mistake that was made for some of the wrong arrays alone."""
        others = {name: self.right[name] for name in candidate.arrays.keys() - {*part}}
        return replace(candidate, arrays={**candidate.arrays, **others})

    def refined(self, hypothesis: Hypothesis) -> Hypothesis:
        """A hypothesis by the baselines of its own answer; the same where these are not computed."""
        return hypothesis

    def share_of_size(self, candidate: Candidate[W]) -> float:
        """How much of the size of the error coarse rounding makes: its errors differ with the order of the sums."""
        return 0.0

    def left(self, arrays: Arrays) -> dict[str, float]:
        """The mean squared error that is left of each wrong array beside those of a mistake, in baselines."""
        names = (name for name in self.wrong_names if name in arrays)
        return {
            name: square(self.actual[name], arrays[name], self.baselines[name]) / arrays[name].size for name in names
        }

    @cached_property
    def _errors(self) -> dict[str, float]:
        """The mean squared error of each wrong array; of what was sent itself if that is less.

        What makes all numbers small explains the error of small ones, but not what was sent.
        """
        zeros = self.left({name: np.zeros(array.shape) for name, array in self.right.items()})
        return {name: min(error, max(zeros[name], CORRECT)) for name, error in self.left(self.right).items()}

    def _judged(
        self, candidate: Candidate[W], explained: float, apart: float, part: tuple[str, ...] = ()
    ) -> Hypothesis:
        """A hypothesis with the rule of proof. apart: see `Hypothesis.ratio`"""
        proves = apart <= CORRECT and explained >= LEAST and not (candidate.rounds or part)
        proves = proves and self.is_closer(candidate)
        return Hypothesis(candidate, explained, apart, proves and self.can_prove(candidate, apart), part=part)

    def is_closer(self, candidate: Candidate[W]) -> bool:
        """True if an array that was sent is ten times closer to that of the mistake than to the right one."""
        for name, sent in self.actual.items():
            # Many mistakes make nothing but NaN.
            if np.isfinite(sent).any() and is_ten_times_closer(*self.distance(candidate, name)):
                return True
        return False
