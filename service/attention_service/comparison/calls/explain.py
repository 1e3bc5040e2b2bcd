"""Which mistakes of addressing explain what a kernel returned, and which a call could show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from attention_service.backends.base import Backend, Check
from attention_service.comparison.calls.judge import largest_errors, right
from attention_service.comparison.calls.mistakes import MISTAKES, Mistake
from attention_service.comparison.calls.moves import Suspect, suspects
from attention_service.comparison.calls.parts import parts, question_of
from attention_service.comparison.calls.question import CallQuestion
from attention_service.comparison.rules import is_ten_times_closer
from attention_service.engines.call import Call
from attention_service.errors import InvalidRequest
from attention_service.pipeline.calls import exact_answer

# Why a mistake is not looked for.
TOO_LONG: Final = "a sequence would have too many keys to compute"


@dataclass(frozen=True)
class Explanation:
    """A mistake that explains what was returned.

    explained: the share of the squared error; ratio: in baselines of its own; proves: False if it is NaN alone
    """

    mistake: Mistake
    detail: str
    explained: float
    ratio: float
    proves: bool


def explanations(
    asked: CallQuestion, errors: Mapping[str, float], wrong_sequences: Sequence[int], backend: Backend, check: Check
) -> Iterator[Explanation]:
    """The mistakes whose answer is what was returned, and ten times closer to it than the right one.

    errors: the largest error of each array; wrong_sequences: those that are wrong, first the one that has it
    """
    worst = wrong_sequences[0]
    is_right = np.ones(len(asked.addressed.query.lengths), bool)
    is_right[list(wrong_sequences)] = False
    wrong = [name for name, error in errors.items() if error > 0]
    for mistake in MISTAKES.values():
        for suspect in suspects(mistake.edit, asked.call) if mistake.applies(asked.call) else ():
            # A sequence that would read what is not there is wrong.
            if suspect.unknown is not None and (suspect.unknown[worst] or (suspect.unknown & is_right).any()):
                continue
            found = _Agreement.of(asked, suspect, worst, backend, check)
            if found is None and suspect.of_output and wrong == ["output"]:
                outputs = replace(asked, actual={name: (asked.actual or {})[name] for name in wrong})
                found = _Agreement.of(outputs, suspect, worst, backend, check)
            shares = () if found is None else (found.errors.get(name, 0.0) / errors[name] for name in wrong)
            left = min(shares, default=1.0)  # rows that are wrong only in the mean have no such errors
            if found is not None and is_ten_times_closer(left, 1):
                yield Explanation(mistake, suspect.detail, 1 - left**2, found.ratio, found.has_numbers)
                break


def agrees(asked: CallQuestion, suspect: Suspect, first: int, backend: Backend, check: Check) -> float | None:
    """The largest error in baselines if what was returned is what a suspect computes, else None.

    first: the sequence that is tried first
    """
    found = _Agreement.of(asked, suspect, first, backend, check)
    return None if found is None else found.ratio


def shown(asked: CallQuestion, backend: Backend, check: Check) -> Iterator[tuple[Mistake, bool, str]]:
    """Each mistake that could be made of a call: if its answer differs from the right one, and if not, why."""
    known = [one for one in MISTAKES.values() if one.applies(asked.call)]
    if not known:
        return
    returned = replace(asked, actual=_right(asked, backend, check), tolerance=None)
    for mistake in known:
        count, differs = 0, True
        for suspect in suspects(mistake.edit, asked.call):
            count += 1
            differs = differs and _Agreement.of(returned, suspect, 0, backend, check) is None
        is_long = not count and next(mistake.edit(asked.call), None) is not None
        yield mistake, differs and count > 0, "" if count else TOO_LONG if is_long else mistake.unseen


def _right(asked: CallQuestion, backend: Backend, check: Check) -> dict[str, np.ndarray]:
    """The right answer of a call with the axes (slots, l, h, …)."""
    call, answer = asked.addressed, exact_answer(asked.addressed, backend, check)
    return {
        name: call.form.read(name, array, call.query, call.value.features, f"/{name}")
        for name, array in (("output", answer.output), ("logsumexp", answer.logsumexp))
    }


@dataclass(frozen=True)
class _Agreement:
    """What was returned is what a suspect computes. errors: the largest of each array; has_numbers: not NaN alone"""

    errors: Mapping[str, float]
    ratio: float
    has_numbers: bool

    @classmethod
    def of(cls, asked: CallQuestion, suspect: Suspect, first: int, backend: Backend, check: Check) -> _Agreement | None:
        """None if a sequence does not agree. first: the sequence that is tried first"""
        other, nan = replace(asked, call=suspect.call), suspect.nan
        try:
            call = other.addressed if suspect.unknown is None else _without(other.addressed, suspect.unknown)
            if nan is None:
                return cls._of_parts(other, call, first, backend, check)
            if not all(_is_nan(other, "output", n, slice(None)) for n in np.flatnonzero(nan).tolist()):
                return None
            sums = {name: array for name, array in (asked.actual or {}).items() if name == "logsumexp"}
            if sums and cls._of_parts(replace(other, actual=sums), call, first, backend, check) is None:
                return None
            return cls._of_parts(other, _without(call, nan), first, backend, check)
        except InvalidRequest:  # numbers that no kernel could compute
            return None

    @classmethod
    def _of_parts(
        cls, asked: CallQuestion, call: Call, first: int, backend: Backend, check: Check
    ) -> _Agreement | None:
        """The same, for all sequences of a call that have queries. Errors: InvalidRequest of every kind."""
        asked = replace(asked, call=call)
        errors: dict[str, float] = {}
        ratio, has_numbers = 0.0, False
        for part in sorted(parts(call), key=lambda part: first not in part):
            check()
            keys, values = _has_numbers(call, part)
            kept = part[keys & values]
            are_nan = [_is_nan(asked, "output", n, slice(-1, None)) for n in part[~(keys & values)].tolist()]
            are_nan += [_is_nan(asked, "logsumexp", n, slice(-1, None)) for n in part[~keys].tolist()]
            if not all(are_nan):
                return None
            if not len(kept):
                continue
            found = right(question_of(asked, kept), backend, check)
            if found is None:
                return None
            has_numbers, ratio = True, max(ratio, found.ratio)
            errors |= {name: max(error, errors.get(name, 0.0)) for name, error in largest_errors(found).items()}
        return cls(errors, ratio, has_numbers)


def _without(call: Call, mask: np.ndarray) -> Call:
    """The call without the queries of some sequences."""
    lengths = np.where(mask, 0, call.query.lengths)
    return call._replace(query=call.query._replace(lengths=lengths), offset=call.offsets)


def _has_numbers(call: Call, part: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(n,) each, True for sequences whose keys are finite, and whose values are."""
    past = call.past or ()
    both = ((*past[:1], call.key), (*past[1:], call.value))
    keys, values = (
        np.array([all(np.isfinite(one.of(n).astype(np.float64)).all() for one in tokens) for n in part.tolist()], bool)
        for tokens in both
    )
    return keys, values


def _is_nan(asked: CallQuestion, name: str, sequence: int, queries: slice) -> bool:
    """True if an array of queries of a sequence is NaN, or was not returned."""
    rows, array = asked.addressed.query.rows, (asked.actual or {}).get(name)
    assert rows is not None
    return array is None or bool(np.isnan(array[rows.of(sequence)][queries]).all())
