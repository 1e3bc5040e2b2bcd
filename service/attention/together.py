"""Several requests as one: each is so many more entries on the batch axis, filled up to common lengths.

What fills up is hidden, as a query and as a key: its weights are exactly 0, and nobody's numbers change but by the
order of their sums. For plans without arrays of options: what is not said here they have in common.

Shapes in comments: b batch, q queries, k keys.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from service.attention.operands import Operands
from service.attention.plan import Plan
from service.attention.positions import Band
from service.attention.result import OUTPUT, Computed
from service.attention.spec import STAGES
from service.attention.visibility import Visibility

# Of what is returned by key and not by query.
BY_KEY = frozenset({"key", "value", "present_key", "present_value", "received"})


def kind(plan: Plan) -> Hashable:
    """What plans have in common that can be one. Lengths differ by less than a factor of 2, so that less is computed in
    vain than three times what is asked for."""
    found: Hashable = plan.prepared.get("kind")
    if found is None:
        sizes, chosen = plan.sizes, plan.selection
        lengths = (sizes.query_length - 1).bit_length(), (sizes.key_length - 1).bit_length()
        features = sizes.num_heads, sizes.num_kv_heads, sizes.head_dim, sizes.value_dim
        answer = chosen.include, chosen.average_heads, chosen.top_k, "h" in plan.layout
        numbers = plan.dtype_name, plan.scale, plan.softcap, plan.normalization
        found = plan.prepared["kind"] = (lengths, features, answer, numbers)
    return found


def holding(one: Plan, other: Plan) -> Plan:
    """One of these, with lengths for both."""
    sizes = replace(
        one.sizes,
        batch_size=max(one.sizes.batch_size, other.sizes.batch_size),
        query_length=max(one.sizes.query_length, other.sizes.query_length),
        key_length=max(one.sizes.key_length, other.sizes.key_length),
    )
    return one if sizes == one.sizes else replace(one, roles=replace(one.roles, sizes=sizes))


def merge(plans: Sequence[Plan]) -> Plan:
    """The plan of all of these as one. For plans of one kind."""
    first = plans[0]
    sizes = replace(
        first.sizes,
        batch_size=sum(plan.sizes.batch_size for plan in plans),
        query_length=max(plan.sizes.query_length for plan in plans),
        key_length=max(plan.sizes.key_length for plan in plans),
    )
    merged = replace(first, roles=replace(first.roles, sizes=sizes))
    if all(plan is first for plan in plans):  # what it hides, it hides of every entry
        return merged
    queries = [(plan.visibility.queries, plan.sizes.batch_size, plan.sizes.query_length) for plan in plans]
    keys = [(plan.visibility.keys, plan.sizes.batch_size, plan.sizes.key_length) for plan in plans]
    return replace(
        merged,
        visibility=Visibility(
            mask=None,
            keys=_seen(keys, sizes.key_length),
            queries=_seen(queries, sizes.query_length),
            segments=None,
            band=_band(plans, -sizes.query_length, sizes.key_length),
        ),
    )


def _seen(parts: list[tuple[np.ndarray | None, int, int]], length: int) -> np.ndarray | None:
    """Which tokens are not hidden, (b, length), by those of each: (b or 1, l), b and l. None where all are."""
    seen = np.zeros((sum(b for _, b, _ in parts), length), bool)
    at = 0
    for part, b, own in parts:
        seen[at : at + b, :own] = True if part is None else part
        at += b
    return None if seen.all() else seen


def _band(plans: Sequence[Plan], lowest: int, highest: int) -> Band | None:
    """The edges of each. lowest, highest: which hide nothing"""
    bands = [(plan.visibility.band or Band(None, None), plan.sizes.batch_size) for plan in plans]

    def edge(given: list[tuple[np.ndarray | None, int]], far: int) -> np.ndarray | None:
        if all(one is None for one, _ in given):
            return None
        return np.concatenate([np.broadcast_to(far if one is None else one, (b,)) for one, b in given])

    low, high = edge([(band.low, b) for band, b in bands], lowest), edge([(band.high, b) for band, b in bands], highest)
    return None if low is None and high is None else Band(low, high)


def merge_operands(plan: Plan, parts: Sequence[Operands]) -> Operands:
    """The operands of a merged plan, which has no past, by those of each."""
    sizes = plan.sizes
    query = _filled_up([part.query for part in parts], sizes.query_length)
    key = _filled_up([part.key for part in parts], sizes.key_length)
    value = _filled_up([part.value for part in parts], sizes.key_length)
    norms = np.max([part.norms for part in parts], axis=0).tolist()  # as nobody's query meets another's key
    return Operands(query, key, value, None, None, norms, all(part.finite for part in parts))


def _filled_up(arrays: list[np.ndarray], length: int) -> np.ndarray:
    """(b, h, l, d) of each, as one of this length; 0 where one is shorter."""
    if all(array.shape[2] == length for array in arrays):
        return np.concatenate(arrays)
    _, h, _, d = arrays[0].shape
    filled = np.zeros((sum(len(array) for array in arrays), h, length, d), arrays[0].dtype)
    at = 0
    for array in arrays:
        filled[at : at + len(array), :, : array.shape[2]] = array
        at += len(array)
    return filled


def split(plans: Sequence[Plan], computed: Computed) -> Iterator[Computed]:
    """What was computed of a merged plan, as each would have got it by itself."""
    at = 0
    for plan in plans:
        rows = slice(at, at := at + plan.sizes.batch_size)
        arrays = {name: _part(name, array[rows], plan) for name, array in computed.arrays.items()}
        yield computed._replace(arrays=arrays, fully_masked_rows=_fully_masked_rows(plan))


def _part(name: str, array: np.ndarray, plan: Plan) -> np.ndarray:
    """Without what filled it up: the heads stand before the tokens, unless the output is joined from them."""
    q, k = plan.sizes.query_length, plan.sizes.key_length
    if name == OUTPUT:
        return array[..., :q, :]
    if name in BY_KEY:
        return array[:, :, :k]
    by_both = name in STAGES or (name == "attention_weights" and plan.selection.top_k is None)
    return array[:, :, :q, :k] if by_both else array[:, :, :q]


def _fully_masked_rows(plan: Plan) -> int:
    """How many of b·h·q see no key, those of padding not counted."""
    found: int | None = plan.prepared.get("fully_masked_rows")
    if found is None:
        seen, sizes = plan.visibility, plan.sizes
        i, j = np.arange(sizes.query_length)[:, None], np.arange(sizes.key_length)
        visible = np.ones((sizes.batch_size, sizes.query_length, sizes.key_length), bool)
        if seen.keys is not None:
            visible &= seen.keys[:, None]
        if seen.band is not None and seen.band.low is not None:
            visible &= j - i >= seen.band.low[:, None, None]
        if seen.band is not None and seen.band.high is not None:
            visible &= j - i <= seen.band.high[:, None, None]
        unseen = ~visible.any(axis=-1)
        if seen.queries is not None:
            unseen &= seen.queries
        found = plan.prepared["fully_masked_rows"] = int(unseen.sum()) * sizes.num_heads
    return found
