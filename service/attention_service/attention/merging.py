"""Several requests with the same plan as one plan: each request becomes entries on the batch axis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from attention_service.attention.cost import arrays_of
from attention_service.attention.operands import Operands
from attention_service.attention.options import ALWAYS
from attention_service.attention.outputs import FORWARD
from attention_service.attention.plan import Plan
from attention_service.attention.result import Computed

# The options of plans that may be merged.
MERGEABLE: Final = (
    ALWAYS
    | {"softcap", "single_query", "terms.Causal.high", "terms.KeyLengths.booleans", "terms.QueryLengths.booleans"}
    | {"selection.average_heads", "selection.top_k", *(f"selection.include.{name}" for name in FORWARD)}
)


def can_be_merged(plan: Plan) -> bool:
    """True if several requests with this plan can be computed as one."""
    is_same_for_all_entries = all(len(array) == 1 for term in plan.terms for array in arrays_of(term))
    return plan.options <= MERGEABLE and is_same_for_all_entries


def merge(plan: Plan, count: int) -> Plan:
    """The plan for so many requests with this plan."""
    sizes = plan.sizes._replace(batch_size=plan.sizes.batch_size * count)
    return replace(plan, roles=replace(plan.roles, sizes=sizes))


def merge_operands(parts: Sequence[Operands]) -> Operands:
    """The operands of a merged plan, which has no past, from the operands of each request."""
    query, key, value = (np.concatenate(arrays) for arrays in zip(*(part[:3] for part in parts), strict=True))
    of_query, of_key, of_value = (np.concatenate(x) for x in zip(*(part.norms for part in parts), strict=True))
    finite = np.concatenate([part.finite for part in parts])
    return Operands(query, key, value, None, None, (of_query, of_key, of_value), finite)


def split(computed: Computed, count: int) -> Iterator[Computed]:
    """What was computed for each of so many requests, from what was computed for their merged plan.

    The terms of the plan are the same for all, so that all have the same number of masked rows.
    """
    masked = computed.fully_masked_rows // count
    parts = {name: np.split(array, count) for name, array in computed.arrays.items()}
    for index in range(count):
        arrays = {name: arrays[index] for name, arrays in parts.items()}
        yield computed._replace(arrays=arrays, fully_masked_rows=masked)
