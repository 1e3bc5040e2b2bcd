"""The transport that uvicorn writes to: it joins head and body of a response, and measures the progress of sending."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

# Where the structure tcp_info of Linux (linux/tcp.h) has tcpi_bytes_acked.
BYTES_ACKED: Final = slice(120, 128)
# Bytes that take less time to copy behind a head than a system call for them alone.
JOINED: Final = 2**16

with suppress(ImportError):  # Windows
    import fcntl
    import termios


class MeasuredTransport:
    """A transport that counts what is written, and half-closes while bytes are on their way.

    is_idle: whether the connection has no request
    """

    def __init__(self, transport: asyncio.Transport, is_idle: Callable[[], bool]) -> None:
        self._transport = transport
        self._is_idle = is_idle
        self._closing = False
        self._holds = False  # what is written next
        self._held: bytes | bytearray | memoryview = b""
        self.written = 0  # bytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write the data; nothing once the transport closes, nor an empty part, by which h11 ends a message."""
        if self._holds:
            self._holds, self._held = False, data
            return
        if self._held:
            held, self._held = self._held, b""
            if len(data) <= JOINED:
                data = b"".join([held, data])
            else:
                self.write(held)
        if data and not self._closing and not self._transport.is_closing():
            self.written += len(data)
            self._transport.write(data)

    def hold(self) -> None:
        """Hold what is written next until more is: head and body of a response take one system call, not two.

        Nor does their client wake up twice.
        """
        self._holds = True

    def forget_protocol(self) -> None:
        """Break the reference cycle with the protocol. To be called when the connection is lost."""
        self._is_idle = bool  # of nothing: False

    def close(self) -> None:
        """Close when everything is sent. With bytes on their way, half-close, and read on until the client closes.

        Closing with unread bytes resets the connection: the client may lose the response (RFC 9112, section 9.6).
        """
        self._holds = False
        self.write(b"")  # what is held
        quiet = self._is_idle() and not any(self.unsent())
        if quiet or self.is_closing() or not self._transport.can_write_eof():  # TLS reads on by itself
            self._transport.close()
        else:
            self._closing = True
            self._transport.write_eof()
            self._transport.resume_reading()

    def is_closing(self) -> bool:
        """True once `close` was called, or the connection is lost."""
        return self._closing or self._transport.is_closing()

    def unsent(self) -> tuple[int, int]:
        """Bytes that the system has not taken, and bytes that it has not delivered. Both show a slow reader."""
        return self._transport.get_write_buffer_size(), undelivered_bytes(self.get_extra_info("socket"))

    def delivered(self) -> int:
        """Bytes that the client's system has acknowledged since it connected; over TLS those of its records.

        TLS has buffers of its own, so that what is written and not buffered is not yet on its way.
        """
        with suppress(OSError, ValueError, AttributeError, TypeError):  # another system, or not a TCP socket
            information = self.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 128)
            if len(information) == 128:
                return int.from_bytes(information[BYTES_ACKED], sys.byteorder)
        return self.written - sum(self.unsent())


def undelivered_bytes(connection: socket.socket | None) -> int:
    """Bytes that were sent and not acknowledged yet; 0 if the system does not know, or the connection is lost."""
    if connection is None:  # TLS, before the protocol is told of the loss
        return 0
    with suppress(OSError, ValueError, NameError):  # not every kind of socket has the number, a closed one has none
        return int.from_bytes(fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4)), "little")
    return 0
