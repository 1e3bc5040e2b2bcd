"""How a process that does nothing but serve is tuned, and when it ends."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from types import FrameType

# Seconds after which a thread that computes in Python lets another run; the event loop is to have its turn soon.
SWITCH = 0.001


def tune() -> None:
    """Look for cycles less often, and never among what was there from the start: requests leave hardly any."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)
    sys.setswitchinterval(SWITCH)


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


def free_port(host: str, port: int) -> int:
    """The port, if nobody has it; any, for 0. Errors: OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family) as server:
        return int(server.getsockname()[1])


def memory_left() -> int | None:
    """Bytes that this process could still take, by the machine's memory and its own limit; None where nobody tells."""
    try:
        import resource  # not on every system

        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        left = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except (ImportError, OSError, StopIteration):
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return left
    return min(left, max(0, limit - pages * resource.getpagesize()))
