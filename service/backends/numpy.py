"""The NumPy backend: tiles that fit the cache, computed by threads, each with a single-threaded BLAS."""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

import numpy as np
from threadpoolctl import threadpool_limits

from service.attention import cost
from service.attention.arrays import is_float
from service.attention.cost import TILE_BYTES, Tiling
from service.attention.operands import Operands
from service.attention.plan import Plan
from service.attention.result import Computed, Result
from service.attention.tiles import Tile
from service.backends.dense import SMALL, Found, Library, compute, load_operands
from service.backends.small import Small
from service.errors import UnknownBackend, quote

CPU: Final = ("auto", "cpu")
# Where it has not been worked out yet whether a plan is so plain.
UNKNOWN: Final[Any] = object()

# What a thread keeps for its next tile; more than this is a single row of a very long key.
MAX_SCRATCH: Final = 16 * 2**20

_pool: ThreadPoolExecutor | None = None
_threads = 0
_local = threading.local()


def use_threads(count: int) -> None:
    """Compute by so many threads from now on, in the whole process, and hold BLAS to one for each.

    Without this call tiles are computed one after the other, and BLAS has its own threads: good manners in a process
    that belongs to somebody else.
    """
    global _pool, _threads
    if count != _threads:
        threadpool_limits(1, user_api="blas")
        _pool = ThreadPoolExecutor(count - 1, "attention") if count > 1 else None
        _threads = count


def quick(plan: Plan, sources: Mapping[str, np.ndarray], device: str) -> Result | None:
    """The answer to what is small and plain, without preparing anything; None to anything else.

    NumPy may warn of overflow on the way, unless the caller keeps it from that.
    """
    small = _small(plan, device)
    return None if small is None else small.run(sources)


def _small(plan: Plan, device: str) -> Small | None:
    if plan.score_count > SMALL or device not in CPU:
        return None
    small: Small | None = plan.prepared.get("small", UNKNOWN)
    if small is UNKNOWN:
        small = plan.prepared["small"] = Small.of(plan)
    return small


def is_quick(plan: Plan, device: str) -> bool:
    """Whether `quick` answers, unless numbers are too large for its way."""
    return _small(plan, device) is not None


def is_apart(device: str) -> bool:
    """NumPy knows nothing but the processor."""
    return False


def peak_bytes(plan: Plan, device: str, copied: int | None = None) -> int:
    """Memory that computing takes by all threads."""
    return cost.peak_bytes(plan, cost.working_bytes(plan, Tiling(workers=_threads or 1)), copied)


def warm_up(device: str) -> None:
    """Nothing is loaded late."""


def execute(plan: Plan, operands: Operands, device: str, check: Callable[[], None] | None = None) -> Computed:
    """Compute what the plan includes, on the CPU. Errors: Overflow, UnknownBackend for another device.

    NumPy may warn of overflow on the way, unless the caller keeps it from that.
    """
    if device not in CPU:
        raise UnknownBackend.at(
            "/device", "cpu, all that the numpy backend has", quote(device), "ask for backend torch"
        )
    computing = plan.compute_dtype

    def load(array: np.ndarray) -> np.ndarray:
        return array.astype(computing, copy=False) if is_float(array.dtype) else array

    lib = Library(
        xp=np,
        device="cpu",
        returned=plan.dtype,
        load=load,
        store=lambda arrays: arrays,
        waits=False,
        matmul=lambda left, right, place: np.matmul(left, right, out=place),
        in_place=True,
        scratch=partial(_scratch, computing),
        hide=_hide,
        exp=lambda array: np.exp(array, out=array),
        top=lambda array, count: np.argsort(-array, axis=-1, stable=True)[..., :count],
        run=_run,
        workers=_threads or 1,
        tile_scores=TILE_BYTES // computing.itemsize,
    )
    return compute(plan, lib, load_operands(plan, operands, lib), "numpy", check)


def _scratch(dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """Memory of this thread, used again for each tile: fresh memory would have to be cleared page by page."""
    size = math.prod(shape) * dtype.itemsize
    if size > MAX_SCRATCH:
        return np.empty(shape, dtype)
    if not hasattr(_local, "memory") or _local.memory.nbytes < size:
        _local.memory = np.empty(size, np.uint8)
    memory: np.ndarray = _local.memory[:size].view(dtype).reshape(shape)
    return memory


def _hide(array: np.ndarray, seen: np.ndarray, number: float) -> None:
    np.copyto(array, array.dtype.type(number), where=~seen)


def _run(function: Callable[[Tile], Found], tiles: list[Tile]) -> Iterable[Found]:
    """By the calling thread, and by the pool where there are several tiles."""
    helpers = min(_threads, len(tiles)) - 1
    if helpers < 1 or _pool is None:
        return map(function, tiles)
    return _Crew(function, tiles).run(_pool, helpers)


class _Crew:
    """Threads that take one tile after the other until none is left."""

    _number = itertools.count()

    def __init__(self, function: Callable[[Tile], Found], tiles: list[Tile]) -> None:
        self._function = function
        self._left = iter(list(enumerate(tiles)))  # each next() is one step of the interpreter
        self._found: list[Found | None] = [None] * len(tiles)

    def run(self, pool: ThreadPoolExecutor, helpers: int) -> Iterable[Found]:
        """What the tiles gave, in their order."""
        number = next(self._number)
        waiting = [pool.submit(self._work, number + 1 + i) for i in range(helpers)]
        try:
            self._work(number)
        finally:
            for future in waiting:
                if not future.cancel():  # not begun: the others have left nothing to do
                    future.result()
        return [found for found in self._found if found is not None]

    # Overflow is found by looking at the numbers; each thread is kept from warning by itself.
    @np.errstate(all="ignore")
    def _work(self, place: int) -> None:
        _move(place)
        try:
            for i, tile in self._left:
                self._found[i] = self._function(tile)
        except BaseException:
            deque(self._left, maxlen=0)  # nobody needs the rest
            raise


def _move(place: int) -> None:
    """Move the calling thread to a processor, and leave it free to go from there.

    Linux wakes threads where the one is that wakes them, and may leave all on one processor for as long as a run takes.
    """
    if hasattr(os, "sched_getaffinity"):
        allowed = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {sorted(allowed)[place % len(allowed)]})
        os.sched_setaffinity(0, allowed)
