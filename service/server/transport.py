"""The transport that uvicorn writes to: it joins the writes of one turn of the event loop, and tells their progress."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, Final

try:
    import fcntl
    import termios
except ImportError:  # Windows
    fcntl = termios = None  # type: ignore[assignment]  # asked for before use

# Bytes that are written at once, without waiting for the end of the turn, so that flow control works as ever.
JOINED: Final = 2**16


class JoiningTransport:
    """A transport that writes at the end of a turn of the loop: head and body of a response take one system call."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._pending: list[Any] = []
        self._size = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write the data, in order, at the latest at the end of this turn of the loop."""
        if not self._pending:
            self._loop.call_soon(self.flush)
        self._pending.append(data)
        self._size += len(data)
        if self._size >= JOINED:
            self.flush()

    def flush(self) -> None:
        """Hand what was written to the transport."""
        pending, self._pending, self._size = self._pending, [], 0
        if pending and not self._transport.is_closing():
            self._transport.writelines(pending)

    def close(self) -> None:
        """Close after everything is sent."""
        self.flush()
        self._transport.close()

    def unsent(self) -> tuple[int, int]:
        """Bytes that the operating system has not taken yet, and those that it has not delivered.

        They change whenever the client takes a byte, the latter long before there is room for the next write.
        """
        undelivered = b""
        with suppress(OSError):  # not every kind of socket tells
            if fcntl is not None:
                undelivered = fcntl.ioctl(self.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
        return self._size + self._transport.get_write_buffer_size(), int.from_bytes(undelivered, "little")
