"""What a worker of Ray does: it computes some tiles of a plan with NumPy, and returns their numbers."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from attention_service.attention.plan import Plan
from attention_service.attention.tile import Tile
from attention_service.attention.tiles import Tiling
from attention_service.backends.dense.buffers import ResultBuffers, RowBuffers, SoftmaxRows, TileSums
from attention_service.backends.dense.compute import TileWork, empty_outputs
from attention_service.backends.dense.gradients import GradientBuffers, TileBackward
from attention_service.backends.dense.library import Array
from attention_service.backends.dense.numerics import NumericPath
from attention_service.backends.dense.operands import LoadedOperands
from attention_service.backends.numpy.backend import NumpyLibrary

Place = tuple[Any, ...]


@dataclass(frozen=True)
class SharedWork:
    """What all workers read of a plan, once in the object store. Fields: of a TileWork

    keeps_rows: True if the parts of the logsumexp are returned; backward: of the gradients; None for none
    scaled: the query times the scale, or None
    Operands have no gaps: arrays without gaps are read where they are, all others are copied by each worker.
    """

    plan: Plan
    tiling: Tiling
    loaded: LoadedOperands
    paths: list[tuple[slice, NumericPath]]
    rows: SoftmaxRows | None
    keeps_rows: bool
    backward: TileBackward | None
    scaled: Array | None

    @classmethod
    def of(cls, work: TileWork, tiling: Tiling) -> SharedWork:
        """The part of some work that workers need."""
        backward = work.buffers.backward if isinstance(work.buffers, GradientBuffers) else None
        if backward is not None:
            backward = copy(backward)
            backward.lib = NumpyLibrary(work.plan, tiling, None)
            for name, value in vars(backward).items():
                if isinstance(value, np.ndarray):
                    setattr(backward, name, np.ascontiguousarray(value))
        query = work.scaled if all(path.scales_query for _, path in work.paths) else work.loaded.query
        loaded = replace(work.loaded, query=query, gate=None, operands=None)
        keeps_rows = isinstance(work.buffers, RowBuffers)
        return cls(work.plan, tiling, loaded, work.paths, work.rows, keeps_rows, backward, work.scaled)


def without_gaps(loaded: LoadedOperands) -> LoadedOperands:
    """Operands whose arrays are contiguous."""
    query, key, value = map(np.ascontiguousarray, (loaded.query, loaded.key, loaded.value))
    return replace(loaded, query=query, key=key, value=value)


@dataclass
class Part:
    """What a worker returns: numbers by their places, in the order of its tiles.

    outputs: of head outputs; rows: of both arrays of SoftmaxRows; results: by the names of buffers
    gradients: what all tiles of the part add to the gradients
    """

    outputs: list[tuple[Place, Array]] = field(default_factory=list)
    rows: list[tuple[Place, Array, Array]] = field(default_factory=list)
    results: list[tuple[str, Place, Array]] = field(default_factory=list)
    gradients: list[tuple[str, Place, Array]] = field(default_factory=list)
    sums: list[TileSums] = field(default_factory=list)

    def put(self, work: TileWork) -> None:
        """Write the numbers to the arrays of all the work."""
        buffers = work.buffers
        for place, block in self.outputs:
            work.head_outputs[place] = block
        if isinstance(buffers, RowBuffers):
            for place, subtracted, log_total in self.rows:
                buffers.softmax.subtracted[place], buffers.softmax.log_total[place] = subtracted, log_total
        for name, place, block in self.results:
            buffers.put(name, place, block)
        if isinstance(buffers, GradientBuffers):
            for name, place, block in self.gradients:
                buffers.gradients[name][place] += block


class _Results(ResultBuffers):
    """Collects what a part returns. part: filled by `put`"""

    part: Part

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._shares_memory = False

    def put(self, name: str, place: Place, block: Array) -> None:
        self.part.results.append((name, place, np.array(block)))


class _Rows(_Results, RowBuffers):
    pass


class _Gradients(_Results, GradientBuffers):
    pass


class Region(NamedTuple):
    """The smallest box around tiles."""

    batch: slice
    kv_heads: slice
    heads: slice
    rows: slice

    @classmethod
    def around(cls, tiles: Sequence[Tile]) -> Region:
        """The region of some tiles."""
        axes = ([getattr(tile, name) for tile in tiles] for name in cls._fields)
        return cls(*(slice(min(one.start for one in axis), max(one.stop for one in axis)) for axis in axes))


def compute_part(shared: SharedWork, tiles: Sequence[Tile]) -> Part:
    """Compute some tiles of a plan. Errors: Overflow."""
    with np.errstate(all="ignore"):
        return _compute_part(shared, tiles)


def _compute_part(shared: SharedWork, tiles: Sequence[Tile]) -> Part:
    plan, lib = shared.plan, NumpyLibrary(shared.plan, shared.tiling, None)
    if shared.backward is not None:
        buffers: _Results = _Gradients(plan, lib, shared.backward)
    else:
        buffers = (_Rows if shared.keeps_rows else _Results)(plan, lib)
    buffers.part = part = Part()
    outputs = empty_outputs(plan, lib, plan.compute_dtype)
    work = TileWork(plan, lib, shared.loaded, shared.paths, outputs, buffers, rows=shared.rows, scaled=shared.scaled)
    for number, tile in enumerate(tiles):
        part.sums.append(work((number, tile)))
        place = tile.batch, tile.heads, tile.rows
        if shared.rows is None:
            part.outputs.append((place, np.ascontiguousarray(outputs[place])))
        if isinstance(buffers, RowBuffers):
            part.rows.append((place, buffers.softmax.subtracted[place], buffers.softmax.log_total[place]))
    if isinstance(buffers, GradientBuffers):
        region = Region.around(tiles)
        places: dict[str, Place] = {"query": (region.batch, region.heads, region.rows)}
        places |= dict.fromkeys(("key", "value"), (region.batch, region.kv_heads))
        for name, array in buffers.gradients.items():
            place = places.get(name, ())
            part.gradients.append((name, place, np.ascontiguousarray(array[place])))
    return part
