"""The Ray backend: the tiles of a plan, computed by the workers of a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import ray

from attention_service.attention import cost
from attention_service.attention.operands import Operands
from attention_service.attention.plan import Plan
from attention_service.attention.result import Computed
from attention_service.attention.tile import Tile
from attention_service.attention.tiles import SHARED_FLOPS, Tiling
from attention_service.backends.base import Check, no_check
from attention_service.backends.dense.buffers import TileSums
from attention_service.backends.dense.compute import TileWork, compute
from attention_service.backends.dense.operands import load_operands
from attention_service.backends.numpy.backend import CPU, NumpyBackend, NumpyLibrary
from attention_service.backends.ray.cluster import connect, processors
from attention_service.backends.ray.memory import distributed_bytes, part_count
from attention_service.backends.ray.tasks import mapped, results
from attention_service.backends.ray.work import Part, SharedWork, compute_part, without_gaps

S = TypeVar("S")
T = TypeVar("T")


class RayBackend(NumpyBackend):
    """Computes on a cluster of Ray, which it connects to, or starts on this machine, when it is first used.

    address: of the cluster; "" for one on this machine, with a processor for each thread
    """

    name = "ray"
    is_remote = True

    def __init__(self, threads: int | None = None, address: str = "") -> None:
        super().__init__(threads)
        self.small_scores = 0
        self._address = address

    def execute(self, plan: Plan, operands: Operands, device: str, check: Check = no_check) -> Computed:
        """Compute all that the plan includes, see Backend.execute. Errors: also Busy if workers are lost."""
        if not self._distributes(plan, device):
            return super().execute(plan, operands, device, check)
        workers = connect(self._address, self.threads).all
        lib = RayLibrary(plan, replace(self._tiling(plan), workers=workers), check)
        return compute(plan, lib, without_gaps(load_operands(plan, operands, lib)), self.name, check)

    def peak_bytes(self, plan: Plan, device: str, copied: int) -> int:
        """Upper bound of the memory for computing a plan, see Backend.peak_bytes. Errors: Busy.

        With the object store and the workers on this machine, but without what Ray takes for itself.
        """
        if not self._distributes(plan, device):
            return super().peak_bytes(plan, device, copied)
        found = processors(self._address, self.threads)
        tiling = replace(self._tiling(plan), workers=found.all)
        return distributed_bytes(plan, tiling, found) + cost.peak_bytes(plan, 0, copied)

    def warm_up(self, device: str) -> None:
        """Connect to the cluster."""
        connect(self._address, self.threads)

    def map(self, function: Callable[[S], T], items: Iterable[S]) -> Iterator[T]:
        """The results of a function for all items, in their order; each is a task of the cluster. Errors: Busy."""
        return mapped(function, items, self._address, self.threads)

    def _distributes(self, plan: Plan, device: str) -> bool:
        """False for small plans: sending them would take longer."""
        return device in CPU and plan.flops >= SHARED_FLOPS


class RayLibrary(NumpyLibrary):
    """NumPy, but tiles are computed by workers of Ray."""

    def __init__(self, plan: Plan, tiling: Tiling, check: Check) -> None:
        super().__init__(plan, tiling, None)
        self._check = check

    def run(self, function: Callable[[S], T], tiles: Iterable[S]) -> Iterable[T]:
        """The sums of all tiles, in order. Errors: Overflow, Busy, MemoryError, and what the check raises."""
        assert isinstance(function, TileWork)
        numbered: Any = tiles
        found: Any = self._sums(function, [tile for _, tile in numbered])
        return found

    def _sums(self, work: TileWork, tiles: list[Tile]) -> Iterator[TileSums]:
        workers = self.tiling.workers
        shared = ray.put(SharedWork.of(work, self.tiling))
        parts = ((shared, part) for part in cut(tiles, part_count(self.plan, workers)))
        for part in results(_compute.remote, parts, workers, self._check):
            part.put(work)
            yield from part.sums


@ray.remote(num_cpus=1)
def _compute(shared: SharedWork, tiles: list[Tile]) -> Part:
    return compute_part(shared, tiles)


def cut(tiles: list[Tile], count: int) -> Iterator[list[Tile]]:
    """Tiles in about so many parts of about equally many scores."""
    sizes = [_scores(tile) for tile in tiles]
    most, held, part = sum(sizes) / count, 0.0, []
    for tile, size in zip(tiles, sizes, strict=True):
        part.append(tile)
        held += size
        if held >= most:
            yield part
            held, part = held - most, []
    if part:
        yield part


def _scores(tile: Tile) -> int:
    count = 1
    for axis in (tile.batch, tile.heads, tile.rows, tile.columns):
        count *= axis.stop - axis.start
    return count
