"""Closing a connection whose client still sends, so that it finds its answer.

A socket that is closed with bytes unread resets its connection, and the client may lose what it had not read yet: the
answer. So only our side is closed (RFC 9112, section 9.6), and what still comes is dropped, until the client is done or
has sent too much, or for too long.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from service.http.aside import NOWHERE, Aside

# Bytes that are dropped of a body whose length nobody knows, or that is hopelessly long.
FEW: Final = 2**24
# Of one whose length was announced.
MANY: Final = 2**27


class LingeringTransport:
    """What uvicorn takes for the transport: closed while a client still sends it lingers, closed again it ends."""

    __slots__ = ("_lingering", "_protocol", "_transport", "write", "writelines")

    def __init__(self, transport: Any, protocol: Any) -> None:
        self._transport = transport
        self._protocol = protocol
        self._lingering = False
        self.write = transport.write
        self.writelines = transport.writelines

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        """Whether no more is to be answered."""
        return self._lingering or bool(self._transport.is_closing())

    def close(self) -> None:
        """Close, as soon as what was written is on its way, and the client knows."""
        if self._lingering:
            self._transport.abort()
            return
        if self._transport.is_closing() or not self._protocol.still_sends:
            self._transport.close()
            return
        self._lingering = True
        self._transport.set_protocol(Lingering(self._transport, self._protocol))
        if self._transport.can_write_eof():  # not by TLS, whose clients find the answer by its length
            self._transport.write_eof()
        self._transport.resume_reading()


class Lingering(Aside):
    """Drops what a client still sends, for as long as a request may take to arrive."""

    def __init__(self, transport: Any, before: Any) -> None:
        super().__init__(before)
        self._transport = transport
        self._left = patience(before.sent_headers)
        self._timer = before.loop.call_later(before.read_timeout, transport.abort)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Nowhere."""
        return NOWHERE

    def buffer_updated(self, nbytes: int) -> None:
        """Some more, for nobody."""
        self._left -= nbytes
        if self._left < 0:
            self._transport.abort()  # by TLS, to close would be to go on reading

    def connection_lost(self, exc: Exception | None) -> None:
        """Now it is closed on both sides."""
        self._timer.cancel()
        super().connection_lost(exc)


def patience(headers: Iterable[tuple[bytes, bytes]]) -> int:
    """How many bytes are taken from a client that sent these headers, lower-case, after it was answered."""
    announced = content_length(headers)
    return FEW if announced is None or announced >= MANY else announced


def content_length(headers: Iterable[tuple[bytes, bytes]]) -> int | None:
    """What these headers, lower-case, announce; None for what is no number, or a hopeless one."""
    length = dict(headers).get(b"content-length", b"")
    return int(length) if length.isdigit() and len(length) <= 18 else None
