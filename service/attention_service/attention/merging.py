"""Several requests as one plan: each request becomes entries on the batch axis.

Requests with the same plan are stacked. Requests whose plans differ in their lengths only can be padded: padding is
hidden, as queries and as keys, so that results differ at most by rounding.

Shapes in comments: b batch, q queries, k keys.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from attention_service.attention.cost import arrays_of
from attention_service.attention.operands import Operands
from attention_service.attention.options import ALWAYS, leaves
from attention_service.attention.outputs import OUTPUTS, output_shape
from attention_service.attention.plan import Plan
from attention_service.attention.result import Computed
from attention_service.attention.score_term import ScoreTerm
from attention_service.attention.shapes import Sizes
from attention_service.attention.terms import Band, Causal, KeyLengths, Mask, QueryLengths
from attention_service.attention.tiles import whole
from attention_service.attention.visibility import visible

# The options of plans that may be stacked.
STACKABLE: Final = (
    ALWAYS
    | {"softcap", "single_query", "terms.Causal.high", "terms.KeyLengths.booleans", "terms.QueryLengths.booleans"}
    | {"selection.average_heads", "selection.top_k", *(f"selection.include.{name}" for name in OUTPUTS)}
)
# Options that padding changes. All others must be equal.
PADDED: Final = frozenset(
    {f"roles.sizes.{name}" for name in ("batch_size", "query_length", "key_length")}
    | {"terms.Causal.high", "terms.KeyLengths.booleans", "terms.QueryLengths.booleans"}
)


def can_be_merged(plan: Plan) -> bool:
    """True if other requests can be computed together with those of this plan."""
    is_same_for_all_entries = all(len(array) == 1 for term in plan.terms for array in arrays_of(term))
    return plan.options <= STACKABLE and is_same_for_all_entries


def padding_key(plan: Plan) -> Hashable:
    """A value for a dict: plans with the same one can be padded to common lengths.

    Lengths differ by less than a factor of 2, so that at most four times as many scores are computed.
    """
    lengths = (plan.sizes.query_length - 1).bit_length(), (plan.sizes.key_length - 1).bit_length()
    return lengths, tuple((name, value) for name, value in leaves(plan) if name not in PADDED)


def padded(one: Plan, other: Plan) -> Plan:
    """The first plan with the longer lengths of both."""
    return _with_sizes(one, Sizes(*map(max, one.sizes, other.sizes)))


def merge(plans: Sequence[Plan]) -> Plan:
    """One plan for all requests. plans: all with the same padding key, or one object several times"""
    first = plans[0]
    longest = Sizes(*map(max, zip(*(plan.sizes for plan in plans), strict=True)))
    merged = _with_sizes(first, longest._replace(batch_size=sum(plan.sizes.batch_size for plan in plans)))
    if all(plan is first for plan in plans):
        return merged
    keys = [_real_tokens(plan, KeyLengths, plan.sizes.key_length) for plan in plans]
    queries = [_real_tokens(plan, QueryLengths, plan.sizes.query_length) for plan in plans]
    terms: list[ScoreTerm] = [
        KeyLengths(_stacked(keys, longest.key_length).swapaxes(2, 3)),
        QueryLengths(_stacked(queries, longest.query_length)),
    ]
    highs = [next((term.high for term in plan.terms if isinstance(term, Band)), None) for plan in plans]
    if any(high is not None for high in highs):
        unbounded = np.array([longest.key_length])
        high = [
            np.broadcast_to(unbounded if high is None else high, plan.sizes.batch_size)
            for high, plan in zip(highs, plans, strict=True)
        ]
        terms.append(Causal(high=np.concatenate(high)))
    return replace(merged, terms=tuple(terms))


def merge_operands(plan: Plan, parts: Sequence[Operands]) -> Operands:
    """The operands of a merged plan, which has no past, from the operands of each request."""
    query = _stacked([part.query for part in parts], plan.sizes.query_length)
    key = _stacked([part.key for part in parts], plan.sizes.key_length)
    value = _stacked([part.value for part in parts], plan.sizes.key_length)
    norms = np.max([part.norms for part in parts], axis=0).tolist()  # no query meets the key of another request
    return Operands(query, key, value, None, None, norms, all(part.finite for part in parts))


def split(plans: Sequence[Plan], computed: Computed) -> Iterator[Computed]:
    """What was computed for each of the plans, without padding, from what was computed for all of them merged."""
    start = 0
    for plan in plans:
        arrays = {}
        for name, array in computed.arrays.items():
            _, *lengths = output_shape(name, plan)
            arrays[name] = array[start : start + plan.sizes.batch_size, *map(slice, lengths)]
        start += plan.sizes.batch_size
        yield computed._replace(arrays=arrays, fully_masked_rows=fully_masked_rows(plan))


def fully_masked_rows(plan: Plan) -> int:
    """How many of the b·h·q rows see no key, those of padding not counted. For plans that can be merged."""
    seen = visible(plan.terms, whole(plan), np.asarray)
    if seen is None:
        return 0
    unseen = ~seen.any(axis=-1)[:, 0]  # b q, each full or 1: these terms hide from all heads alike
    if plan.real_queries is not None:
        unseen = unseen & plan.real_queries[:, 0, :, 0]
    sizes = plan.sizes
    return int(np.broadcast_to(unseen, (sizes.batch_size, sizes.query_length)).sum()) * sizes.num_heads


def _with_sizes(plan: Plan, sizes: Sizes) -> Plan:
    return replace(plan, roles=replace(plan.roles, sizes=sizes))


def _real_tokens(plan: Plan, kind: type[Mask], length: int) -> np.ndarray:
    """Which tokens are not padding by the term of this class, (b, 1, l, 1)."""
    tokens = (plan.sizes.batch_size, 1, length, 1)
    for term in plan.terms:
        if isinstance(term, kind):
            return np.broadcast_to(term.booleans.reshape(-1, 1, length, 1), tokens)
    return np.ones(tokens, bool)


def _stacked(arrays: Sequence[np.ndarray], length: int) -> np.ndarray:
    """One array of arrays (b, h, l, d), stacked along b and padded with 0 to this length."""
    if all(array.shape[2] == length for array in arrays):
        return np.concatenate(arrays)
    _, h, _, d = arrays[0].shape
    stacked = np.zeros((sum(map(len, arrays)), h, length, d), arrays[0].dtype)
    start = 0
    for array in arrays:
        stacked[start : start + len(array), :, : array.shape[2]] = array
        start += len(array)
    return stacked
