"""The cost of a plan: floating-point operations, and memory in bytes. Memory estimates are close upper bounds.

Letters as everywhere: b batch, h query heads, g key/value heads, q queries, k keys, d and e features.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from service.attention.roles import Role
from service.attention.spec import STAGES
from service.attention.tiles import Cut, steps

if TYPE_CHECKING:
    from service.attention.plan import Plan
    from service.attention.spec import AttentionSpec, Norm

# Of the scores of a tile on a CPU: what a core can still keep near, and enough rows for fast products.
TILE_BYTES = 2**21
# Operations that take as long as a comparison.
SORTING = 16
# Bytes of what is returned by index, as top_k has it.
INDEX = 8
# Memory of a request beside large arrays.
SMALL = 2**18


class Tiling(NamedTuple):
    """How a backend computes tiles. bytes: scores of one tile; workers: tiles computed at the same time"""

    bytes: int = TILE_BYTES
    workers: int = 1


class Memory(NamedTuple):
    """The memory of a request in each phase.

    decode: while decoding, the body included; decoded: what the decoded arrays keep afterwards
    compute: while computing, beyond `decoded`, results included; results: what the results keep afterwards
    encode: while encoding, beyond `decoded` and `results`
    """

    decode: int
    decoded: int
    compute: int
    results: int
    encode: int

    @property
    def peak(self) -> int:
        """The memory of the dearest phase."""
        return SMALL + max(self.decode, self.decoded + max(self.compute, self.results + self.encode))


def flops(plan: Plan) -> int:
    """Multiplications and additions of the maps and the two products, and about 8 an element for the softmax.

    Sorting an element takes as long as some more for each of log2(k) comparisons.
    """
    sizes = plan.sizes
    new_keys = sizes.key_length - plan.roles.past_length
    lengths = sizes.query_length, new_keys, new_keys
    roles = plan.roles.query, plan.roles.key, plan.roles.value
    maps = sum(
        2 * length * role.map.weight.size for length, role in zip(lengths, roles, strict=True) if role.map is not None
    )
    sorting = 0 if plan.selection.top_k is None else SORTING * sizes.key_length.bit_length()
    return plan.score_count * (2 * (sizes.head_dim + sizes.value_dim) + 8 + sorting) + sizes.batch_size * maps


def returned_bytes(plan: Plan) -> int:
    """Memory of all returned arrays, as if none were a view of another."""
    sizes, chosen, include = plan.sizes, plan.selection, plan.selection.include
    b, q, k = sizes.batch_size, sizes.query_length, sizes.key_length
    new = k - plan.roles.past_length
    d, e = sizes.head_dim, sizes.value_dim
    tokens = {
        "query": sizes.num_heads * q * d,
        "key": sizes.num_kv_heads * new * d,
        "value": sizes.num_kv_heads * new * e,
        "head_outputs": sizes.num_heads * q * e,
        "present_key": sizes.num_kv_heads * k * d,
        "present_value": sizes.num_kv_heads * k * e,
    }
    own = _output_count(plan) + b * sum(count for name, count in tokens.items() if name in include)
    indices = 0 if chosen.top_k is None else prod(_weights_shape(plan)) * INDEX
    return collected_bytes(plan) + own * plan.dtype.itemsize + indices


def collected_bytes(plan: Plan) -> int:
    """Memory of the returned score matrices, row statistics and `received`."""
    sizes, include = plan.sizes, plan.selection.include
    b, heads, rows, k = sizes.batch_size, *_selected(plan), sizes.key_length
    computing = plan.compute_dtype.itemsize
    matrices = len(include & set(STAGES)) * b * heads * rows * k
    statistics = len(include & {"logsumexp", "entropy"}) * b * heads * rows
    received = b * (1 if plan.selection.average_heads else heads) * k if "received" in include else 0
    weights = prod(_weights_shape(plan)) if "attention_weights" in include else 0
    return (matrices + statistics + received) * computing + weights * plan.dtype.itemsize


def _selected(plan: Plan) -> tuple[int, int]:
    """The number of heads and queries of returned score matrices."""
    chosen = plan.selection
    heads = plan.sizes.num_heads if chosen.heads is None else len(chosen.heads)
    return heads, plan.sizes.query_length if chosen.queries is None else len(chosen.queries)


def _weights_shape(plan: Plan) -> tuple[int, ...]:
    heads, rows = _selected(plan)
    chosen = plan.selection
    columns = plan.sizes.key_length if chosen.top_k is None else chosen.top_k
    return plan.sizes.batch_size, 1 if chosen.average_heads else heads, rows, columns


def _output_count(plan: Plan) -> int:
    sizes, output = plan.sizes, plan.roles.output_map
    features = sizes.num_heads * sizes.value_dim if output is None else output.features
    return sizes.batch_size * sizes.query_length * features


def peak_bytes(plan: Plan, working: int, copied: int | None = None) -> int:
    """Memory that computing takes beyond the arrays of a request, at most; results included.

    working: memory of the tiles that are computed at the same time
    copied: bytes of those arrays that are cast, by `copied_bytes`; None where it is not known
    """
    sizes, roles = plan.sizes, plan.roles
    computing = plan.compute_dtype.itemsize
    kept, loading = operand_bytes(plan)
    queries = sizes.batch_size * sizes.num_heads * sizes.query_length
    outputs = queries * sizes.value_dim * computing
    scaled = 0 if "scores" in plan.selection.include else queries * sizes.head_dim * computing
    mapped = 0 if roles.output_map is None else _output_count(plan) * computing
    collected = returned_bytes(plan) - _output_count(plan) * plan.dtype.itemsize
    looked_at = 0 if plan.bias is None else plan.bias.size  # a boolean each
    computed = kept + outputs + scaled + collected + max(working, mapped, looked_at)
    finished = outputs + mapped + returned_bytes(plan) + kept
    if copied is None:
        copied = _all_copied_bytes(plan)
    return copied + max(loading, computed, finished)


def _all_copied_bytes(plan: Plan) -> int:
    """Bytes of query, key and value, were all of them cast."""
    return sum(prod(role.view.shape) for role in _distinct_roles(plan)) * plan.dtype.itemsize


def copied_bytes(plan: Plan, spec: AttentionSpec, sources: Mapping[str, np.ndarray]) -> int:
    """Memory of casts: arrays of the request that the plan or the operands hold in another type.

    sources: the fields that query, key and value come from; all others stand in spec
    """
    given = [sources[role.field] for role in _distinct_roles(plan)]
    given += [array for array in (spec.past_key, spec.past_value) if array is not None]
    cast = sum(array.size for array in given if array.dtype != plan.dtype) * plan.dtype.itemsize
    for array in _planned(plan):
        if not any(np.may_share_memory(array, other) for other in _options(spec)):
            cast += array.nbytes
    return cast


def _distinct_roles(plan: Plan) -> list[Role]:
    """The roles, each field once."""
    roles = (plan.roles.query, plan.roles.key, plan.roles.value)
    return list({role.field: role for role in roles}.values())


def _planned(plan: Plan) -> list[np.ndarray]:
    """The large arrays of a plan."""
    roles, seen = plan.roles, plan.visibility
    arrays = [plan.bias, seen.mask]
    for linear in (roles.query.map, roles.key.map, roles.value.map, roles.output_map):
        arrays += [] if linear is None else [linear.weight]
    for rotation in (plan.query_rotation, plan.key_rotation):
        arrays += [] if rotation is None else [rotation.cos, rotation.sin]
    return [array for array in arrays if array is not None]


def _options(spec: AttentionSpec) -> list[np.ndarray]:
    """The large arrays of a request beside its sources."""
    arrays = [spec.bias, spec.mask]
    if spec.projection is not None:
        maps = (spec.projection.query, spec.projection.key, spec.projection.value, spec.projection.output)
        arrays += [array for linear in maps if linear is not None for array in (linear.weight, linear.kernel)]
    if spec.rotary is not None:
        arrays += [spec.rotary.cos, spec.rotary.sin]
    return [array for array in arrays if array is not None]


def operand_bytes(plan: Plan) -> tuple[int, int]:
    """Memory of the loaded query, key and value unless they are views, and its peak while they are prepared."""
    sizes, roles = plan.sizes, plan.roles
    b, computing = sizes.batch_size, plan.compute_dtype.itemsize
    new, past = sizes.key_length - roles.past_length, roles.past_length
    halves = plan.dtype.itemsize < computing
    query = b * sizes.num_heads * sizes.query_length * sizes.head_dim * computing
    key = b * sizes.num_kv_heads * new * sizes.head_dim * computing
    value = b * sizes.num_kv_heads * new * sizes.value_dim * computing
    held, peak = [0, 0, 0], 0
    for i, (role, size) in enumerate(((roles.query, query), (roles.key, key), (roles.value, value))):
        cast = 0
        if role.map is not None and halves:
            cast = (prod(role.view.shape) + role.map.weight.size) * computing
        held[i] = size if role.map is not None or halves else 0
        peak = max(peak, sum(held) + cast)
    for i, size, norm, rotated in (
        (0, query, plan.query_norm, plan.query_rotation is not None),
        (1, key, plan.key_norm, plan.key_rotation is not None),
    ):
        if norm is not None or rotated:
            peak = max(peak, sum(held) + _changing(size, norm, rotated=rotated))
            held[i] = size
    if past:
        for i, size, features in ((1, key, sizes.head_dim), (2, value, sizes.value_dim)):
            before = b * sizes.num_kv_heads * past * features * computing
            peak = max(peak, sum(held) + size + before + (before if halves else 0))
            held[i] = size + before
    return sum(held), peak


def _changing(size: int, norm: Norm | None, *, rotated: bool) -> int:
    """Peak memory beside an operand while it is normalised and rotated, the result included."""
    normed = 0 if norm is None else size if norm.weight is None else 2 * size
    return max(normed, (size if norm is not None else 0) + 2 * size) if rotated else normed


def working_bytes(plan: Plan, tiling: Tiling = Tiling()) -> int:  # noqa: B008  (a tuple)
    """Memory of the tiles that are computed at the same time, by NumPy."""
    sizes, chosen = plan.sizes, plan.selection
    computing = plan.compute_dtype.itemsize
    step = steps(plan, Cut(tiling.bytes // computing, tiling.workers, streams=False))
    heads = step.kv_heads * (sizes.num_heads // sizes.num_kv_heads)
    stack, k = step.batch * heads, sizes.key_length
    scores = stack * step.rows * k
    rows = -(-sizes.query_length // step.rows)
    tiles = -(-sizes.batch_size // step.batch) * -(-sizes.num_kv_heads // step.kv_heads) * rows
    memory = scores * computing + stack * step.rows * sizes.value_dim * computing
    memory += _mask_bytes(plan, (step.batch, heads, step.rows, k))
    if plan.alibi is not None:
        memory += (scores + 2 * step.rows * k) * computing
    if chosen.heads is not None or chosen.queries is not None:
        memory += scores * computing
    if "entropy" in chosen.include:
        memory += 2 * scores * computing
    if chosen.top_k is not None:
        memory += scores * (2 * computing + INDEX)
    received = 0
    if "received" in chosen.include:  # each tile's, until all are there
        received = rows * sizes.batch_size * sizes.num_heads * k * computing
    return min(tiling.workers, tiles) * memory + received


def _mask_bytes(plan: Plan, tile: tuple[int, int, int, int]) -> int:
    """Memory of the boolean masks of a tile."""
    seen, (batch, _, rows, k) = plan.visibility, tile
    plane = batch * rows * k
    parts = []
    if seen.mask is not None:
        parts.append(_part_size(seen.mask, tile))
    if plan.bias is not None:
        parts.append(_part_size(plan.bias, tile))
    parts += [plane for part in (seen.segments, seen.band, seen.keys, seen.queries) if part is not None]
    return 3 * max(parts, default=0) + prod(tile) // 2  # some of the scores are looked at by themselves


def _part_size(array: np.ndarray, tile: tuple[int, int, int, int]) -> int:
    """Elements of the part of an array (b, h, q, k), each axis full or 1, that belongs to a tile."""
    return prod(min(length, part) for length, part in zip(array.shape, tile, strict=True))
