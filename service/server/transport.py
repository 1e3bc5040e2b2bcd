"""The transport that uvicorn writes to: it joins the writes of one turn of the event loop, and tells their progress."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

with suppress(ImportError):  # on Windows, where `unsent` tells only what the operating system has not taken
    import fcntl
    import termios

# Bytes that are written at once, without waiting for the end of the turn, so that flow control works as ever.
JOINED: Final = 2**16


class JoiningTransport:
    """A transport that writes at the end of a turn of the loop: head and body of a response take one system call."""

    def __init__(self, transport: asyncio.Transport, is_idle: Callable[[], bool]) -> None:
        self._transport = transport
        self._is_idle = is_idle
        self._pending: list[Any] = []
        self._size = 0
        self._closing = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write the data, in order, at the latest at the end of this turn of the loop."""
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._flush)
        self._pending.append(data)
        self._size += len(data)
        if self._size >= JOINED:
            self._flush()

    def _flush(self) -> None:
        pending, self._pending, self._size = self._pending, [], 0
        if pending and not self.is_closing():
            self._transport.writelines(pending)

    def close(self) -> None:
        """Close after everything is sent; within a request, when the client has closed, too.

        Else what it still sends would reset the connection, and take its response from it (RFC 9112, section 9.6).
        """
        self._flush()
        if self._is_idle() or self.is_closing() or not self._transport.can_write_eof():  # TLS does it by itself
            self._transport.close()
            return
        self._closing = True
        self._transport.write_eof()
        self._transport.resume_reading()

    def is_closing(self) -> bool:
        """True once `close` was called, or the connection is lost."""
        return self._closing or self._transport.is_closing()

    def unsent(self) -> tuple[int, int]:
        """Bytes that the operating system has not taken yet, and those that it has not delivered.

        They change whenever the client takes a byte, the latter long before there is room for the next write.
        """
        undelivered = b""
        with suppress(OSError, NameError):  # not every kind of socket tells
            undelivered = fcntl.ioctl(self.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
        return self._size + self._transport.get_write_buffer_size(), int.from_bytes(undelivered, "little")
