"""uvicorn's protocol, with an end to the patience for senders who are slow or never come to the point."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from service.errors import BadRequest, Fault, ServiceError, TooSlow
from service.http.aside import Aside, Dropping, Filling
from service.http.cycle import AT_WORK, WHOLE_BODY, Cycle
from service.http.linger import LingeringTransport, content_length
from service.http.problems import MEDIA_TYPE, details

# Bytes before the body: more than any client sends.
MAX_HEAD = 2**15
# Seconds, where the application does not say.
READ_TIMEOUT = 30.0
UPGRADE = re.compile(rb"\r\nupgrade:[^\r\n]*", re.IGNORECASE)


class PatientProtocol(HttpToolsProtocol):
    """Counts time from the first byte of a request (or the connection) to the last, and bytes until its body.

    How long it waits, the application says: by its attribute `read_timeout`, in seconds. Bodies whose length was
    announced are received where they stay, for applications that ask for it: `Cycle.whole`.
    """

    cycle: Cycle

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.read_timeout: float = getattr(self.config.loaded_app, "read_timeout", READ_TIMEOUT)
        self._timer: Any = None
        self._keeper: Any = None
        self._idle_since: float | None = None
        self._head = 0  # bytes of the head so far; far below 0 after it
        self._between = 0  # bytes since the last of the body
        self._came = 0  # of the body

    def connection_made(self, transport: Any) -> None:
        """Somebody connected: now they must send something."""
        super().connection_made(transport)
        self.transport = LingeringTransport(transport, self)  # type: ignore[assignment]  # all that is asked of one
        self._keeper = self.loop.call_later(self.timeout_keep_alive, self._keep)
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
        self._keeper.cancel()
        self._arrived()
        super().connection_lost(exc)
        if self.cycle is not None:
            self.cycle.forget()

    def data_received(self, data: bytes) -> None:
        """Some bytes came."""
        if self._head >= 0:
            data = without_upgrade(data)
        self._idle_since = None
        self._head += len(data)
        self._between += len(data)
        super().data_received(data)
        if self._timer is None and not self._is_whole():  # most requests come as a whole, and need no timer
            self._expect()
        if (self._head > MAX_HEAD or self._between > MAX_HEAD) and not self.transport.is_closing():
            place = "before" if self._head > MAX_HEAD else "between parts of"
            fault = Fault("", f"at most {MAX_HEAD} bytes {place} the body", "more")
            self._refuse(BadRequest(fault))

    def _is_whole(self) -> bool:
        """Whether nothing is missing of the last request that began."""
        cycle = self.cycle
        return cycle is not None and cycle.scope is self.scope and not cycle.more_body

    def on_headers_complete(self) -> None:
        """The application may begin. What comes now is the body, which has limits of its own."""
        self._head = -(2**62)
        self._came = 0
        parser, scope = self.parser, self.scope
        scope["method"] = parser.get_method().decode("ascii")
        version = scope["http_version"] = parser.get_http_version()
        path, raw_path, scope["query_string"] = locate(self.url)
        scope["path"] = self.root_path + path
        scope["raw_path"] = self.root_path.encode() + raw_path if self.root_path else raw_path
        cycle = Cycle(
            scope,
            self.transport,
            self.flow,
            self.logger,
            self.access_logger,
            False,
            self.server_state.default_headers,
            asyncio.Event(),
            self.expect_100_continue,
            version != "1.0" and parser.should_keep_alive(),
            self.on_response_complete,
        )
        cycle.body = b""
        cycle.fill = self._fill
        scope["extensions"] = {WHOLE_BODY: cycle.whole, AT_WORK: self.tasks}  # type: ignore[dict-item]  # they are ours
        before, self.cycle = self.cycle, cycle
        self.headers = []  # for those after a body in chunks, which nobody asks for: they are none of the request's
        if before is None or before.response_complete:
            self._start_asgi_task(cycle, self.app)
        else:  # it has to wait for its turn
            self.flow.pause_reading()
            self.pipeline.appendleft((cycle, self.app))

    def on_body(self, body: bytes) -> None:
        """The body goes on. Sizes of chunks, their extensions and trailers do not count."""
        self._between = 0
        self._came += len(body)
        cycle = self.cycle
        if cycle.response_complete:
            return
        if not cycle.body:
            cycle.body = body  # and is taken from there, without a copy
        else:
            if type(cycle.body) is bytes:  # but many small ones had better be gathered
                cycle.body = bytearray(cycle.body)
            cycle.body += body
        if len(cycle.body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        cycle.message_event.set()

    def on_message_complete(self) -> None:
        """The request is here."""
        self._head = self._between = 0
        if self._timer is not None:
            self._arrived()
        cycle = self.cycle
        if not cycle.response_complete:
            cycle.more_body = False
            cycle.message_event.set()

    def _fill(self, length: int) -> Filling:
        """Receive the rest of the body of the last request that began, of this length, where it stays."""
        filling = Filling(self, self.cycle.body, length, self._go_on)
        self.flow.resume_reading()
        self._leave_to(filling)
        return filling

    def _drop(self) -> None:
        """Nobody wants the rest of the body of the last request that began."""
        length = content_length(self.sent_headers)
        if length is not None and length > self._came:
            self._leave_to(Dropping(self, length - self._came, self._go_on))

    def _leave_to(self, protocol: Aside) -> None:
        self._idle_since = None
        self.transport.set_protocol(protocol)

    def _go_on(self) -> None:
        """The body is here, which the parser has not seen: what comes next is a request."""
        self.transport.set_protocol(self)
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self.on_message_complete()
        if self.cycle.response_complete:
            self._idle_since = self.loop.time()

    def on_response_complete(self) -> None:
        """The answer is written; the next request may be here already."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
            return
        self._idle_since = self.loop.time()
        if self.still_sends:
            self._drop()

    def _keep(self) -> None:
        """Close a connection that has not been used for long. One timer each is quicker than one a request."""
        wait: float = self.timeout_keep_alive
        if self._idle_since is not None:
            wait -= self.loop.time() - self._idle_since
            if wait <= 0:
                self.transport.close()
                return
        self._keeper = self.loop.call_later(wait, self._keep)

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
        body = details(error)
        head = (
            f"HTTP/1.1 {error.status} {error.title}\r\ncontent-type: {MEDIA_TYPE}\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


@lru_cache(maxsize=64)
def locate(url: bytes) -> tuple[str, bytes, bytes]:
    """The path of a request's target, the same as it was sent, and the query. Errors: ValueError, HttpParserError."""
    parsed = httptools.parse_url(url)
    path = parsed.path.decode("ascii")
    return unquote(path) if "%" in path else path, parsed.path, parsed.query or b""


def without_upgrade(data: bytes) -> bytes:
    """The head of a request without the offer of another protocol, which may be ignored (RFC 9110, section 7.8).

    Java's own client offers HTTP/2 with every first request, and the parser would drop the body of such a one.
    """
    end = data.find(b"\r\n\r\n")
    end = len(data) if end < 0 else end
    if data.find(b"pgrade", 0, end) < 0 and data.find(b"PGRADE", 0, end) < 0:  # quicker than the expression
        return data
    found = UPGRADE.search(data, 0, end)
    return data[: found.start()] + data[found.end() :] if found else data
