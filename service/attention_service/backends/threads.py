"""Threads that compute tiles, and parts of large products, in parallel."""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import copy
from functools import cache
from threading import Lock
from typing import Any, Final, TypeVar

import numpy as np
from threadpoolctl import ThreadpoolController, threadpool_limits

# Tiles whose results are kept until all of them are there: a long sequence has millions of tiles of one row.
AT_A_TIME: Final = 4096
S = TypeVar("S")
T = TypeVar("T")
_limiting = Lock()
_limits: list[Any] = []  # what ends the limit of BLAS, once for each who needs it


@contextmanager
def single_threaded_blas() -> Iterator[None]:
    """Hold BLAS to one thread for each thread that calls it, in the whole process, until the last context ends."""
    with _limiting:
        _take_control()
        _limits.append(_limits[0] if _limits else _blas().limit(limits=1, user_api="blas"))
    try:
        yield
    finally:
        with _limiting:
            limit = _limits.pop()
            if not _limits:
                _take_control()
                limit.restore_original_limits()


def _take_control() -> None:
    """Let this thread set the number of threads: threadpoolctl ignores all threads but the first that did."""
    for library in _blas().lib_controllers:
        if hasattr(library, "clear_controlling_thread"):
            library.clear_controlling_thread(force=True)


@cache
def _blas() -> ThreadpoolController:
    """The BLAS libraries of this process. Looking for them takes longer than a layer of a model."""
    return ThreadpoolController()


class TilePool:
    """Computes tiles by a number of threads, the calling thread counted: `threads`.

    BLAS is held to one thread for each of these, in the whole process.
    """

    def __init__(self, threads: int) -> None:
        threadpool_limits(1, user_api="blas")
        self.threads = threads
        self._executor = ThreadPoolExecutor(threads - 1, "attention") if threads > 1 else None
        self._processors = itertools.count()

    def at_most(self, threads: int) -> TilePool:
        """A pool of the same threads that uses at most so many of them."""
        fewer = copy(self)
        fewer.threads = min(threads, self.threads)
        return fewer

    def run(self, function: Callable[[S], T], tiles: Iterable[S]) -> Iterator[T]:
        """The results of a function for each tile or part, in order. Errors: those of the function."""
        left = iter(tiles)
        while some := list(itertools.islice(left, AT_A_TIME)):
            yield from self._run(function, some)

    def _run(self, function: Callable[[S], T], tiles: list[S]) -> Iterable[T]:
        helpers = min(self.threads, len(tiles)) - 1
        if helpers < 1 or self._executor is None:
            return map(function, tiles)
        results: dict[int, T] = {}
        left = iter(list(enumerate(tiles)))  # shared by the threads: the interpreter runs each next() as a whole

        # The caller's errstate holds for its own thread only.
        @np.errstate(all="ignore")
        def work() -> None:
            _move_to_processor(next(self._processors))
            try:
                for i, tile in left:
                    results[i] = function(tile)
            except BaseException:
                deque(left, maxlen=0)  # the other threads end after their tile
                raise

        waiting = [self._executor.submit(work) for _ in range(helpers)]
        try:
            work()
        finally:
            for future in waiting:
                if not future.cancel():  # a helper that has not begun has nothing left to do
                    future.result()
        return [results[i] for i in range(len(tiles))]


def _move_to_processor(number: int) -> None:
    """Move the calling thread to a processor, and leave it free to move on.

    Linux starts a woken thread on the processor of the thread that wakes it, and may leave all of them there for as
    long as a computation takes.
    """
    if hasattr(os, "sched_getaffinity"):
        allowed = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {sorted(allowed)[number % len(allowed)]})
        os.sched_setaffinity(0, allowed)
