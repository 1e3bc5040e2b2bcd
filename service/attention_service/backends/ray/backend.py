"""The Ray backend: the tiles of a plan, computed by the workers of a cluster."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any, Final, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

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
from attention_service.backends.ray.work import Part, SharedWork, compute_part
from attention_service.errors import Busy, ServiceError

NAMESPACE: Final = "attention-service"
_connecting: Final = threading.Lock()
# Tasks for each processor of the cluster: more share the work more evenly, and each costs some milliseconds.
PER_PROCESSOR: Final = 4
# Seconds between two looks at the deadline.
INTERVAL: Final = 0.1

S = TypeVar("S")
T = TypeVar("T")


class RayBackend(NumpyBackend):
    """Computes on a cluster of Ray, which it connects to, or starts on this machine, when it is first used.

    address: of the cluster; "" for one on this machine
    """

    name = "ray"

    def __init__(self, threads: int | None = None, address: str = "") -> None:
        super().__init__(threads)
        self.small_scores = 0
        self._address = address

    def execute(self, plan: Plan, operands: Operands, device: str, check: Check = no_check) -> Computed:
        """Compute all that the plan includes, see Backend.execute. Errors: also Busy if workers are lost."""
        if device not in CPU or plan.flops < SHARED_FLOPS:  # sending it would take longer
            return super().execute(plan, operands, device, check)
        processors = connect(self._address)
        lib = RayLibrary(plan, replace(self._tiling(plan), workers=processors), check)
        return compute(plan, lib, load_operands(plan, operands, lib), self.name, check)

    def warm_up(self, device: str) -> None:
        """Connect to the cluster."""
        connect(self._address)


def connect(address: str) -> int:
    """The processors of the cluster at an address, or of one on this machine, which is started if there is none yet.

    Errors: Busy if the cluster cannot be reached, or has no processors.
    """
    own: dict[str, Any] = {"address": address} if address else {"address": "local", "include_dashboard": False}
    try:
        with _connecting:
            if not ray.is_initialized():
                ray.init(namespace=NAMESPACE, log_to_driver=False, logging_level=logging.WARNING, **own)
        processors = int(ray.cluster_resources().get("CPU", 0))
    except (OSError, RuntimeError, ValueError, RayError) as error:  # an address that is none, or where nobody answers
        raise unavailable(str(error)) from None
    if processors < 1:
        raise unavailable("a cluster without processors")
    return processors


def unavailable(got: str) -> Busy:
    """The error for a cluster that does not compute."""
    return Busy.at("/backend", "workers of Ray that compute", got[:300], headers={"Retry-After": "1"})


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
        parts = cut(tiles, PER_PROCESSOR * self.tiling.workers)
        waiting: deque[Any] = deque()
        try:
            shared = ray.put(SharedWork.of(work, self.tiling))
            while True:
                # No more at once than are computed and one each that waits: results lie in the object store.
                for tiles_of_part in islice(parts, 2 * self.tiling.workers - len(waiting)):
                    waiting.append(_compute.remote(shared, tiles_of_part))
                if not waiting:
                    return
                part = self._result(waiting[0])
                waiting.popleft()
                part.put(work)
                yield from part.sums
        except RayTaskError:  # a defect of ours
            raise
        except RayError as error:
            raise unavailable(f"{type(error).__name__}: {error}") from None
        finally:
            for reference in waiting:
                ray.cancel(reference, force=True)

    def _result(self, reference: Any) -> Part:
        """What a task returns. Errors: its own, and as of `run`."""
        while True:
            self._check()
            try:
                part: Part = ray.get(reference, timeout=INTERVAL)
                return part
            except GetTimeoutError:
                continue
            except RayTaskError as error:
                if isinstance(error.cause, ServiceError | MemoryError):
                    raise error.cause from None
                raise


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
