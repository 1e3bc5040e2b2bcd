"""How a process that does nothing but serve is tuned, and what it does when it is to stop."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from threading import Thread
from types import FrameType

# Seconds after which a thread that runs Python code lets another run: the event loop must not wait long.
SWITCH = 0.001
# Bytes of the smallest block that is returned at once, and of free memory that is kept for smaller blocks.
RETURNED = 4 * 2**20
KEPT = 8 * 2**20
# The names of these in malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


def tune() -> None:
    """Tune garbage collection, malloc and thread switching of a process that does nothing but serve.

    Requests leave hardly any reference cycles, so these are looked for less often, and never among the objects that
    exist now.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)
    sys.setswitchinterval(SWITCH)
    return_memory()


def return_memory() -> None:
    """Have the C library return blocks of at least `RETURNED` bytes to the system as soon as they are freed.

    By itself glibc raises that size with each freed block, up to 32 MiB, and keeps up to twice as much. The memory of
    one request would stay allocated, and estimates of memory would not hold.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return
    mallopt(M_MMAP_THRESHOLD, RETURNED)
    mallopt(M_TRIM_THRESHOLD, KEPT)


def end_with_parent() -> None:
    """Send SIGTERM to this worker process when its parent ends, even if the parent was killed.

    Otherwise the workers would keep the port from the next service.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)

    Thread(target=wait, daemon=True).start()


def when_told_to_stop(callback: Callable[[], object]) -> None:
    """Call a function in the running event loop on SIGINT or SIGTERM, before the handler that is installed already.

    Does nothing outside the main thread, as signals arrive in the main thread only.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        before = signal.getsignal(number)

        def handle(number: int, frame: FrameType | None, before: object = before) -> None:
            loop.call_soon_threadsafe(callback)
            if callable(before):
                before(number, frame)

        signal.signal(number, handle)
