"""Threads that compute tiles in parallel."""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

import numpy as np
from threadpoolctl import threadpool_limits

from service.attention.tiles import Tile

T = TypeVar("T")


class TilePool:
    """Computes tiles by a number of threads, the calling thread counted.

    BLAS is held to one thread for each of these, in the whole process.
    """

    def __init__(self, threads: int) -> None:
        threadpool_limits(1, user_api="blas")
        self._threads = threads
        self._executor = ThreadPoolExecutor(threads - 1, "attention") if threads > 1 else None

    def run(self, function: Callable[[Tile], T], tiles: list[Tile]) -> Iterable[T]:
        """The results of a function for each tile, in order. Errors: those of the function."""
        helpers = min(self._threads, len(tiles)) - 1
        if helpers < 1 or self._executor is None:
            return map(function, tiles)
        return _SharedTiles(function, tiles).run(self._executor, helpers)


class _SharedTiles(Generic[T]):
    """Tiles that threads take one after the other until none is left."""

    _number = itertools.count()

    def __init__(self, function: Callable[[Tile], T], tiles: list[Tile]) -> None:
        self._function = function
        self._left = iter(list(enumerate(tiles)))  # the interpreter runs each next() as a whole
        self._results: list[T | None] = [None] * len(tiles)

    def run(self, executor: ThreadPoolExecutor, helpers: int) -> Iterable[T]:
        number = next(self._number)
        waiting = [executor.submit(self._work, number + 1 + i) for i in range(helpers)]
        try:
            self._work(number)
        finally:
            for future in waiting:
                if not future.cancel():  # a helper that has not begun has nothing left to do
                    future.result()
        return [result for result in self._results if result is not None]

    # The caller's errstate holds for its own thread only.
    @np.errstate(all="ignore")
    def _work(self, number: int) -> None:
        _move_to_processor(number)
        try:
            for i, tile in self._left:
                self._results[i] = self._function(tile)
        except BaseException:
            deque(self._left, maxlen=0)  # the other threads end after their tile
            raise


def _move_to_processor(number: int) -> None:
    """Move the calling thread to a processor, and leave it free to move on.

    Linux starts a woken thread on the processor of the thread that wakes it, and may leave all of them there for as
    long as a computation takes.
    """
    if hasattr(os, "sched_getaffinity"):
        allowed = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {sorted(allowed)[number % len(allowed)]})
        os.sched_setaffinity(0, allowed)
