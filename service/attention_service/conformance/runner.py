"""A whole suite against one implementation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from attention_service.conformance.files import read
from attention_service.conformance.judge import Diagnosis, Outcome, Status, diagnose, judge
from attention_service.conformance.requests import Choice
from attention_service.conformance.suite import SuiteCase, make_cases
from attention_service.conformance.target import Target, load_target

Mapper = Callable[[Callable[[SuiteCase], Outcome], Iterable[SuiteCase]], Iterable[Outcome]]
# Without a directory, so many cases are made: each corner about twice. They show every mistake that `compare` knows.
CASES: Final = 420
# What is not right, the worst first: a wrong answer is worse than an error, which nobody overlooks.
FAILURES: Final[tuple[Status, ...]] = ("wrong", "error", "imprecise")


@dataclass
class CornerResult:
    """The outcomes of the cases of a corner. diagnosis: of the first one that fails"""

    name: str
    outcomes: list[Outcome] = field(default_factory=list)
    diagnosis: Diagnosis | None = None

    def count(self, status: Status) -> int:
        """How many cases have a status."""
        return sum(outcome.status == status for outcome in self.outcomes)

    @property
    def first_failure(self) -> Outcome | None:
        """The first case of the worst outcome, if that is one of FAILURES."""
        failed = [outcome for outcome in self.outcomes if outcome.status == self.status]
        return failed[0] if self.status in FAILURES else None

    @property
    def reason(self) -> str | None:
        """Why the first case that is not supported is not; None if all are supported."""
        return next((outcome.message for outcome in self.outcomes if outcome.status == "unsupported"), None)

    @property
    def status(self) -> Status:
        """The worst outcome; unsupported only if no case is supported."""
        return next(status for status in (*FAILURES, "correct", "unsupported") if self.count(status))


@dataclass(frozen=True)
class SuiteResult:
    """The results of all corners, in the order of their first cases."""

    corners: tuple[CornerResult, ...]

    def count(self, status: Status) -> int:
        """How many cases have a status."""
        return sum(corner.count(status) for corner in self.corners)

    @property
    def exit_status(self) -> int:
        """0: all answers are right; 1: some are not; 2: nothing could be judged."""
        if any(self.count(status) for status in FAILURES):
            return 1
        return 0 if self.count("correct") else 2


def run(
    directory: str | Path | None,
    target: str | Target,
    *,
    only: Collection[str] | None = None,
    head_dims: Sequence[int] = (),
    dtypes: Sequence[str] = (),
    mapper: Mapper = map,
) -> SuiteResult:
    """The result of an implementation for a suite.

    directory: as `write` makes it; None for 420 cases that are made at once
    target:    a callable, or its name `module:function`. It is called with the fields of each request by name, arrays
               as ndarrays, and returns the output or a dict of arrays; it may raise Unsupported
    only:      the fields that requests may have beside query, key and value; cases with others are left out
    head_dims: head dimensions, multiples of 8, of cases as long as kernels for tensor cores take them; none for short
               cases with any
    dtypes:    the types of requests; none for all
    mapper:    applies the judge to the cases: `map`, or that of an executor, such as ProcessPoolExecutor.map

    Errors: ImportError and ValueError for a name that leads nowhere; OSError, ValueError for a directory; ValueError
    for a choice that no suite has.
    """
    choice = Choice.of(only, head_dims, dtypes)
    if directory is not None and head_dims:
        raise ValueError("head_dims: expected no directory, whose cases are made already")
    function = load_target(target) if isinstance(target, str) else target
    if directory is None:
        return run_cases(make_cases(CASES, 0, choice), function, mapper=mapper)
    cases = (case for case in read(directory) if not dtypes or case.dtype in dtypes)
    return run_cases((case for case in cases if choice.has(case.fields)), function, mapper=mapper)


def run_cases(cases: Iterable[SuiteCase], target: Target, *, explain: bool = True, mapper: Mapper = map) -> SuiteResult:
    """The result of an implementation for some cases.

    explain: True to search for the mistakes of failures; mapper: as of `run`
    """
    found: dict[str, CornerResult] = {}
    for outcome in mapper(partial(judge, target=target), cases):
        name = outcome.case.corner
        found.setdefault(name, CornerResult(name)).outcomes.append(outcome)
    if explain:
        for corner in found.values():
            if (failure := corner.first_failure) is not None and failure.status != "error":
                corner.diagnosis = diagnose(failure.case, target)
    return SuiteResult(tuple(found.values()))
