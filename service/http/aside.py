"""Bytes of a connection that need no parser: the rest of a long body, and what nobody wants."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import numpy as np

# Where bytes go that nobody wants, those of all connections.
NOWHERE: Final = memoryview(bytearray(2**17))


class Aside(asyncio.BufferedProtocol):
    """Takes the place of a connection's protocol for a while; what is not about reading goes on to that."""

    def __init__(self, before: Any) -> None:
        self._before = before

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed on both sides."""
        self._before.connection_lost(exc)

    def pause_writing(self) -> None:
        """What was written is not taken."""
        self._before.pause_writing()

    def resume_writing(self) -> None:
        """It is again."""
        self._before.resume_writing()


class Filling(Aside):
    """Receives the rest of a body where it stays.

    Handed on in pieces each byte would be copied three times more: by the loop, by the parser, and by who joins them.
    """

    def __init__(self, before: Any, there: bytes | bytearray, length: int, done: Callable[[], None]) -> None:
        super().__init__(before)
        # Memory that nothing was written to yet has cost next to nothing: who announces much may send nothing. NumPy
        # asks the system for large pages, which makes 48 MiB come in a third of the time.
        self.body = np.empty(length, np.uint8).data
        self.body[: len(there)] = there
        self._rest = self.body[len(there) :]
        self._done = done

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes belong; those of a request behind this one stay where they are."""
        return self._rest

    def buffer_updated(self, nbytes: int) -> None:
        """Some came."""
        self._rest = self._rest[nbytes:]
        if not self._rest:
            self._done()


class Dropping(Aside):
    """Drops the rest of a body that was answered before it was here."""

    def __init__(self, before: Any, missing: int, done: Callable[[], None]) -> None:
        super().__init__(before)
        self._missing = missing
        self._done = done

    def get_buffer(self, sizehint: int) -> memoryview:
        """Nowhere, but no further than the body."""
        return NOWHERE[: self._missing]

    def buffer_updated(self, nbytes: int) -> None:
        """Some came, for nobody."""
        self._missing -= nbytes
        if not self._missing:
            self._done()
