"""Middleware: every request gets an id, is counted and logged, and every defect has a response."""

from __future__ import annotations

import logging
import time
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.errors import InternalError, drop_tracebacks
from service.http.browsers import security_headers
from service.http.problems import problem
from service.observability.metrics import DISCONNECTED, Tally
from service.observability.request_id import LOWER, assign_request_id
from service.pipeline.deadline import Cancelled

logger = logging.getLogger("attention")
access = logging.getLogger("attention.access")


class RequestContext:
    """Assigns the request id, adds security headers, counts and logs requests, and answers what fails inside with 500.

    Pure ASGI, so that large responses pass without being copied.
    """

    def __init__(self, app: ASGIApp, tally: Tally | None) -> None:
        self._app = app
        self._tally = tally

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, whatever happens inside."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.perf_counter()
        header = (LOWER, assign_request_id(scope).encode())
        status = 0
        complete = False
        end = 0.0

        async def send_with_id(message: Message) -> None:
            nonlocal status, complete, end
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = message["headers"]
                message["headers"] = [*headers, header, *security_headers(headers)]
            elif not message.get("more_body", False):
                complete = True
                end = time.perf_counter()  # the rest of a refused body is discarded before `send` returns
            await send(message)

        if self._tally is not None:
            self._tally.in_flight += 1
        try:
            await self._app(scope, receive, send_with_id)
        except (ClientDisconnect, Cancelled) as error:
            drop_tracebacks(error)
        except Exception:
            logger.exception("request %s failed: a defect of the service", scope["state"]["request_id"])
            if not status:
                await problem(InternalError(), Request(scope))(scope, receive, send_with_id)
            elif not complete:
                raise  # the response has begun: the client only notices if the connection breaks
        finally:
            self._note(scope, status or DISCONNECTED, (end or time.perf_counter()) - start)

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        """Count and log a request that has been answered."""
        state = scope["state"]
        tally = self._tally
        if tally is not None:
            tally.in_flight -= 1
            tally.answered(operation_of(scope), status, seconds, state.get("problem"))
        note = state.pop("note", None)  # it holds the request, and the request would hold it
        if note is not None:
            note(tally)
        if access.isEnabledFor(logging.INFO):
            fields: dict[str, Any] = {
                "request_id": state["request_id"],
                "method": scope["method"][:20],
                "path": scope["path"][:100],
                "status": status,
                "milliseconds": round(seconds * 1e3, 2),
                "code": state.get("problem"),
            }
            access.info("request", extra=fields | state.get("noted", {}))


def operation_of(scope: Scope) -> str:
    """The path template of the matched route, or "other": as a label, the requested path could be anything."""
    route = scope.get("route")
    return getattr(route, "path", "other") if route is not None else "other"
