"""Memory of a device, which requests at work share: counted before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Condition

# Seconds after which whoever waits looks whether its own time is over.
LOOK = 0.05


class NoRoom(MemoryError):
    """needed: bytes that a request takes, by an estimate; there: bytes that there are for it, None if nobody knows."""

    def __init__(self, needed: int, there: int | None = None) -> None:
        super().__init__(f"about {needed} bytes needed, {there} there")
        self.needed = needed
        self.there = there


class Room:
    """One device's memory. there: bytes that this process may take, with what it has taken already"""

    def __init__(self, there: Callable[[], int]) -> None:
        self._there = there
        self._taken = 0
        self._changed = Condition()

    @contextmanager
    def hold(self, needed: int, check: Callable[[], None]) -> Iterator[None]:
        """So many bytes, waited for while others hold them. Errors: NoRoom if there are not so many, and `check`'s."""
        with self._changed:
            self._wait(needed, check)
            self._taken += needed
        try:
            yield
        finally:
            with self._changed:
                self._taken -= needed
                self._changed.notify_all()

    def _wait(self, needed: int, check: Callable[[], None]) -> None:
        while needed + self._taken > (there := self._there()):
            if needed > there:
                raise NoRoom(needed, there)
            self._changed.wait(LOOK)
            check()
