"""uvicorn's protocol, with an end to the patience for senders who are slow or never come to the point."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from service.errors import BadRequest, Fault, ServiceError, TooSlow
from service.http.linger import LingeringTransport

# Bytes before the body: more than any client sends.
MAX_HEAD = 2**15
# Seconds, where the application does not say.
READ_TIMEOUT = 30.0
UPGRADE = re.compile(rb"\r\nupgrade:[^\r\n]*", re.IGNORECASE)


class PatientProtocol(HttpToolsProtocol):
    """Counts time from the first byte of a request (or the connection) to the last, and bytes until its body.

    How long it waits, the application says: by its attribute `read_timeout`, in seconds.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.read_timeout: float = getattr(self.config.loaded_app, "read_timeout", READ_TIMEOUT)
        self._timer: Any = None
        self._head = 0
        self._idle = 0

    def connection_made(self, transport: Any) -> None:
        """Somebody connected: now they must send something."""
        super().connection_made(transport)
        self.transport = LingeringTransport(transport, self)  # type: ignore[assignment]  # all that is asked of one
        self._expect()

    @property
    def still_sends(self) -> bool:
        """Whether a request has begun to come, and not all of it is here."""
        return self._head != 0 and not self._is_whole()

    @property
    def sent_headers(self) -> Iterable[tuple[bytes, bytes]]:
        """Of the last request that began, as far as they have come."""
        return () if self.scope is None else self.scope["headers"]

    def connection_lost(self, exc: Exception | None) -> None:
        """Nobody is there any more."""
        self._arrived()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Some bytes came."""
        if self._head >= 0 and (b"pgrade" in data or b"PGRADE" in data):  # quicker than looking for it in any case
            data = without_upgrade(data)
        self._head += len(data)
        self._idle += len(data)
        super().data_received(data)
        if self._timer is None and not self._is_whole():  # most requests come as a whole, and need no timer
            self._expect()
        if (self._head > MAX_HEAD or self._idle > MAX_HEAD) and not self.transport.is_closing():
            place = "before" if self._head > MAX_HEAD else "between parts of"
            fault = Fault("", f"at most {MAX_HEAD} bytes {place} the body", "more")
            self._refuse(BadRequest(fault))

    def _is_whole(self) -> bool:
        """Whether nothing is missing of the last request that began."""
        cycle = self.cycle
        return cycle is not None and cycle.scope is self.scope and not cycle.more_body

    def on_headers_complete(self) -> None:
        """What comes now is the body, which has limits of its own."""
        self._head = -(2**62)
        super().on_headers_complete()
        self.headers = []  # for those after a body in chunks, which nobody asks for: they are none of the request's

    def on_body(self, body: bytes) -> None:
        """The body goes on. Sizes of chunks, their extensions and trailers do not count."""
        self._idle = 0
        cycle: Any = self.cycle
        if not cycle.body:
            cycle.body = b""  # to which bytes are added, and from which they are taken, without a copy
        elif type(cycle.body) is bytes:  # but many small ones had better be gathered
            cycle.body = bytearray(cycle.body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is here."""
        self._head = self._idle = 0
        if self._timer is not None:
            self._arrived()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """All of an answer is written, though its body may be nothing."""
        self.transport.flush()  # type: ignore[attr-defined]  # it is ours
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """What came is not HTTP."""
        self._head = 1  # and nobody knows where it ends
        self.scope = None  # type: ignore[assignment]
        self._refuse(BadRequest(Fault("", "a request in HTTP/1.1", "something else")))

    def _expect(self) -> None:
        self._timer = self.loop.call_later(self.read_timeout, self._give_up)

    def _arrived(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        """The request took too long. Who sent nothing at all just opened a connection, and gets no answer."""
        self._timer = None
        if self.transport.is_closing():
            return
        if self.flow.read_paused:  # it is the service that takes its time
            self._expect()
        elif self.headers is not None and (self.cycle is None or not self.cycle.response_complete):
            fault = Fault("", f"a request that arrives within {self.read_timeout:g} s", "only a part of it")
            self._refuse(TooSlow(fault))
        else:
            self.transport.close()

    def _refuse(self, error: ServiceError) -> None:
        """Answer past the application, which has not seen the request, or waits for the rest of it.

        Not into the answer to a request before it: that is completed, and the connection ends with it.
        """
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            if not cycle.more_body:
                cycle.keep_alive = False
                self.flow.pause_reading()
                return
            cycle.disconnected = True
            cycle.message_event.set()
            if cycle.response_started:
                self.transport.close()
                return
        body = orjson.dumps(
            {
                "type": f"/problems/{error.code}",
                "title": error.title,
                "status": error.status,
                "detail": str(error),
                "code": error.code,
                "errors": [],
            }
        )
        head = (
            f"HTTP/1.1 {error.status} {error.title}\r\ncontent-type: application/problem+json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


def without_upgrade(data: bytes) -> bytes:
    """The head of a request without the offer of another protocol, which may be ignored (RFC 9110, section 7.8).

    Java's own client offers HTTP/2 with every first request, and the parser would drop the body of such a one.
    """
    end = data.find(b"\r\n\r\n")
    found = UPGRADE.search(data if end < 0 else data[:end])
    return data[: found.start()] + data[found.end() :] if found else data
