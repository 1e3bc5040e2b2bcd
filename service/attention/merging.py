"""Several requests as one plan: each request becomes entries on the batch axis.

Requests with the same plan are stacked. Requests whose plans differ in their lengths only can be padded: padding is
hidden, as queries and as keys, so that no weight and no output changes but by the order of sums.

Shapes in comments: b batch, q queries, k keys.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, cast

import numpy as np

from service.attention.features import ALWAYS, leaves
from service.attention.operands import Operands
from service.attention.outputs import OUTPUTS
from service.attention.plan import Plan
from service.attention.result import OUTPUT, TOP_INDICES, Computed
from service.attention.spec import Output
from service.attention.terms import Band, Causal, KeyLengths, QueryLengths, ScoreTerm

# What plans may have that are stacked: nothing of it depends on the batch entry, as no array comes with the request.
STACKABLE: Final = (
    ALWAYS
    | {"softcap", "single_query", "terms.Causal.high", "terms.KeyLengths.keys", "terms.QueryLengths.queries"}
    | {"selection.average_heads", "selection.top_k", *(f"selection.include.{name}" for name in OUTPUTS)}
)
# Features that padding changes. All others must be equal.
PADDED: Final = frozenset(
    {f"roles.sizes.{name}" for name in ("batch_size", "query_length", "key_length")}
    | {f"roles.{role}.view.shape" for role in ("query", "key", "value")}
    | {"terms.Causal.high", "terms.KeyLengths.keys", "terms.QueryLengths.queries"}
)


def can_be_merged(plan: Plan) -> bool:
    """True if other requests can be computed together with those of this plan."""
    return plan.features <= STACKABLE


def padding_key(plan: Plan) -> Hashable:
    """A key that plans share which can be padded to one another's lengths.

    Lengths differ by less than a factor of 2, so that at most four times as many scores are computed.
    """
    lengths = (plan.sizes.query_length - 1).bit_length(), (plan.sizes.key_length - 1).bit_length()
    return lengths, tuple((name, value) for name, value in leaves(plan) if name not in PADDED)


def padded(one: Plan, other: Plan) -> Plan:
    """A plan with the longer lengths of both."""
    longest = {
        name: max(getattr(one.sizes, name), getattr(other.sizes, name))
        for name in ("batch_size", "query_length", "key_length")
    }
    return _with_sizes(one, **longest)


def merge(plans: Sequence[Plan]) -> Plan:
    """One plan for all requests. plans: that share a padding key, or are the same object"""
    first = plans[0]
    batch_size = sum(plan.sizes.batch_size for plan in plans)
    if all(plan is first for plan in plans):
        return _with_sizes(first, batch_size=batch_size)
    query_length = max(plan.sizes.query_length for plan in plans)
    key_length = max(plan.sizes.key_length for plan in plans)
    terms: list[ScoreTerm] = [
        KeyLengths(
            _tokens([(_keys(plan), plan.sizes.batch_size, plan.sizes.key_length) for plan in plans], key_length)
        ),
        QueryLengths(
            _tokens(
                [(plan.real_queries, plan.sizes.batch_size, plan.sizes.query_length) for plan in plans], query_length
            )
        ),
    ]
    highs = [(_high(plan), plan.sizes.batch_size) for plan in plans]
    if any(high is not None for high, _ in highs):
        unbounded = np.array([key_length])
        high = [np.broadcast_to(unbounded if high is None else high, (b,)) for high, b in highs]
        terms.append(Causal(high=np.concatenate(high)))
    merged = _with_sizes(first, batch_size=batch_size, query_length=query_length, key_length=key_length)
    return replace(merged, terms=tuple(terms))


def _with_sizes(plan: Plan, **sizes: int) -> Plan:
    return replace(plan, roles=replace(plan.roles, sizes=replace(plan.sizes, **sizes)))


def _keys(plan: Plan) -> np.ndarray | None:
    return next((term.keys for term in plan.terms if isinstance(term, KeyLengths)), None)


def _high(plan: Plan) -> np.ndarray | None:
    return next((term.high for term in plan.terms if isinstance(term, Band)), None)


def _tokens(parts: list[tuple[np.ndarray | None, int, int]], length: int) -> np.ndarray:
    """Which tokens are real, (b, length), from those of each plan: (b or 1, l) or None, b and l."""
    real = np.zeros((sum(b for _, b, _ in parts), length), bool)
    at = 0
    for part, b, own in parts:
        real[at : at + b, :own] = True if part is None else part
        at += b
    return real


def merge_operands(plan: Plan, parts: Sequence[Operands]) -> Operands:
    """The operands of a merged plan, which has no past, from the operands of each request."""
    sizes = plan.sizes
    query = _stacked([part.query for part in parts], sizes.query_length)
    key = _stacked([part.key for part in parts], sizes.key_length)
    value = _stacked([part.value for part in parts], sizes.key_length)
    norms = np.max([part.norms for part in parts], axis=0).tolist()  # no query meets the key of another request
    return Operands(query, key, value, None, None, norms, all(part.finite for part in parts))


def _stacked(arrays: list[np.ndarray], length: int) -> np.ndarray:
    """Arrays (b, h, l, d) as one of this length, padded with 0."""
    if all(array.shape[2] == length for array in arrays):
        return np.concatenate(arrays)
    _, h, _, d = arrays[0].shape
    stacked = np.zeros((sum(len(array) for array in arrays), h, length, d), arrays[0].dtype)
    at = 0
    for array in arrays:
        stacked[at : at + len(array), :, : array.shape[2]] = array
        at += len(array)
    return stacked


def split(plans: Sequence[Plan], computed: Computed) -> Iterator[Computed]:
    """The part of each request in what was computed of a merged plan."""
    at = 0
    for plan in plans:
        rows = slice(at, at := at + plan.sizes.batch_size)
        arrays = {name: _unpadded(name, array[rows], plan) for name, array in computed.arrays.items()}
        yield computed._replace(arrays=arrays, fully_masked_rows=fully_masked_rows(plan))


def _unpadded(name: str, array: np.ndarray, plan: Plan) -> np.ndarray:
    """An output without padding."""
    q, k = plan.sizes.query_length, plan.sizes.key_length
    if name == OUTPUT:  # heads stand before tokens, if they are not joined
        return array[..., :q, :]
    lengths: dict[str, int] = {"q": q, "k": k, "n": k}
    row = OUTPUTS[cast(Output, "attention_weights" if name == TOP_INDICES else name)]
    ranked = row is OUTPUTS["attention_weights"] and plan.selection.top_k is not None
    cut: tuple[Any, ...] = tuple(
        slice(None if axis not in lengths or (ranked and axis == "k") else lengths[axis]) for axis in row.axes
    )
    part: np.ndarray = array[cut]
    return part


def fully_masked_rows(plan: Plan) -> int:
    """How many of the b·h·q rows see no key, those of padding not counted. For plans that can be merged."""
    if not plan.terms:
        return 0
    sizes = plan.sizes
    visible = np.ones((sizes.batch_size, sizes.query_length, sizes.key_length), bool)
    keys, high = _keys(plan), _high(plan)
    if keys is not None:
        visible &= keys[:, None]
    if high is not None:
        i, j = np.arange(sizes.query_length)[:, None], np.arange(sizes.key_length)
        visible &= j - i <= high[:, None, None]
    unseen = ~visible.any(axis=-1)
    if plan.real_queries is not None:
        unseen &= plan.real_queries
    return int(unseen.sum()) * sizes.num_heads
