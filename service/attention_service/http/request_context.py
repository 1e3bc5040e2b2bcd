"""Middleware: every request gets an id, is counted and logged, and every defect has a response."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from attention_service.errors import InternalError, drop_tracebacks
from attention_service.http.problems import problem
from attention_service.observability.metrics import Metrics
from attention_service.observability.requests import (
    DISCONNECTED,
    REQUEST_ID,
    RequestRecord,
    choose_request_id,
    find_trace_id,
)
from attention_service.pipeline.deadline import Cancelled
from attention_service.pipeline.engine import Engine

if TYPE_CHECKING:  # an extra
    from attention_service.observability.tracing import Tracing

logger = logging.getLogger("attention")

# The pages hold their scripts and styles, or load them from this server. They cannot be framed.
PAGE = [
    (b"content-security-policy",
     b"default-src 'self'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
     b"frame-ancestors 'none'; base-uri 'none'; form-action 'self'"),
    (b"referrer-policy", b"no-referrer"),
]  # fmt: skip
# The server closes the connection after this response. HTTP/2 has no such header.
CLOSE_HEADER = (b"connection", b"close")
# Browsers must not guess the media type of a response.
NO_SNIFFING = (b"x-content-type-options", b"nosniff")


class RequestContext:
    """Keeps a record of each request for metrics, log and traces, adds headers, and turns exceptions into 500.

    It answers HEAD as GET without the body, so that HEAD works for every route with GET.

    Pure ASGI, so that large responses pass without being copied.
    """

    def __init__(self, app: ASGIApp, engine: Engine, metrics: Metrics | None, tracing: Tracing | None = None) -> None:
        self._app = app
        self._engine = engine
        self._metrics = metrics
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, whatever happens inside."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = _new_record(scope)
        scope.setdefault("state", {})["record"] = record
        scope, send = head_as_get(scope, send)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                headers = message["headers"]
                message["headers"] = [*headers, (REQUEST_ID, record.request_id.encode()), *security_headers(headers)]
                message["headers"] += self._closing(scope, headers)
            elif not message.get("more_body", False):
                record.ended = time.perf_counter()  # the rest of a refused body is discarded before `send` returns
            await send(message)
            record.sent += len(message.get("body", b""))

        if self._metrics is not None:
            self._metrics.in_flight += 1
        try:
            await self._app(scope, receive, send_with_headers)
        except (ClientDisconnect, Cancelled) as error:
            drop_tracebacks(error)
        except Exception:
            logger.exception("request %s failed: a defect of the service", record.request_id)
            if record.status == DISCONNECTED:
                await problem(InternalError(), Request(scope))(scope, receive, send_with_headers)
            elif not record.ended:
                raise  # the response has begun: the client only notices if the connection breaks
        finally:
            # The template: as a label, the requested path could be anything.
            record.operation = getattr(scope.get("route"), "path", "other")
            self._report(record, scope)

    def _closing(self, scope: Scope, headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """The header that ends the connection, for a response with these headers once the service stops."""
        is_last = self._engine.stopping and scope["http_version"] < "2" and CLOSE_HEADER not in headers
        return [CLOSE_HEADER] if is_last else []

    def _report(self, record: RequestRecord, scope: Scope) -> None:
        """Count, log and trace a request that was answered."""
        if record.method == "HEAD":
            record.sent = 0  # the body of GET, which was left out, counts nowhere
        if self._metrics is not None:
            self._metrics.request_answered(record)
        if self._tracing is not None:
            self._tracing.http_answered(record, scope)
        record.log()


def _new_record(scope: Scope) -> RequestRecord:
    request_id = choose_request_id(value for name, value in scope["headers"] if name == REQUEST_ID)
    client, trace_id = scope.get("client") or ("", 0), find_trace_id(scope["headers"])
    return RequestRecord("http", scope["method"], scope["path"], request_id, client[0], trace_id=trace_id)


def head_as_get(scope: Scope, send: Send) -> tuple[Scope, Send]:
    """The scope and `send` for the application: a HEAD request becomes GET, and of the body only the end is sent."""
    if scope["method"] != "HEAD":
        return scope, send

    async def send_without_body(message: Message) -> None:
        if message["type"] != "http.response.start":
            message = {"type": "http.response.body", "more_body": message.get("more_body", False)}
        await send(message)

    return {**scope, "method": "GET"}, send_without_body


def security_headers(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The security headers that a response with these headers gets. A policy of its own is kept."""
    given = dict(headers)
    is_page = given.get(b"content-type", b"").startswith(b"text/html") and PAGE[0][0] not in given
    return [NO_SNIFFING, *PAGE] if is_page else [NO_SNIFFING]
