"""Computes a plan tile by tile, and brings together what it returns."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import chain
from typing import Final

import numpy as np

from attention_service.attention.outputs import OUTPUT
from attention_service.attention.plan import Notice, Plan
from attention_service.attention.result import Computed
from attention_service.attention.tile import Tile
from attention_service.attention.tiles import backward_tiling
from attention_service.backends.base import Check, no_check
from attention_service.backends.dense.backward import Backward
from attention_service.backends.dense.buffers import ResultBuffers, RowBuffers, SoftmaxRows, TileSums
from attention_service.backends.dense.gates import apply_map, gated
from attention_service.backends.dense.gradients import BlockBackward, GradientBuffers, TileBackward
from attention_service.backends.dense.library import Array, ArrayLibrary
from attention_service.backends.dense.numerics import NumericPath, choose_paths
from attention_service.backends.dense.operands import LoadedOperands, stepped_outputs
from attention_service.backends.dense.products import join_heads
from attention_service.backends.dense.scores import TileComputation, scales

KERNEL: Final = "dense"
ZERO_SUM: Final = Notice("zero_sum", "the visible scores of some rows sum to 0: their weights and outputs are 0")


def compute(
    plan: Plan,
    lib: ArrayLibrary,
    loaded: LoadedOperands,
    backend: str,
    check: Check = no_check,
    buffers: ResultBuffers | None = None,
) -> Computed:
    """Compute a plan tile by tile. Errors: Overflow if a visible score is not finite, and what `check` raises.

    buffers: what scores and weights are written to; None for arrays of their own
    """
    head_outputs, gradients = empty_outputs(plan, lib, plan.compute_dtype), None
    if buffers is None and plan.gradients is not None:
        buffers, gradients = differentiate(plan, lib, loaded, head_outputs, check)
    else:
        buffers = ResultBuffers(plan, lib) if buffers is None else buffers
        compute_tiles(plan, lib, loaded, head_outputs, buffers, check)
    collected = buffers.arrays if gradients is None else buffers.arrays | gradients
    arrays, masked = stored(plan, lib, loaded, head_outputs, collected, buffers.fully_masked_rows)
    notices = (ZERO_SUM,) if buffers.zero_sum else ()
    return Computed(arrays, masked, backend, str(lib.device), KERNEL, notices)


def differentiate(
    plan: Plan,
    lib: ArrayLibrary,
    loaded: LoadedOperands,
    head_outputs: Array,
    check: Check,
) -> tuple[ResultBuffers, dict[str, Array]]:
    """Write the head outputs of a plan; what it returns of scores and weights, and its gradients. Errors: as `compute`.

    Tiles are computed once, as no gradient of a head output depends on another, but twice if a norm follows them, or if
    long rows are cut into blocks of keys.
    """
    backward = Backward(plan, lib, loaded)
    if backward_tiling(plan, lib.tiling) is not None:
        rows = RowBuffers(plan, lib)
        compute_tiles(plan, lib, loaded, head_outputs, rows, check)
        of_blocks = BlockBackward(plan, lib, loaded, backward.output(head_outputs), head_outputs)
        buffers = GradientBuffers(plan, lib, of_blocks)
        compute_tiles(plan, lib, loaded, head_outputs, buffers, check, rows=rows.softmax)
        return rows, backward.fields(head_outputs, buffers.gradients)
    if plan.output_steps:
        compute_tiles(plan, lib, loaded, head_outputs, ResultBuffers(plan, lib), check)
    of_tiles = TileBackward(plan, lib, loaded, backward.output(head_outputs))
    buffers = GradientBuffers(plan, lib, of_tiles)
    compute_tiles(plan, lib, loaded, head_outputs, buffers, check)
    return buffers, backward.fields(head_outputs, buffers.gradients)


def compute_tiles(
    plan: Plan,
    lib: ArrayLibrary,
    loaded: LoadedOperands,
    head_outputs: Array,
    buffers: ResultBuffers,
    check: Check,
    chosen: np.ndarray | None = None,
    rows: SoftmaxRows | None = None,
) -> None:
    """Write the head outputs (b, h, q, e) of a plan, and what it returns of scores and weights. Errors: as `compute`.

    Entries whose numbers require different steps never share a tile. chosen: (b,), True for those that are computed;
    None for all; rows: of a softmax that was computed before: only its weights are computed, for the buffers
    """
    paths = choose_paths(plan, lib, loaded, check)
    if chosen is not None:
        paths = [(slice(i, i + 1), path) for part, path in paths for i in range(part.start, part.stop) if chosen[i]]
    work = TileWork(plan, lib, loaded, paths, head_outputs, buffers, check, rows)
    for sums in lib.run(work, enumerate(work.cut())):
        buffers.add_sums(sums)


class TileWork:
    """Computes tiles of a plan, each in the numeric path of its entries. Arguments: as of `compute_tiles`

    scaled: the query times the scale, for paths with `scales_query`; None to compute it
    """

    def __init__(
        self,
        plan: Plan,
        lib: ArrayLibrary,
        loaded: LoadedOperands,
        paths: list[tuple[slice, NumericPath]],
        head_outputs: Array,
        buffers: ResultBuffers,
        check: Check = no_check,
        rows: SoftmaxRows | None = None,
        scaled: Array | None = None,
    ) -> None:
        self.plan, self.loaded, self.paths = plan, loaded, paths
        self.head_outputs, self.buffers, self.check, self.rows = head_outputs, buffers, check, rows
        if scaled is None and any(path.scales_query for _, path in paths):
            scaled = loaded.query * scales(plan, lib)
        self.scaled = scaled
        self._computations = {}
        for path in dict.fromkeys(path for _, path in paths):
            query = scaled if path.scales_query else None
            found = TileComputation(plan, lib, loaded, path, query, head_outputs, buffers, check, rows)
            self._computations[path] = found
        self._starts = [part.start for part, _ in paths]

    def cut(self) -> Iterator[Tile]:
        """The tiles."""
        return chain.from_iterable(self._computations[path].cut(entries) for entries, path in self.paths)

    def __call__(self, numbered: tuple[int, Tile]) -> TileSums:
        """Compute a tile. numbered: its number and itself"""
        number, tile = numbered
        with self.buffers.turn(number, tile):
            _, path = self.paths[bisect_right(self._starts, tile.batch.start) - 1]
            return self._computations[path].run(tile)


def empty_outputs(plan: Plan, lib: ArrayLibrary, dtype: np.dtype) -> Array:
    """A new array for head outputs (b, h, q, e). Tokens stand before heads in memory if heads are joined afterwards."""
    h, _, b, q, _, _, e = plan.sizes
    if "h" in plan.layout:
        return lib.empty((b, h, q, e), dtype)
    return lib.xp.permute_dims(lib.empty((b, q, h, e), dtype), (0, 2, 1, 3))


def stored(
    plan: Plan,
    lib: ArrayLibrary,
    loaded: LoadedOperands,
    head_outputs: Array,
    collected: dict[str, Array],
    fully_masked_rows: Array,
) -> tuple[dict[str, np.ndarray], int]:
    """All arrays that the plan returns, in NumPy, and the number of masked rows.

    collected: the outputs of scores and weights; fully_masked_rows: a number of the library, or an int
    """
    past = plan.roles.past_length
    arrays = {
        "query": loaded.query,
        "key": loaded.key[:, :, past:],
        "value": loaded.value[:, :, past:],
        "present_key": loaded.key,
        "present_value": loaded.value,
        "head_outputs": head_outputs,
    }
    changed = head_outputs
    if plan.output_steps:
        changed = stepped_outputs(plan, lib, loaded, head_outputs)
    returned = {OUTPUT: _output(plan, lib, gated(plan, lib, loaded.gate, changed))} | collected
    returned |= {name: array for name, array in arrays.items() if name in plan.selection.include}
    if isinstance(fully_masked_rows, int):
        return lib.store(returned), fully_masked_rows
    found = lib.store(returned | {"": fully_masked_rows})  # with the arrays, so that a GPU is waited for once
    return found, int(found.pop(""))


def _output(plan: Plan, lib: ArrayLibrary, head_outputs: Array) -> Array:
    """The output: heads joined, unless the layout has them, and the output map applied."""
    if "h" in plan.layout:
        return head_outputs
    joined = join_heads(head_outputs, lib.xp)
    return joined if plan.roles.output_map is None else apply_map(plan.roles.output_map, joined, lib)
