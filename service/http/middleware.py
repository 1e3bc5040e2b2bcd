"""The outermost layer: every request gets an id, and every failure an answer that carries it."""

from __future__ import annotations

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.http.problems import internal_error
from service.http.request_id import HEADER, assign_request_id
from service.stop import Abandoned


class RequestContext:
    """Pure ASGI, so that large answers pass without being copied or wrapped."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, whatever happens inside."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        header = (HEADER.lower().encode(), assign_request_id(scope).encode())
        started = complete = False

        async def send_with_id(message: Message) -> None:
            nonlocal started, complete
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message["headers"], header]
            else:
                complete = not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except (ClientDisconnect, Abandoned):
            return  # nobody is left to answer
        except Exception:
            if complete:
                return  # FastAPI raises once more what it has answered
            response = internal_error(Request(scope))
            if started:
                raise  # the answer is under way: breaking the connection is all that still tells
            await response(scope, receive, send_with_id)
