"""The protocol of a connection: uvicorn's, with limits around it.

It parses no bytes, and writes none. It measures time, counts bytes, discards what follows the last request, and
aborts the connection, without a response, if a head is too slow or too long, or the client does not read. It reads the
progress of a request from the attribute `cycle` of uvicorn's protocol (uvicorn 0.54).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from contextlib import suppress
from math import inf
from time import perf_counter
from typing import Any, Final, NamedTuple

from starlette.types import Receive

from attention_service.http.head import closes, parse_length
from attention_service.server.drain import Drain
from attention_service.server.transport import MeasuredTransport

# Bytes that are received at once: of a body of known length, and of all else, which can be slow to parse. In pieces of
# 512 KiB, a body of 6 MB takes half as long as in pieces of 128 KiB, and not less in larger ones.
PIECE, SMALL_PIECE = 2**19, 2**13
# Seconds of parsing after which other connections have their turn.
TURN: Final = 0.002
# The connection is aborted if the application leaves more received bytes than these untaken: more than uvicorn, or one
# read of TLS, hands over before back-pressure works.
MAX_UNTAKEN: Final = 2**22
# Seconds for a client to close after the server did; and without a request, where a connection is closed early. An idle
# one is looked at as seldom: a thousand, looked at each second, take 3 % of a processor.
CLOSING: Final = 5

_memory = threading.local()


class Limits(NamedTuple):
    """Limits of a connection, in seconds and bytes."""

    idle: int  # without a request: after connecting, and after a response
    head: float  # from the first byte of a request until its head is complete
    head_bytes: int
    write: float  # by which the client may be behind in taking a response
    write_rate: int  # bytes per second at which it must
    connections: int  # of the process: if it has more, and during a drain, `idle` is CLOSING
    descriptors: float  # a connection whose file descriptor is no lower is closed at once


class LimitedProtocol(asyncio.BufferedProtocol):
    """uvicorn's HTTP protocol with a timeout and a size limit for heads and a timeout for stalled responses."""

    def __init__(self, protocol: type, limits: Limits, *, app_state: dict[str, Any], **options: Any) -> None:
        self._state = {**app_state, "connection": self}
        self._drain: Drain | None = app_state.get("drain")
        self._protocol = protocol(app_state=self._state, **options)
        for name in ("eof_received", "pause_writing", "resume_writing"):
            setattr(self, name, getattr(self._protocol, name))
        self._limits = limits
        self._open = options["server_state"].connections
        # Connection lists the field, which is for this connection only (RFC 9110, section 7.6.1).
        self.keep_alive = [(b"connection", b"keep-alive"), (b"keep-alive", b"timeout=%d" % limits.idle)]
        self._interval = min(1.0, limits.head / 4, limits.write / 4)  # seconds between two looks at the time limits
        self._cycle: Any = None  # of the last request whose head is complete
        self._left = 0  # bytes of its body that are still to come, at most
        # Received bytes of a head that is not complete, or of a body that the application has not taken; and bytes of
        # the body that uvicorn holds for the application.
        self._untaken = self._held = 0
        self._head_due = inf  # when the head that arrives must be complete, in seconds of the loop
        self._delivered = 0  # bytes of responses, as seen last
        self._write_due = 0.0  # when the client is too slow, unless it takes more until then
        self._idle_since: float | None = None  # since when the idle or closing connection has had nothing to send

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvloop's is no subclass
        """Start to wait for the first byte."""
        self._loop = asyncio.get_running_loop()
        self._buffer = received_bytes()
        self.transport = MeasuredTransport(transport, self._is_idle)
        self._protocol.connection_made(self.transport)
        if self._drain is not None:
            self._drain.opened(self)
        self._timer = self._loop.call_later(self._interval, self._check)
        if transport.get_extra_info("socket").fileno() >= self._limits.descriptors:
            transport.abort()

    def get_buffer(self, sizehint: int) -> memoryview:
        """The buffer for the next bytes, which all connections of a thread share, as each takes them at once."""
        return self._buffer[: max(SMALL_PIECE, min(self._left, PIECE))]

    def buffer_updated(self, nbytes: int) -> None:
        """Pass the received bytes on; abort if too many arrive without a complete head, or if the body is not taken."""
        self._follow()
        in_request = self._is_in_request()
        if not (self._untaken or in_request):
            self._head_due = self._loop.time() + self._limits.head
            if self._idle_since is not None:  # the next look would be late
                self._idle_since = None
                self._timer.cancel()
                self._timer = self._loop.call_later(self._interval, self._check)
        self._untaken += nbytes
        self._left -= nbytes
        if self.transport.is_closing() or (in_request and self._received_last_request()):
            if self._untaken > 4 * MAX_UNTAKEN:
                self.transport.abort()
            return  # uvicorn would parse it as part of the last request, and send a second response
        start = perf_counter()
        try:
            self._protocol.data_received(bytes(self._buffer[:nbytes]))
        except Exception as error:  # uvicorn refuses a malformed body even if the response to it has begun
            logging.getLogger("attention").warning("connection closed: %s", error)
            self.transport.close()
        if perf_counter() - start > TURN and not self.transport.is_closing():
            self.transport.pause_reading()
            self._loop.call_soon(self._resume_reading)
        self._follow()
        if self._untaken and self._untaken > (MAX_UNTAKEN if self._is_in_request() else self._limits.head_bytes):
            self.transport.abort()

    def _follow(self) -> None:
        """Forget received bytes of a head that is complete now, or of a body that the application has taken."""
        cycle = self._protocol.cycle
        if cycle is not self._cycle:
            self._cycle = cycle
            headers = dict(cycle.scope["headers"]) if cycle.more_body else {}
            # Chunks, whatever length is announced beside them, are slow to parse.
            length = None if b"transfer-encoding" in headers else parse_length(headers.get(b"content-length", b""))
            self._left = length or 0
            self._untaken, self._head_due = 0, inf
        elif self._held and not cycle.body:
            self._untaken = 0
        self._held = 0 if cycle is None else len(cycle.body)

    async def disconnected(self, receive: Receive) -> None:
        """Wait at most a second until uvicorn has noticed that the client disconnected.

        It logs an error if the application returns earlier without a complete response. With httptools uvicorn notices
        only for the last of several pipelined requests, hence the limit.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(1):
                while (await receive())["type"] != "http.disconnect":
                    pass

    def connection_lost(self, exc: Exception | None) -> None:
        """Pass it on, and break all reference cycles: otherwise parts of bodies stayed until garbage is collected."""
        self._timer.cancel()
        if self._drain is not None:
            self._drain.closed(self)
        self._protocol.connection_lost(exc)
        self._state.clear()
        self.transport.forget_protocol()
        self._cycle = None
        for name in ("cycle", "scope", "pipeline"):  # requests refer to both protocols
            setattr(self._protocol, name, None)

    @property
    def has_begun(self) -> bool:
        """True once a head was received."""
        return self._protocol.cycle is not None

    def _resume_reading(self) -> None:
        if not self._protocol.flow.read_paused and not self.transport.is_closing():
            self.transport.resume_reading()

    def _is_in_request(self) -> bool:
        cycle = self._protocol.cycle
        return cycle is not None and not cycle.response_complete

    def _is_idle(self) -> bool:
        self._follow()
        return not self._untaken and not self._is_in_request()

    def _received_last_request(self) -> bool:
        """True if no request may follow the one in progress (Connection: close, HTTP/1.0), which has been received."""
        cycle = self._protocol.cycle
        if cycle.more_body:
            return False
        named = b",".join(value for name, value in cycle.scope["headers"] if name == b"connection")
        return not cycle.keep_alive or closes(cycle.scope["http_version"], named)

    def _check(self) -> None:
        """Abort the connection if a head is too slow, the client takes a response too slowly, or it is idle.

        Idle: it sends no request, or does not close the connection after the server did. After a response uvicorn
        closes the connection in time, but for the cases in which it is closed early.
        """
        self._follow()
        now, closing = self._loop.time(), self.transport.is_closing()
        if self._untaken and self._head_due == inf and not self._is_in_request():
            self._head_due = now + self._limits.head  # of a head that began to arrive before the response ended
        buffered, undelivered = self.transport.unsent()
        before, self._delivered = self._delivered, self.transport.delivered()
        latest = now + self._limits.write
        is_sending = buffered or undelivered
        credit = (self._delivered - before) / self._limits.write_rate
        self._write_due = min(latest, self._write_due + credit) if is_sending and self._write_due else latest
        if is_sending or not (closing or self._is_idle()):
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
        is_too_slow = is_sending and (buffered or closing) and now >= self._write_due
        ends_soon = closing or len(self._open) > self._limits.connections or (self._drain and self._drain.has_begun)
        longest = CLOSING if ends_soon else self._limits.idle
        is_idle = self._idle_since is not None and now - self._idle_since >= longest
        if now >= self._head_due or is_too_slow or is_idle:
            self.transport.abort()
        else:
            interval = self._interval if closing or self._idle_since is None else CLOSING
            self._timer = self._loop.call_later(interval, self._check)


def received_bytes() -> memoryview:
    """The memory of this thread for the bytes that a connection receives at once."""
    if not hasattr(_memory, "buffer"):
        _memory.buffer = memoryview(bytearray(PIECE))
    buffer: memoryview = _memory.buffer
    return buffer
