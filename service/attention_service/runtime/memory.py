"""What the C library does with freed memory: it is used again, and returned to the system before it adds up."""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

MB: Final = 2**20
# Bytes of the smallest block that has pages of its own, which are returned as soon as it is freed. Smaller blocks use
# pages again that need not be cleared. Larger ones would leave holes that estimates of memory know nothing of.
OWN_PAGES: Final = 8 * MB
# Bytes that may be free at the end of the heap, of which glibc knows by itself.
KEPT: Final = 64 * MB
# Seconds between the end of a request and the check: what it used is freed by then, and requests are checked together.
INTERVAL: Final = 0.1
# Seconds without a request after which all free memory is returned, and how much of it is not worth the effort.
IDLE: Final = 10.0
SPARED: Final = 16 * MB
# The names of these in malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8


def reuse_memory() -> None:
    """Have glibc use freed memory again for blocks of up to `OWN_PAGES` bytes, from the first one on.

    By itself it raises that size slowly, with each freed block, and keeps up to twice as much. All threads share one
    arena, whose end `malloc_trim` returns: each other one would keep up to 64 MiB.
    """
    with suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, OWN_PAGES)
        mallopt(M_TRIM_THRESHOLD, KEPT)
        mallopt(M_ARENA_MAX, 1)


class FreeMemory:
    """Returns free memory to the system once there is more than `allowed` bytes of it, and all of it when idle.

    Blocks of many sizes that are freed in another order leave holes: resident memory would grow far beyond what the
    requests hold, and stay. Does nothing where the system does not tell what is resident, or without glibc.

    held: tells the bytes that requests hold at present
    """

    def __init__(self, allowed: int, held: Callable[[], int]) -> None:
        self._allowed = allowed
        self._held = held
        self._idle = self._used = resident() or 0  # bytes besides those that requests hold; as they were last
        self._check: asyncio.TimerHandle | None = None
        self._idle_check: asyncio.TimerHandle | None = None

    def check_soon(self) -> None:
        """Check in `INTERVAL` seconds. Must be called in the event loop."""
        if self._check is None:
            self._check = asyncio.get_running_loop().call_later(INTERVAL, self.check)

    def check(self) -> None:
        """Return free memory if there is too much, and look again when no request came for a while."""
        self._check = None
        self._return_above(self._allowed)
        if self._idle_check is not None:
            self._idle_check.cancel()
        self._idle_check = asyncio.get_running_loop().call_later(IDLE, self._check_when_idle)

    def _check_when_idle(self) -> None:
        self._idle_check = None
        if not self._held():  # otherwise the request that holds memory leads to the next check
            self._return_above(SPARED)

    def _return_above(self, allowed: int) -> None:
        """Return free memory if there are more than so many bytes of it."""
        used = resident()
        if used is None or used - self._held() - self._used <= allowed:
            return
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
        self._used = max(self._idle, (resident() or 0) - self._held())


def resident() -> int | None:
    """Bytes of memory that this process has now; None if the system does not tell."""
    with suppress(OSError):
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return None
