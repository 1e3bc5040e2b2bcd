"""Threads that compute tiles, and parts of large products, in parallel."""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from copy import copy
from functools import cache
from threading import Lock
from typing import Any, Final, TypeVar

import numpy as np
from threadpoolctl import ThreadpoolController

# Tiles whose results are kept until all of them are there: a long sequence has millions of tiles of one row.
AT_A_TIME: Final = 4096
S = TypeVar("S")
T = TypeVar("T")
_limiting = Lock()
_holders: set[object] = set()  # one for each context that needs BLAS held to one thread
_held: list[tuple[Any, int]] = []  # the libraries that are held, and the threads that each had before


@contextmanager
def single_threaded_blas() -> Iterator[None]:
    """Hold BLAS to one thread for each thread that calls it, in the whole process, until the last context ends."""
    holder = object()
    try:
        with _limiting:
            _holders.add(holder)
            _hold()
        yield
    finally:
        try:
            _release(holder)
        except KeyboardInterrupt:
            _release(holder)
            raise


def _hold() -> None:
    """Set BLAS to one thread. How many it had is noted before, so that it can be given back from any state."""
    if not _held:
        _held.extend([(one, one.num_threads) for one in _blas()])
    _set_to_one()


def _set_to_one() -> None:
    _take_control()
    for library in _blas():
        library.set_num_threads(1)


def _release(holder: object) -> None:
    """Give its threads back to BLAS, unless another context needs it held."""
    with _limiting:
        _holders.discard(holder)
        if not _holders:
            _give_back()


def _give_back() -> None:
    _take_control()
    for library, threads in _held:
        library.set_num_threads(threads)
    _held.clear()


def _start_anew() -> None:
    """Forget the contexts of threads that a forked process does not have, and the lock that they may have held."""
    global _limiting
    _limiting = Lock()
    _holders.clear()
    if _held:
        _give_back()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_anew)


def _take_control() -> None:
    """Let this thread set the number of threads: threadpoolctl ignores all threads but the first that did."""
    for library in _blas():
        if hasattr(library, "clear_controlling_thread"):
            library.clear_controlling_thread(force=True)


@cache
def _blas() -> list[Any]:
    """The BLAS that came with NumPy; without one, all of this process. Looking takes longer than a layer of a model."""
    found = [one for one in ThreadpoolController().lib_controllers if one.user_api == "blas"]
    package = os.path.dirname(os.path.realpath(np.__file__))  # with its libraries in it, or in numpy.libs beside it
    return [one for one in found if one.filepath.startswith((f"{package}/", f"{package}.libs/"))] or found


class TilePool:
    """Computes tiles by a number of threads, the calling thread counted: `threads`.

    BLAS is held to one thread for each of these, in the whole process.
    """

    def __init__(self, threads: int) -> None:
        with _limiting:
            _set_to_one()
        self.threads = threads
        self._executor = _executor(threads - 1) if threads > 1 else None
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
            try:
                _move_to_processor(next(self._processors))
                for i, tile in left:
                    results[i] = function(tile)
            finally:
                deque(left, maxlen=0)  # after an error the other threads end after their tile

        waiting: list[Future[None]] = []
        try:
            with suppress(RuntimeError):  # Python is ending, and starts no thread: this one computes all tiles
                waiting.extend(self._executor.submit(work) for _ in range(helpers))
            work()
        finally:
            deque(left, maxlen=0)
            for future in waiting:
                if not future.cancel():  # a helper that has not begun has nothing left to do
                    future.result()
        return [results[i] for i in range(len(tiles))]


def _executor(threads: int) -> Executor | None:
    """So many threads, which start when they are needed; None while Python ends, when no thread can start."""
    try:
        from concurrent.futures import ThreadPoolExecutor  # loads a module that registers itself for the end of Python
    except RuntimeError:
        return None
    return ThreadPoolExecutor(threads, "attention")


def _move_to_processor(number: int) -> None:
    """Move the calling thread to a processor, and leave it free to move on, whatever is raised meanwhile.

    Linux starts a woken thread on the processor of the thread that wakes it, and may leave all of them there for as
    long as a computation takes.
    """
    if hasattr(os, "sched_getaffinity"):
        allowed = os.sched_getaffinity(0)
        try:
            os.sched_setaffinity(0, {sorted(allowed)[number % len(allowed)]})
        finally:
            os.sched_setaffinity(0, allowed)
