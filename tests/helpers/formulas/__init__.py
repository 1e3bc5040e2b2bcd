"""Wrong attention by formulas, planted into random requests. Importing the package fills its tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from tests.helpers.formulas import places, reads, sums  # noqa: F401  # each adds its rows
from tests.helpers.formulas.attention import Attention, request
from tests.helpers.formulas.table import FACTS, MISTAKES, Mistake

# How often the forms of a mistake are drawn again.
FORMS: Final = 24


@dataclass(frozen=True)
class Planted:
    """A request, and what a right kernel and one with a mistake return for it.

    name: of the mistake; facts: names of facts and known mistakes that are true of an output without a name
    """

    name: str
    fields: dict[str, Any]
    right: dict[str, np.ndarray]
    sent: dict[str, np.ndarray]
    facts: tuple[str, ...] = ()


def plant(name: str, seed: int) -> Planted | None:
    """A random request, and the answer with a mistake of the tables; None if that changes nothing."""
    asked, make, facts = _asked(name, seed)
    with np.errstate(all="ignore"):
        wrong, right = make(asked), asked.answer()
    if wrong is None:
        return None
    types = {"output": asked.dtype}
    if name.startswith("logsumexp"):
        types["logsumexp"] = np.float64 if asked.dtype == np.float64 else np.float32
    known, sent = (
        {
            one: array.astype(types[one])
            for one, array in zip(("output", "logsumexp"), arrays, strict=True)
            if one in types and array is not None
        }
        for arrays in (right, wrong)
    )
    return Planted(name.partition(" (")[0], asked.fields, known, sent, facts)


def is_of(name: str, planted: str, seed: int, tolerance: float) -> bool:
    """True if another mistake, in one of its forms, makes of a planted request what was sent, up to a tolerance."""
    asked, make, _ = _asked(planted, seed)
    with np.errstate(all="ignore"):
        sent = make(asked)
        for form in range(FORMS if name in MISTAKES else 0):
            asked.random = np.random.default_rng(form)
            try:
                answer = MISTAKES[name][0](asked)
            except (AssertionError, KeyError, IndexError):
                return False
            if (
                sent is not None
                and answer is not None
                and np.allclose(answer[0], sent[0], rtol=0, atol=tolerance, equal_nan=True)
            ):
                return True
    return False


def _asked(name: str, seed: int) -> tuple[Attention, Mistake, tuple[str, ...]]:
    """The request of a name and a seed, its mistake, and the facts that are true."""
    make, needs, facts = (*MISTAKES[name], ()) if name in MISTAKES else FACTS[name]
    return request(np.random.default_rng([seed, *name.encode()]), needs), make, facts
