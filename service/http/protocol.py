"""uvicorn's protocol, with an end to the patience for senders who are slow or never come to the point."""

from __future__ import annotations

import re
from typing import Any

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from service.errors import BadRequest, Fault, ServiceError, TooSlow

# Bytes before the body: more than any client sends.
MAX_HEAD = 2**15
UPGRADE = re.compile(rb"\r\nupgrade:[^\r\n]*", re.IGNORECASE)


class PatientProtocol(HttpToolsProtocol):
    """Counts time from the first byte of a request (or the connection) to the last, and bytes until its body.

    How long it waits, the application says: by its attribute `read_timeout`, in seconds.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.read_timeout: float = self.config.loaded_app.read_timeout
        self._timer: Any = None
        self._head = 0

    def connection_made(self, transport: Any) -> None:
        """Somebody connected: now they must send something."""
        super().connection_made(transport)
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nobody is there any more."""
        self._arrived()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Some bytes came."""
        if self._timer is None:
            self._expect()
        if self._head >= 0:
            data = without_upgrade(data)
        self._head += len(data)
        super().data_received(data)
        if self._head > MAX_HEAD and not self.transport.is_closing():
            fault = Fault("", f"at most {MAX_HEAD} bytes before the body", "more")
            self._refuse(BadRequest(fault))

    def on_headers_complete(self) -> None:
        """What comes now is the body, which has limits of its own."""
        self._head = -(2**62)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The request is here."""
        self._head = 0
        self._arrived()
        super().on_message_complete()

    def _expect(self) -> None:
        self._timer = self.loop.call_later(self.read_timeout, self._give_up)

    def _arrived(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        """The request took too long. Who sent nothing at all just opened a connection, and gets no answer."""
        self._timer = None
        began = self.headers is not None and (self.cycle is None or not self.cycle.response_complete)
        if self.transport.is_closing():
            return
        if began and (self.cycle is None or not self.cycle.response_started):
            fault = Fault("", f"a request that arrives within {self.read_timeout:g} s", "only a part of it")
            self._refuse(TooSlow(fault))
        else:
            self.transport.close()

    def _refuse(self, error: ServiceError) -> None:
        """Answer past the application, which has not seen the request, or waits for the rest of it."""
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
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.write(head.encode() + body)
        self.transport.close()


def without_upgrade(data: bytes) -> bytes:
    """The head of a request without the offer of another protocol, which may be ignored (RFC 9110, section 7.8).

    Java's own client offers HTTP/2 with every first request, and the parser would drop the body of such a one.
    """
    end = data.find(b"\r\n\r\n")
    found = UPGRADE.search(data, 0, end if end >= 0 else len(data))
    return data[: found.start()] + data[found.end() :] if found else data
