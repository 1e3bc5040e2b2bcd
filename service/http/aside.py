"""Bytes of a connection that need no parser: the rest of a long body, and what nobody wants."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

# Where bytes go that nobody wants, those of all connections.
NOWHERE: Final = memoryview(bytearray(2**17))
# Bytes for which room is made ahead of them: memory that is made takes time, and who announces much may send nothing.
STEP: Final = 2**23


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
        self.body = bytearray(min(length, len(there) + STEP))
        self.body[: len(there)] = there
        self._rest = memoryview(self.body)[len(there) :]
        self._length = length
        self._done = done

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes belong; those of a request behind this one stay where they are."""
        if not self._rest:
            self._rest.release()
            there = len(self.body)
            self.body += bytes(min(self._length - there, STEP))
            self._rest = memoryview(self.body)[there:]
        return self._rest

    def buffer_updated(self, nbytes: int) -> None:
        """Some came."""
        self._rest = self._rest[nbytes:]
        if not self._rest and len(self.body) == self._length:
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
