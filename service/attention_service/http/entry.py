"""Middleware: where every request enters. One pass over its head, one record, one `receive` and one `send`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from attention_service.errors import InternalError, drop_tracebacks
from attention_service.http.head import check_host, closes, parse_length, read_head
from attention_service.http.problems import problem
from attention_service.observability.metrics import Metrics
from attention_service.observability.requests import (
    DISCONNECTED,
    REQUEST_ID,
    TRACEPARENT,
    RequestRecord,
    choose_request_id,
    find_trace_id,
)
from attention_service.pipeline.deadline import Cancelled
from attention_service.pipeline.engine import Engine
from attention_service.settings.checks import split_list

if TYPE_CHECKING:  # an extra
    from attention_service.observability.tracing import Tracing

logger = logging.getLogger("attention")

# The pages hold their scripts and styles, or load them from this server. They cannot be framed.
POLICY: Final = b"content-security-policy"
PAGE: Final = [
    (POLICY,
     b"default-src 'self'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
     b"frame-ancestors 'none'; base-uri 'none'; form-action 'self'"),
    (b"referrer-policy", b"no-referrer"),
]  # fmt: skip
# The server closes the connection after this response. HTTP/2 has no such header.
CLOSE_HEADER: Final = (b"connection", b"close")
# Browsers must not guess the media type of a response.
NO_SNIFFING: Final = (b"x-content-type-options", b"nosniff")

# Bytes that are discarded of a body whose length is unknown, or more than `ANNOUNCED`.
UNKNOWN: Final = 2**24
# Bytes that are discarded of a body whose length was announced.
ANNOUNCED: Final = 2**27
# Seconds to wait after each chunk of at most so many bytes, times the bodies that are being discarded: refused requests
# must not take the processor from others, and under overload their senders come back later.
PAUSE: Final = 0.003
CHUNK: Final = 2**17


class Entry:
    """Checks the head of each request, keeps its record for metrics, log and traces, and turns exceptions into 500.

    It answers HEAD as GET without the body, so that HEAD works for every route with GET. The middleware inside finds
    the record and the headers, by their names in lower case, in `scope["state"]`.

    Pure ASGI, so that large responses pass without being copied.

    discarding: bodies that are being discarded
    """

    def __init__(
        self, app: ASGIApp, engine: Engine, metrics: Metrics | None = None, tracing: Tracing | None = None
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._tracing = tracing
        settings = engine.settings
        self.engine = engine
        self.discarding = 0
        self.read_timeout = settings.read_timeout
        # An Upgrade header is ignored (RFC 9110, section 7.8), but httptools stops parsing after it, as if the protocol
        # had changed, and uvicorn then parses later bytes of the body as a new request.
        self.closes_after_upgrade = settings.http_parser == "httptools"
        self._allowed_hosts = tuple(split_list(settings.allowed_hosts.lower()))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, whatever happens inside."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, error = read_head(scope)
        record = _new_record(scope, headers)
        state = scope.setdefault("state", {})
        state["record"], state["headers"] = record, headers
        exchange = Exchange(self, scope, headers, record, receive, send)
        if record.method == "HEAD":
            scope = {**scope, "method": "GET"}
        if self._metrics is not None:
            self._metrics.in_flight += 1
        try:
            if error is None and self._allowed_hosts:
                error = check_host(headers.get(b"host"), scope, self._allowed_hosts)
            app = self._app if error is None else problem(error, Request(scope))
            await app(scope, exchange.receive, exchange.send)
        except (ClientDisconnect, Cancelled) as reason:
            drop_tracebacks(reason)
        except Exception:
            logger.exception("request %s failed: a defect of the service", record.request_id)
            if record.status == DISCONNECTED:
                await problem(InternalError(), Request(scope))(scope, exchange.receive, exchange.send)
            elif not record.ended:
                raise  # the response has begun: the client only notices if the connection breaks
        finally:
            # The template: as a label, the requested path could be anything.
            record.operation = getattr(scope.get("route"), "path", "other")
            self._report(record, scope)

    def _report(self, record: RequestRecord, scope: Scope) -> None:
        """Count, log and trace a request that was answered."""
        if record.method == "HEAD":
            record.sent = 0  # the body of GET, which was left out, counts nowhere
        if self._metrics is not None:
            self._metrics.request_answered(record)
        if self._tracing is not None:
            self._tracing.http_answered(record, scope)
        record.log()


class Exchange:
    """The `receive` and `send` of one request, which keep its record and add headers to its response.

    The response ends when the request body is complete, was discarded up to a limit, or the time for that is over. A
    server that closes a connection with bytes unread resets it, and a client that still sends may lose the response
    that it has not read yet (RFC 9112, section 9.6).
    """

    __slots__ = ("_connection", "_entry", "_headers", "_is_complete", "_receive", "_record", "_scope", "_send")

    def __init__(
        self,
        entry: Entry,
        scope: Scope,
        headers: Mapping[bytes, bytes],
        record: RequestRecord,
        receive: Receive,
        send: Send,
    ) -> None:
        self._entry = entry
        self._scope = scope
        self._headers = headers
        self._record = record
        self._receive = receive
        self._send = send
        self._is_complete = False
        self._connection: Any = scope["state"].get("connection")  # which `server/` puts there; other servers do not

    async def receive(self) -> Message:
        """Receive the next message."""
        message = await self._receive()
        self._is_complete = not message.get("more_body", False)  # neither has the message of a disconnect
        return message

    async def send(self, message: Message) -> None:
        """Send a message."""
        record = self._record
        try:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                headers = dict(message["headers"])
                own = (REQUEST_ID, record.request_id.encode())
                message["headers"] = [*message["headers"], own, *self._more_headers(headers)]
                # With a length, the body follows at once. A stream may begin later, an answer to HEAD has no body.
                follows = self._is_complete and b"content-length" in headers and record.method != "HEAD"
                if follows and self._connection is not None:
                    self._connection.transport.hold()
                await self._send(message)
                return
            size = len(message.get("body", b""))
            more = message.get("more_body", False)
            if record.method == "HEAD":
                message = {"type": "http.response.body", "more_body": more}
            if not more:
                record.ended = time.perf_counter()  # the rest of a refused body is discarded before `send` returns
            is_path = message["type"] != "http.response.body"  # to a file
            if more or is_path or self._is_complete or not has_body(self._headers):
                await self._send(message)
            else:
                await self._send({**message, "more_body": True})
                await self._discard()
                await self._send({"type": "http.response.body", "body": b""})
            record.sent += size
        except Exception:
            if self._connection is None or not self._connection.transport.is_closing():
                raise
            await self._connection.disconnected(self._receive)  # uvicorn has answered the malformed body itself

    def _more_headers(self, headers: Mapping[bytes, bytes]) -> list[tuple[bytes, bytes]]:
        """The headers that a response with these gets: of security, and to keep or to end the connection."""
        more = [NO_SNIFFING]
        if headers.get(b"content-type", b"").startswith(b"text/html") and POLICY not in headers:
            more += PAGE
        version = self._scope["http_version"]
        must_close = self._entry.engine.stopping or (self._entry.closes_after_upgrade and b"upgrade" in self._headers)
        if version >= "2" or headers.get(b"connection") == b"close":
            return more
        if must_close:
            more.append(CLOSE_HEADER)
        elif self._connection is not None and not closes(version, self._headers.get(b"connection")):
            more += self._connection.keep_alive
        return more

    async def _discard(self) -> None:
        """Receive the rest of the body, so that its sender comes to read the response."""
        entry, left = self._entry, discarded_bytes(self._headers)
        entry.discarding += 1
        try:
            async with asyncio.timeout(entry.read_timeout):
                while not self._is_complete and left >= 0:
                    got = len((await self.receive()).get("body", b""))
                    left -= got
                    await asyncio.sleep(PAUSE * entry.discarding * max(1, got / CHUNK))
        except TimeoutError:
            pass
        finally:  # also if the request is cancelled, or later bodies would be discarded ever more slowly
            entry.discarding -= 1


def _new_record(scope: Scope, headers: Mapping[bytes, bytes]) -> RequestRecord:
    request_id, trace_id = choose_request_id(headers.get(REQUEST_ID)), find_trace_id(headers.get(TRACEPARENT))
    client = scope.get("client") or ("", 0)
    return RequestRecord("http", scope["method"], scope["path"], request_id, client[0], trace_id=trace_id)


def has_body(headers: Mapping[bytes, bytes]) -> bool:
    """True if these headers announce a body."""
    return b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0"


def discarded_bytes(headers: Mapping[bytes, bytes]) -> int:
    """How many bytes are discarded of the body that these headers announce."""
    length = parse_length(headers.get(b"content-length", b""))
    return UNKNOWN if length is None or length >= ANNOUNCED else length
