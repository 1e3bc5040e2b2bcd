"""Upper bounds on the memory that a plan takes on this machine while workers of Ray compute it, in bytes.

Beside what the service holds of the plan, the object store has what all workers read and what they return, and the
workers on this machine have tiles and results of their own. The store frees what nobody reads any longer up to a second
later: so all parts of a plan count at once. Letters as in attention/cost.py.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil, prod
from typing import Final, NamedTuple

import numpy as np

from attention_service.attention.cost import arrays_of, working_bytes
from attention_service.attention.outputs import OUTPUTS, TOP_INDICES
from attention_service.attention.plan import Plan
from attention_service.attention.tiles import Tiling, tile_size
from attention_service.backends.ray.cluster import Processors

# Tasks for each processor of the cluster: more share the work more evenly, and each costs some milliseconds; with
# gradients also those of all keys, which each returns.
PER_PROCESSOR: Final = 16
PER_PROCESSOR_WITH_GRADIENTS: Final = 2
# Copies of an array that has gaps, while it is put into the store.
GAP_COPIES: Final = 3
# What a task and the objects of Ray take beside arrays.
TASK: Final = 2**17


class Returned(NamedTuple):
    """What tasks return in all: head outputs and parts of the logsumexp; of scores and weights; gradients."""

    outputs: int
    collected: int
    gradients: int


def part_count(plan: Plan, workers: int) -> int:
    """How many tasks a plan is cut into, or one more."""
    return workers * (PER_PROCESSOR if plan.gradients is None else PER_PROCESSOR_WITH_GRADIENTS)


def distributed_bytes(plan: Plan, tiling: Tiling, processors: Processors) -> int:
    """The bytes that a plan takes beside those that `cost.peak_bytes` counts without tiles."""
    parts = part_count(plan, processors.all) + 1
    passes = 1 if plan.gradients is None else 2
    returned = returned_bytes(plan, tiling, parts)
    store = shared_bytes(plan) + sum(returned) + passes * parts * TASK
    # Each number waits in its worker until its part is done, head outputs twice if they have gaps in memory.
    part = 2 * sum(map(prod, plan.gradient_shapes.values())) * plan.compute_dtype.itemsize
    one = working_bytes(plan, replace(tiling, workers=1)) + part + TASK
    workers = 2 * returned.outputs + returned.collected + processors.here * one
    return _loading_bytes(plan, processors) + store + workers


def shared_bytes(plan: Plan) -> int:
    """What all workers read, see SharedWork. Gradients may have a pass of outputs before their own."""
    (h, g, b, q, k, d, e), computing = plan.sizes, plan.compute_dtype.itemsize
    query, keys, values, outputs = b * h * q * d, b * g * k * d, b * g * k * e, b * h * q * e
    arrays = {id(array): array.nbytes for array in arrays_of(plan)}
    # Of several entries some may read the query before its scale; True for values that are not finite.
    forward = (query * (1 + (b > 1)) + keys + values) * computing + b * g * k + sum(arrays.values())
    if plan.gradients is None:
        return forward
    # Queries and keys without numbers that are not finite, the cotangents, and of blocks the outputs and the softmax,
    # which the service has, too.
    backward = query + keys + 2 * outputs + 5 * b * h * q
    return 2 * forward + backward * computing


def returned_bytes(plan: Plan, tiling: Tiling, parts: int) -> Returned:
    """What the tasks of so many parts return."""
    (h, g, b, q, k, _, e), computing = plan.sizes, plan.compute_dtype.itemsize
    names: list[str] = [name for name in plan.selection.include if name in OUTPUTS and OUTPUTS[name].is_selected]
    if plan.selection.top_k is not None:
        names.append(TOP_INDICES)
    collected = sum(map(plan.output_bytes, names))
    if "received" in plan.selection.include:
        collected += ceil(q / tile_size(plan, tiling).rows) * b * h * k * computing
    # Each part returns the gradients of all heads that it has tiles of, and of all entries, if it has several.
    units = b if b > 1 else g
    gradients = 0.0
    for name, shape in plan.gradient_shapes.items():
        is_operand = name in ("query", "key", "value")
        gradients += prod(shape) * computing * ((units + parts - 1) / units if is_operand else parts)
    return Returned(b * h * q * (e + 2) * computing, collected, ceil(gradients))


def _loading_bytes(plan: Plan, processors: Processors) -> int:
    """What the service and its workers copy so that arrays have no gaps."""
    (h, g, b, q, k, d, e), computing = plan.sizes, plan.compute_dtype.itemsize
    gaps = [array.nbytes for array in arrays_of(plan) if not _is_contiguous(array)]
    copied = (GAP_COPIES + processors.here) * sum(gaps)
    if not (plan.layout.endswith("hld") or (plan.layout.endswith("ld") and h == 1 and plan.roles.past_length == 0)):
        copied += b * (h * q * d + g * k * (d + e)) * computing
    return copied if plan.gradients is None else copied + 2 * b * h * q * e * computing


def _is_contiguous(array: np.ndarray) -> bool:
    return array.flags.c_contiguous or array.flags.f_contiguous
