"""The cost of a plan: floating-point operations, and memory in bytes. Memory estimates are close upper bounds.

Letters as everywhere: b batch, h query heads, g key/value heads, q queries, k keys, d and e features.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil, prod
from typing import Final, NamedTuple

import numpy as np

from attention_service.attention.options import leaves
from attention_service.attention.outputs import OUTPUT
from attention_service.attention.plan import Plan
from attention_service.attention.roles import Role
from attention_service.attention.spec import AttentionSpec
from attention_service.attention.steps import Steps
from attention_service.attention.tiles import Tiling, backward_tiling, block_columns, tile_size

# Bytes of an index, as top_k returns them.
INDEX: Final = 8
# Bytes for each index of gathered keys: sorted, as loaded, and as positions that are compared.
GATHERED: Final = 24
# Bytes of the bounds on the numbers of each batch entry.
ENTRY: Final = 128
# Memory of a request beside large arrays.
SMALL: Final = 2**18


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
        """The memory of the phase that takes most."""
        return SMALL + max(self.decode, self.decoded + max(self.compute, self.results + self.encode))


def peak_bytes(plan: Plan, working: int, copied: int | None = None) -> int:
    """Upper bound of the bytes for computing a plan, beyond the arrays of the request; results included.

    working: memory of the tiles that are computed at the same time
    copied: bytes of those arrays that are cast, see `copied_bytes`; None if that is not known
    """
    sizes, computing = plan.sizes, plan.compute_dtype.itemsize
    kept, loading = _operand_bytes(plan)
    gates, making, gating = _gate_bytes(plan)
    kept, loading = kept + gates + gradient_bytes(plan), loading + making
    finishing, changed = _output_step_bytes(plan)
    queries = sizes.batch_size * sizes.num_heads * sizes.query_length
    outputs = queries * sizes.value_dim * computing
    after_tiles = () if plan.gradients is None else [gradient.name for gradient in plan.gradients.wanted]
    reads_scores = "scores" in plan.selection.include or plan.gradients is not None
    is_scaled = not (reads_scores or any(term.reads_query for term in plan.terms))
    scaled = queries * sizes.head_dim * computing * is_scaled
    mapped = 0 if plan.roles.output_map is None else prod(plan.output_shape(OUTPUT)) * computing
    returned = plan.returned_bytes
    collected = returned - plan.output_bytes(OUTPUT) - sum(map(plan.output_bytes, after_tiles))
    # A boolean for each number, when the largest finite one is looked for.
    scanned = max((array.size for term in plan.terms for array in term.arrays if array.dtype != bool), default=0)
    after = max(finishing, changed + mapped + gating)
    computed = kept + outputs + scaled + collected + max(working, after, scanned)
    finished = outputs + returned + kept + changed + mapped + gating
    if copied is None:  # all of query, key and value
        copied = sum({role.field: size for role, size, *_ in _inputs(plan)}.values()) * plan.dtype.itemsize
    return copied + ENTRY * sizes.batch_size + max(loading, computed, finished)


def copied_bytes(plan: Plan, spec: AttentionSpec) -> int:
    """Bytes of the arrays of a request that the plan or the operands hold as casts to another type."""
    sources = spec.sources
    given = [sources[field] for field in {role.field for role in plan.roles.inputs}]
    given += [array for array in (spec.past_key, spec.past_value) if array is not None]
    cast = sum(array.size for array in given if array.dtype != plan.dtype) * plan.dtype.itemsize
    if plan.layout == "lbd":  # see `entry_after_entry`
        cast += sum(array.nbytes for array in given)
    received = list(arrays_of(spec))
    for array in arrays_of(plan):
        if not any(np.may_share_memory(array, other) for other in received):
            cast += array.nbytes
    return cast


def arrays_of(value: object) -> Iterator[np.ndarray]:
    """All arrays in the fields of a dataclass or named tuple."""
    return (leaf for _, leaf in leaves(value) if isinstance(leaf, np.ndarray))


def _inputs(plan: Plan) -> Iterator[tuple[Role, int, int, int]]:
    """Query, key and value: each role with the elements of its field, of its new tokens as heads, and of its past."""
    h, g, b, q, k, d, e = plan.sizes
    past = plan.roles.past_length
    shapes = (h * d, q, 0), (g * d, k - past, past), (g * e, k - past, past)
    for role, (features, new, before) in zip(plan.roles.inputs, shapes, strict=True):
        given = features if role.map is None else role.map.weight.shape[1]
        yield role, b * new * given, b * new * features, b * before * features


def _operand_bytes(plan: Plan) -> tuple[int, int]:
    """Bytes of the loaded query, key and value that are not views, and their peak while they are prepared."""
    computing = plan.compute_dtype.itemsize
    halves = plan.dtype.itemsize < computing
    held = extra = 0
    lengths = plan.sizes.query_length, *[plan.sizes.key_length - plan.roles.past_length] * 2
    for (role, given, new, past), steps, length in zip(_inputs(plan), plan.steps, lengths, strict=True):
        size, cached = new * computing, past * computing
        is_copied = role.map is not None or halves
        if is_copied or steps or cached:
            held += size + cached
        if role.map is not None and halves:
            extra = max(extra, (given + role.map.weight.size) * computing)
        if steps:
            extra = max(extra, is_copied * size + _changing_bytes(steps, size, length) - size)
        if cached:
            extra = max(extra, size + halves * cached)
    return held, held + extra


def _changing_bytes(steps: Steps, size: int, length: int) -> int:
    """The peak of steps, beyond what they are done to; each but the first needs the result of the one before, too."""
    return max((bool(place) * size + step.bytes(size, length) for place, step in enumerate(steps)), default=0)


def _output_step_bytes(plan: Plan) -> tuple[int, int]:
    """The peak of the steps of head outputs, beyond these; and the bytes of their result."""
    h, _, b, q, _, _, e = plan.sizes
    size = b * h * q * e * plan.compute_dtype.itemsize
    return _changing_bytes(plan.output_steps, size, q), bool(plan.output_steps) * size


def gradient_bytes(plan: Plan) -> int:
    """Upper bound of the bytes of gradients as tiles add them up, and on their way to fields, beside what is returned.

    0 without gradients.
    """
    if plan.gradients is None:
        return 0
    h, _, b, q, _, _, e = plan.sizes
    sums = sum(map(prod, plan.gradient_shapes.values()))
    # The cotangent cast; before and after the gate, with the outputs; before the output map; around output steps.
    has_gate = plan.gate is not None or plan.roles.gate_map is not None
    copies = (plan.dtype.itemsize < plan.compute_dtype.itemsize) + 3 * has_gate + 4 * bool(plan.output_steps)
    outputs = b * h * q * e * (copies + 3 * (plan.roles.output_map is not None))
    changed, weights = [0], [0]
    for (role, given, new, past), steps in zip(_inputs(plan), plan.steps, strict=True):
        # Once more if some numbers are not finite; its forms around steps; what goes into its map and comes out.
        changed.append(new + past + 3 * new * len(steps) + 2 * (new + given) * (role.map is not None))
    maps = plan.roles.output_map, plan.roles.gate_map, *(role.map for role in plan.roles.inputs)
    weights += [2 * linear.weight.size for linear in maps if linear is not None]
    return (sums + outputs + max(changed) + max(weights)) * plan.compute_dtype.itemsize


def gradient_tile_bytes(plan: Plan, tile: tuple[int, int, int, int]) -> int:
    """Upper bound of the bytes that the gradients of a tile of these lengths (b, h, r, k) take; 0 without gradients."""
    if plan.gradients is None:
        return 0
    b, h, r, k = tile
    sizes, shapes = plan.sizes, plan.gradient_shapes
    groups = h * sizes.num_kv_heads // sizes.num_heads
    matrices = 1 if plan.gradients.output is None else 3  # of the weights and of the scores, and a product on the way
    matrices += 4 * (plan.softcap is not None) + 2 * ("scale" in shapes)
    matrices += {"softmax": 0, "sigmoid": 3, "sum": 5}[plan.normalization]
    matrices += "bias" in shapes
    # What the tile adds to gradients waits until that of all tiles before it was added.
    added = b * h * r * sizes.head_dim * ("query" in shapes)
    added += b * groups * k * (sizes.head_dim * ("key" in shapes) + sizes.value_dim * ("value" in shapes))
    added += prod(shapes.get("relative_keys.key", (0,)))
    return (prod(tile) * matrices + added) * plan.compute_dtype.itemsize


def _gate_bytes(plan: Plan) -> tuple[int, int, int]:
    """Bytes of the gates; their peak while they are made; and of what multiplying the outputs by them takes beside."""
    linear, computing = plan.roles.gate_map, plan.compute_dtype.itemsize
    if plan.gate is None and linear is None:
        return 0, 0, 0
    h, _, b, q, _, _, e = plan.sizes
    outputs = b * h * q * e
    gating = outputs * (1 + computing * ("head_outputs" in plan.selection.include))
    if linear is None:
        size = 0 if plan.gate is None else plan.gate.nbytes
        return size, size, gating
    features, given = linear.weight.shape
    size = b * q * features * computing
    cast = (b * q + features) * given * computing if plan.dtype.itemsize < computing else 0
    return size, 4 * size + cast, gating


def mask_bytes(plan: Plan, tile: tuple[int, int, int, int]) -> tuple[int, int]:
    """The largest of what the terms of a plan make for a tile of these lengths, see `ScoreTerm.visible_bytes`."""
    masks, beside = zip((0, 0), *(term.visible_bytes(tile) for term in plan.terms), strict=True)
    return max(masks), max(beside)


def gathered_bytes(plan: Plan, tile: tuple[int, int, int, int]) -> int:
    """The bytes that gathering keys and values for a tile of these lengths takes; 0 if none are gathered."""
    if plan.gathered is None:
        return 0
    indices, sizes = plan.gathered.indices, plan.sizes
    b, h, r, n = tile
    numbers: int = plan.gathered_numbers * b * min(r, indices.shape[2]) * h // sizes.num_heads
    # Scores in another order of axes, and what is added to them; queries and outputs in another order.
    numbers += 2 * prod(tile) + prod(tile[:3]) * max(sizes.head_dim, sizes.value_dim)
    lists: int = prod(map(min, indices.shape[:3], tile[:3]))
    return numbers * plan.compute_dtype.itemsize + GATHERED * lists * n


def working_bytes(plan: Plan, tiling: Tiling) -> int:
    """Upper bound of the bytes for the tiles that NumPy computes at the same time, and for what passes share."""
    blocks = backward_tiling(plan, tiling)
    if blocks is None:
        return tile_bytes(plan, tiling)
    rows = 2 * plan.sizes.batch_size * plan.sizes.num_heads * plan.sizes.query_length
    forward = tile_bytes(replace(plan, gradients=None), tiling)
    return rows * plan.compute_dtype.itemsize + max(forward, tile_bytes(plan, blocks))


def tile_bytes(plan: Plan, tiling: Tiling) -> int:
    """Upper bound of the bytes for tiles computed at the same time, or for blocks of keys if the tiling streams."""
    (h, g, b, q, k, _, e), chosen = plan.sizes, plan.selection
    computing, step = plan.compute_dtype.itemsize, tile_size(plan, tiling)
    group, columns = step.kv_heads * (h // g), plan.computed_keys
    if tiling.streams:
        columns = min(columns, block_columns(tiling, group * step.rows))
    tile = step.batch, group, step.rows, columns
    scores, heights = prod(tile), ceil(q / step.rows)
    tiles = ceil(b / step.batch) * ceil(g / step.kv_heads) * heights * ceil(plan.computed_keys / columns)
    memory = (scores + prod(tile[:3]) * e) * computing
    # Masks that are made and combined; and some of the scores by themselves.
    masks, beside = mask_bytes(plan, tile)
    memory += 3 * masks + beside + scores // 2 + gathered_bytes(plan, tile)
    memory += sum(term.added_size(tile) for term in plan.terms) * computing + gradient_tile_bytes(plan, tile)
    if chosen.heads is not None or chosen.queries is not None:
        memory += scores * computing
    if chosen.average_heads:
        memory += scores // h * computing
    memory += scores * computing * chosen.matrices
    if chosen.top_k is not None:
        memory += scores * (2 * computing + INDEX)
    received = 0
    if "received" in chosen.include:  # each tile's, until all are there
        received = heights * b * h * k * computing
    return min(tiling.workers, tiles) * memory + received
