"""The protocol of a connection: uvicorn's, with limits around it.

It delegates every callback to uvicorn's protocol, looks at no bytes, and writes none. It measures time, counts bytes,
and aborts the connection where a limit is passed. How far a request is, the application tells it through
`scope["state"]["connection"]`.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, Final, NamedTuple

from uvicorn.config import HTTP_PROTOCOLS
from uvicorn.importer import import_from_string

from service.server.transport import JoiningTransport

# Bytes after a head that the application has not taken: more than uvicorn buffers of a body, so trailers, for example.
MAX_UNTAKEN: Final = 2**20
# Seconds between two looks at the limits of a connection.
INTERVAL: Final = 1.0


class Limits(NamedTuple):
    """Limits of a connection, in seconds and bytes."""

    idle: float  # until the first byte
    head: float  # from the first byte of a request until its head is complete
    head_bytes: int
    write: float  # without progress of a response


def http_protocol(parser: str, limits: Limits) -> Any:
    """The protocol factory for `uvicorn.Config(http=...)`; parser: h11 or httptools."""
    return partial(LimitedProtocol, parser, limits)


class LimitedProtocol(asyncio.Protocol):
    """uvicorn's HTTP protocol with a timeout and a size limit for heads and a timeout for stalled responses."""

    def __init__(self, parser: str, limits: Limits, *, app_state: dict[str, Any], **options: Any) -> None:
        self._state = {**app_state, "connection": self}
        kind = import_from_string(HTTP_PROTOCOLS[parser])
        self._protocol: asyncio.Protocol = kind(app_state=self._state, **options)
        self._limits = limits
        self._interval = min(INTERVAL, limits.head / 4, limits.write / 4)
        self._in_request = False
        self._ended = False  # what follows the last request of a connection would spoil its response
        self._untaken = 0  # bytes received since the application last reported
        self._deadline: float | None = None  # of the head
        self._timer: asyncio.TimerHandle | None = None
        self._unsent = (0, 0)  # as seen last, and when it changed
        self._progressed = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvloop's is no subclass
        """Start to wait for the first byte."""
        self._loop = asyncio.get_running_loop()
        self._transport = JoiningTransport(transport, self._loop)
        self._protocol.connection_made(self._transport)  # type: ignore[arg-type]  # it acts as one
        self._deadline = self._loop.time() + self._limits.idle
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Pass the data on; abort where too much comes without a complete head, or beside a body."""
        if self._ended:
            return
        if not self._in_request and not self._untaken:
            self._deadline = self._loop.time() + self._limits.head
        self._untaken += len(data)
        self._protocol.data_received(data)
        self._watch()
        self._limit_size()

    def request_started(self, ended: bool) -> None:
        """Called by the application: the head of a request is complete. ended: True if nothing may follow it"""
        self._ended = ended
        self._in_request = True
        self._untaken = 0
        self._deadline = None

    def body_taken(self, ended: bool) -> None:
        """Called by the application: it took what came of the body. ended: True if nothing may follow it"""
        self._ended = ended
        self._untaken = 0

    def is_closing(self) -> bool:
        """True if nothing can be sent any more."""
        return bool(self._transport.is_closing())

    def response_complete(self) -> None:
        """Called by the application, right after it sent the last bytes: the next request may come."""
        self._in_request = False
        if self._untaken:  # part of it is here already
            self._deadline = self._loop.time() + self._limits.head
            self._limit_size()

    def eof_received(self) -> bool | None:
        """The client sends no more: close, as uvicorn does."""
        return self._protocol.eof_received()

    def pause_writing(self) -> None:
        """Let the application wait before it sends more, and see to it that the client reads."""
        self._protocol.pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        """Let the application send more."""
        self._protocol.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Pass it on, and break the reference cycle with the state that requests get."""
        if self._timer is not None:
            self._timer.cancel()
        self._protocol.connection_lost(exc)
        self._state.clear()

    def _limit_size(self) -> None:
        """Check the size once the application has begun with a complete head, for which a task is scheduled already."""
        if self._untaken > self._limits.head_bytes:
            self._loop.call_soon(self._check_size, self._in_request)

    def _check_size(self, in_request: bool) -> None:
        limit = MAX_UNTAKEN if in_request else self._limits.head_bytes
        if self._untaken > limit and self._in_request is in_request:
            self._transport.abort()

    def _watch(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(self._interval, self._check)

    def _check(self) -> None:
        """Abort the connection where time is over; look again later where something is awaited."""
        self._timer = None
        now = self._loop.time()
        if self._deadline is not None:
            if now >= self._deadline:
                self._transport.abort()
                return
            self._watch()
        unsent = self._transport.unsent()
        if unsent != self._unsent:
            self._unsent, self._progressed = unsent, now
        elif unsent[0] and now - self._progressed >= self._limits.write:
            self._transport.abort()
        if unsent[0]:
            self._watch()
