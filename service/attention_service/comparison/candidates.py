"""Candidates: mutants and what they answer for a sample, and how far that is from other arrays."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from attention_service.backends.base import Check
from attention_service.comparison.baseline import Arrays, arrays_of
from attention_service.comparison.case import Case
from attention_service.comparison.errors import distance, square
from attention_service.comparison.mutants import MUTANTS
from attention_service.comparison.sample import Sample
from attention_service.comparison.solve import solve

# What mutants did, those included whose number is estimated.
MESSAGES: Final = {name: mutant.message for name, mutant in MUTANTS.items()} | {
    "scale.other": "The scale is another one.",
    "output.scaled": "The output is multiplied by a number.",
    "causal.other_offset": "The causal mask has another offset.",
    "heads.permuted": "The heads are returned in another order.",
    "heads.regrouped": "Query heads read other key/value heads.",
}

# Those with a number that is estimated from the output.
FITTED: Final = frozenset({"scale.other", "output.scaled", "causal.other_offset"})
# Groups of mutants that are looked for in the output alone.
ONLY_OUTPUT: Final = ("output", "value", "values", "empty", "gate", "merge")
# Mutants whose answer depends on the order of rounding, or on all rows, those of tiles and parts, which are many, and
# those of single libraries: neither combined with others nor estimated.
NOT_COMBINED: Final = frozenset(
    {"precision", "output", "empty", "logsumexp", "softmax.no_max", "mask.finite", "heads.layout", "heads.as_tokens"}
    | {
        "query",
        "keys.layout",
        "values",
        "kv",
        "merge",
        "keys.last_split",
        "keys.share_read",
        "scale.by_tile",
        "features",
    }
    | {"causal.by_tile", "window.missing_rows", "softmax.padded_lanes"}
    | {"mask.in_max", "padding.in_sum", "causal.last_row", "heads.values_only", "scale.zero_is_default"}
)


@dataclass(frozen=True, eq=False)
class Candidate:
    """A wrong case, and its arrays for a sample. names: of the mutants that made it, the first edit first

    did: what the kernel did, as a sentence, of a mistake that is not in MESSAGES
    """

    names: tuple[str, ...]
    case: Case
    arrays: Arrays
    did: str | None = None

    @property
    def rounds(self) -> bool:
        """True if a mistake is one of rounding."""
        return any(name.startswith("precision.") and name != "precision.overflow16" for name in self.names)

    @property
    def is_fitted(self) -> bool:
        """True if a number of the mistake is estimated from the output."""
        return not FITTED.isdisjoint(self.names)

    @property
    def message(self) -> str:
        """What the kernel did."""
        said = " ".join(MESSAGES[name] for name in self.names) if self.did is None else self.did
        return f"{said} ({self.case.detail})" if self.case.detail else said


def candidates(
    case: Case, sample: Sample, right: Arrays, check: Check, wanted: Collection[str] = MUTANTS
) -> Iterator[Candidate]:
    """The answers of all mutants that apply to a case and show in the arrays that are compared.

    right: these arrays of the sample; they stand where a mutant has none of its own. check: called before each
    wanted: the names of the mutants that are asked for
    """

    def edited() -> Iterator[tuple[str, Case]]:
        for mutant in (row for name, row in MUTANTS.items() if name in wanted):
            if mutant.needs is not None and mutant.needs not in right:
                continue
            if "output" in right or mutant.group not in ONLY_OUTPUT:
                yield from ((mutant.name, wrong) for wrong in mutant.edit(case))

    def answered(one: tuple[str, Case]) -> Candidate:
        check()
        name, wrong = one
        return Candidate((name,), wrong, {**right, **arrays_of(solve(wrong, sample), right)})

    return case.each(answered, edited())


def ratio(one: Arrays, other: Arrays, baselines: Mapping[str, float]) -> float:
    """The largest distance of two answers, in baselines."""
    return max((distance(one[name], other[name]) / baselines[name] for name in one if name in other), default=0.0)


def unexplained(one: Arrays, other: Arrays, baselines: Mapping[str, float]) -> float:
    """The sum of the squared differences of two answers, in baselines, each array's mean counting the same."""
    total = 0.0
    for name in one:
        if name in other:
            total += square(one[name], other[name], baselines[name]) / one[name].size
    return total
