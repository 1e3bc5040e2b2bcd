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
from attention_service.observability.requests import DISCONNECTED, REQUEST_ID, RequestRecord, choose_request_id
from attention_service.pipeline.deadline import Cancelled

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
# Browsers must not guess the media type of a response.
NO_SNIFFING = (b"x-content-type-options", b"nosniff")


class RequestContext:
    """Keeps a record of each request for metrics, log and traces, adds headers, and turns exceptions into 500.

    Pure ASGI, so that large responses pass without being copied.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics | None, tracing: Tracing | None = None) -> None:
        self._app = app
        self._metrics = metrics
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, whatever happens inside."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = choose_request_id(value for name, value in scope["headers"] if name == REQUEST_ID)
        record = RequestRecord("http", scope["method"], scope["path"], request_id)
        scope.setdefault("state", {})["record"] = record

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                headers = message["headers"]
                message["headers"] = [*headers, (REQUEST_ID, request_id.encode()), *security_headers(headers)]
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

    def _report(self, record: RequestRecord, scope: Scope) -> None:
        """Count, log and trace a request that was answered."""
        if self._metrics is not None:
            self._metrics.request_answered(record)
        record.log()
        if self._tracing is not None:
            self._tracing.http_answered(record, scope)


def security_headers(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The security headers that a response with these headers gets. A policy of its own is kept."""
    given = dict(headers)
    is_page = given.get(b"content-type", b"").startswith(b"text/html") and PAGE[0][0] not in given
    return [NO_SNIFFING, *PAGE] if is_page else [NO_SNIFFING]
