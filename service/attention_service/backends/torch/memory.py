"""Memory of a device: requests reserve it before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Condition
from typing import Final

from attention_service.backends.base import Check, OutOfMemory

# Seconds after which a waiting request checks its deadline.
CHECK_INTERVAL: Final = 0.05


class DeviceMemory:
    """The memory of a device, shared by requests. available: returns the bytes that this process may take in all"""

    def __init__(self, available: Callable[[], int]) -> None:
        self._available = available
        self._reserved = 0
        self._changed = Condition()

    @contextmanager
    def reserve(self, needed: int, check: Check) -> Iterator[None]:
        """Context in which `needed` bytes are reserved; waits for them while others hold them.

        Errors: OutOfMemory if the device has not so many, and what `check` raises.
        """
        with self._changed:
            self._wait(needed, check)
            self._reserved += needed
        try:
            yield
        finally:
            with self._changed:
                self._reserved -= needed
                self._changed.notify_all()

    def _wait(self, needed: int, check: Check) -> None:
        while needed + self._reserved > (available := self._available()):
            if needed > available:
                raise OutOfMemory(needed, available)
            self._changed.wait(CHECK_INTERVAL)
            check()
