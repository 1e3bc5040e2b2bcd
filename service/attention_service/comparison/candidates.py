"""The answers of mutants for a sample."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final

from attention_service.backends.base import Check
from attention_service.comparison.baseline import arrays_of
from attention_service.comparison.case import Case
from attention_service.comparison.engine.candidate import Candidate
from attention_service.comparison.mutants import MUTANTS
from attention_service.comparison.rules import Arrays
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


def make_candidate(names: tuple[str, ...], case: Case, arrays: Arrays) -> Candidate[Case]:
    """The candidate of a wrong case. names: of the mutants that made it; arrays: its own, of a sample"""
    return Candidate(names, case, arrays, " ".join(MESSAGES[name] for name in names))


def is_fitted(candidate: Candidate[Case]) -> bool:
    """True if a number of the mistake is estimated from the output."""
    return not FITTED.isdisjoint(candidate.names)


def candidates(
    case: Case, sample: Sample, right: Arrays, check: Check, wanted: Collection[str] = MUTANTS
) -> Iterator[Candidate[Case]]:
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

    def answered(one: tuple[str, Case]) -> Candidate[Case]:
        check()
        name, wrong = one
        return make_candidate((name,), wrong, {**right, **arrays_of(solve(wrong, sample), right)})

    return case.each(answered, edited())
