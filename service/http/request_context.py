"""Every request gets an id, is counted and logged, and every failure has a response."""

from __future__ import annotations

import logging
import time
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.errors import InternalError, settle
from service.http.browsers import security_headers
from service.http.problems import problem
from service.observability.metrics import DISCONNECTED, ComputedRequest, Metrics
from service.observability.request_id import LOWER, assign_request_id
from service.pipeline.deadline import Cancelled

logger = logging.getLogger("attention")
access = logging.getLogger("attention.access")


class RequestContext:
    """Assigns the request id, adds security headers, counts and logs requests, and answers what fails inside with 500.

    Pure ASGI, so that large responses pass without being copied.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics | None) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, whatever happens inside."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.perf_counter()
        header = (LOWER, assign_request_id(scope).encode())
        status = sent = 0
        complete = False
        end = 0.0

        async def send_with_id(message: Message) -> None:
            nonlocal status, sent, complete, end
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = message["headers"]
                message["headers"] = [*headers, header, *security_headers(headers)]
            elif not message.get("more_body", False):
                complete = True
                end = time.perf_counter()  # the rest of a refused body is discarded before `send` returns
            await send(message)
            sent += len(message.get("body", b""))

        if self._metrics is not None:
            self._metrics.request_started()
        try:
            await self._app(scope, receive, send_with_id)
        except (ClientDisconnect, Cancelled) as error:
            settle(error)
        except Exception:
            logger.exception("request %s failed: a defect of the service", scope["state"]["request_id"])
            if not status:
                await problem(InternalError(), Request(scope))(scope, receive, send_with_id)
            elif not complete:
                raise  # the response has begun: the client only notices if the connection breaks
        finally:
            self._count_and_log(scope, status or DISCONNECTED, (end or time.perf_counter()) - start, sent)

    def _count_and_log(self, scope: Scope, status: int, seconds: float, sent: int) -> None:
        """Count and log a request. sent: bytes of the body of its response"""
        state = scope["state"]
        computed: ComputedRequest | None = state.get("computed")
        if self._metrics is not None:
            self._metrics.request_answered("http", operation_of(scope), status, seconds, state.get("problem"))
            if computed is not None:
                self._metrics.tensors_computed(computed, sent)
        if access.isEnabledFor(logging.INFO):
            fields: dict[str, Any] = {
                "request_id": state["request_id"],
                "method": scope["method"][:20],
                "path": scope["path"][:100],
                "status": status,
                "milliseconds": round(seconds * 1e3, 2),
                "code": state.get("problem"),
            }
            access.info("request", extra=fields | (computed.log_fields(sent) if computed else {}))


def operation_of(scope: Scope) -> str:
    """The path of an operation as it is declared; not what was asked for, which may be anything."""
    route = scope.get("route")
    return getattr(route, "path", "other") if route is not None else "other"
