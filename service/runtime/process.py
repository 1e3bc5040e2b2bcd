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

# Seconds after which a thread that computes in Python lets another run; the event loop is to have its turn soon.
SWITCH = 0.001
# Bytes of blocks that go back at once, and of free memory that is kept for smaller ones.
RETURNED = 4 * 2**20
KEPT = 8 * 2**20
# The names of these in malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


def tune() -> None:
    """Look for cycles less often, and never among what was there from the start: requests leave hardly any."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)
    sys.setswitchinterval(SWITCH)
    return_memory()


def return_memory() -> None:
    """Have the C library give blocks of some size back to the system as soon as they are freed.

    glibc by itself raises the size from which it does with each block that is freed, up to 32 MiB, and keeps up to
    twice as much: what one request took would stay taken, and nobody's estimate holds.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return
    mallopt(M_MMAP_THRESHOLD, RETURNED)
    mallopt(M_TRIM_THRESHOLD, KEPT)


def end_with_parent() -> None:
    """Stop as if asked to when the process that started this one is gone, killed without a chance to say so.

    Else its workers would keep the port from whoever is started next.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)

    Thread(target=wait, daemon=True).start()


def when_told_to_stop(do: Callable[[], object]) -> None:
    """Have this done in the running event loop as soon as a signal says to stop, beside what the server does then.

    Signals come to the main thread, so that nothing is done for a loop in another.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        before = signal.getsignal(number)

        def handle(number: int, frame: FrameType | None, before: object = before) -> None:
            loop.call_soon_threadsafe(do)
            if callable(before):
                before(number, frame)

        signal.signal(number, handle)
