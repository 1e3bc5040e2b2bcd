"""The protocol of a connection: uvicorn's, with limits around it.

It looks at no bytes, and writes none. It measures time, counts bytes, aborts the connection where a limit is passed,
and discards what follows the last request, which it knows by `cycle` of uvicorn 0.54. The application reports to it.
"""

from __future__ import annotations

import asyncio
import logging
from math import inf
from typing import Any, Final, NamedTuple

from service.server.transport import CorkedTransport

# Bytes after a head that the application has not taken: more than uvicorn buffers, also of what TLS decrypts at once.
MAX_UNTAKEN: Final = 2**22
# Seconds that a client has to close its end once it has got everything.
CLOSING: Final = 2.0


class Limits(NamedTuple):
    """Limits of a connection, in seconds and bytes."""

    idle: float  # until the first byte
    head: float  # from the first byte of a request until its head is complete
    head_bytes: int
    write: float  # without progress of a response


class LimitedProtocol:
    """uvicorn's HTTP protocol with a timeout and a size limit for heads and a timeout for stalled responses."""

    def __init__(self, protocol: type, limits: Limits, *, app_state: dict[str, Any], **options: Any) -> None:
        self._state = {**app_state, "connection": self}
        self._protocol = protocol(app_state=self._state, **options)
        self._limits = limits
        self._interval = min(1.0, limits.head / 4, limits.write / 4)  # seconds between two looks at the time limits
        self._in_request = False
        self._reports = 0  # how often the application reported
        self._untaken = 0  # bytes received since the last report
        self._deadline = inf  # of the head
        self._progress: tuple[int, ...] = ()  # bytes buffered and undelivered, and whether closing, as seen last
        self._progressed = 0.0  # when that changed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._protocol, name)

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Start to wait for the first byte."""
        self._loop = asyncio.get_running_loop()
        self._transport = CorkedTransport(transport, self._is_idle)
        self._protocol.connection_made(self._transport)
        self._deadline = self._loop.time() + self._limits.idle
        self._timer = self._loop.call_later(self._interval, self._check)

    def data_received(self, data: bytes) -> None:
        """Pass the data on; abort where too much comes without a complete head, or beside a body."""
        if self._transport.is_closing() or self._received_last_request():
            return  # uvicorn would parse it as part of the last request, and send a second response
        if self._is_idle():
            self._deadline = self._loop.time() + self._limits.head
        self._untaken += len(data)
        try:
            self._protocol.data_received(data)
        except Exception as error:  # uvicorn refuses a malformed body even if the response to it has begun
            logging.getLogger("attention").warning("connection closed: %s", error)
            self._transport.close()
        self._limit_size()

    def request_started(self) -> None:
        """Called by the application: the head of a request is complete."""
        self._in_request = True
        self._deadline = inf
        self.body_taken()

    def body_taken(self) -> None:
        """Called by the application: it took what came of the body."""
        self._reports += 1
        self._untaken = 0

    def response_complete(self) -> None:
        """Called by the application, right after it sent the last bytes: the next request may come."""
        self._in_request = False
        self._reports += 1
        if self._untaken:  # part of it is here already
            self._deadline = self._loop.time() + self._limits.head
            self._limit_size()

    def connection_lost(self, exc: Exception | None) -> None:
        """Pass it on, and break the reference cycle with the state that requests get."""
        self._timer.cancel()
        self._protocol.connection_lost(exc)
        self._state.clear()

    def _is_idle(self) -> bool:
        return not self._in_request and not self._untaken

    def _received_last_request(self) -> bool:
        """True if no request may follow the current one (Connection: close, HTTP/1.0), which has been received."""
        cycle = getattr(self._protocol, "cycle", None)
        if cycle is None or cycle.more_body:
            return False
        named = (value.lower().split(b",") for name, value in cycle.scope["headers"] if name == b"connection")
        close = any(option.strip() == b"close" for options in named for option in options)
        return close or cycle.scope["http_version"] == "1.0" or not cycle.keep_alive

    def _limit_size(self) -> None:
        """Check the size once the application has begun with a complete head, for which a task is scheduled already."""
        if self._untaken > self._limits.head_bytes:
            self._loop.call_soon(self._check_size, self._reports)

    def _check_size(self, reports: int) -> None:
        limit = MAX_UNTAKEN if self._in_request else self._limits.head_bytes
        if self._untaken > limit and self._reports == reports:
            self._transport.abort()

    def _check(self) -> None:
        """Abort the connection where time is over."""
        self._timer = self._loop.call_later(self._interval, self._check)
        now, closing = self._loop.time(), self._transport.is_closing()
        progress = (*self._transport.unsent(), closing)
        if progress != self._progress:
            self._progress, self._progressed = progress, now
        buffered, undelivered, _ = progress
        stalled = now - self._progressed >= (self._limits.write if buffered or undelivered else CLOSING)
        if now >= self._deadline or (stalled and (buffered or closing)):
            self._transport.abort()
