"""How a process that does nothing but serve is tuned, and what it does when it is to stop."""

from __future__ import annotations

import asyncio
import gc
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from threading import Thread
from types import FrameType

from attention_service.runtime.memory import reuse_memory

# Seconds after which a thread that runs Python code lets another run: the event loop must not wait long.
SWITCH = 0.001
# Characters of an object in the log, which may be what a client sent.
MOST_SHOWN = 200


def tune() -> None:
    """Tune garbage collection, malloc and thread switching of a process that does nothing but serve; log all errors.

    Requests leave hardly any reference cycles, so these are looked for less often, and never among the objects that
    exist now.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)
    sys.setswitchinterval(SWITCH)
    reuse_memory()
    sys.unraisablehook = log_unraisable


def log_unraisable(unraisable: sys.UnraisableHookArgs) -> None:
    """Log an error that no caller can be told, as a line like all others: Python would print a traceback."""
    where, kind = repr(unraisable.object)[:MOST_SHOWN], unraisable.exc_type.__name__
    what = unraisable.err_msg or "error ignored in"
    logging.getLogger("attention").warning("%s %s: %s: %s", what, where, kind, unraisable.exc_value)


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


def when_told_to_stop(callback: Callable[[int], object]) -> None:
    """Call a function in the running event loop on SIGINT or SIGTERM, before the handler that is installed already.

    The function gets the number of the signal. Does nothing outside the main thread, as signals arrive in the main
    thread only.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        before = signal.getsignal(number)

        def handle(number: int, frame: FrameType | None, before: object = before) -> None:
            loop.call_soon_threadsafe(callback, number)
            if callable(before):
                before(number, frame)

        signal.signal(number, handle)
