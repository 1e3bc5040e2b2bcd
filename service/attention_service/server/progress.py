"""Telling the server's connection how far a request is."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from attention_service.http.entry import CLOSE_HEADER
from attention_service.http.head import closes


class ReportProgress:
    """Reports to `scope["state"]["connection"]`, which `server/` puts there; does nothing under other servers.

    It goes around the whole application, whatever middleware that has.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        connection = scope["state"].get("connection") if scope["type"] == "http" else None
        if connection is None:
            await self._app(scope, receive, send)
            return

        progress = Progress(connection, receive, send, may_keep=scope["http_version"] == "1.1" and not closes(scope))
        try:
            await self._app(scope, progress.receive, progress.send)
        except asyncio.CancelledError:  # by uvicorn, as the time to stop is over
            connection.transport.abort()
            try:
                await progress.disconnected()
            except asyncio.CancelledError:  # by the event loop, which ends: over TLS, uvicorn notices later
                await progress.disconnected()


class Progress:
    """`receive` and `send` of one request, which report to its connection.

    may_keep: True if the client lets the connection go on after the response
    """

    def __init__(self, connection: Any, receive: Receive, send: Send, *, may_keep: bool) -> None:
        self._connection = connection
        self._transport = connection.transport
        self._receive = receive
        self._send = send
        self._may_keep = may_keep

    async def receive(self) -> Message:
        """Receive the next message, and report that the received part of the body is taken."""
        message = await self._receive()
        self._connection.body_taken()
        return message

    async def send(self, message: Message) -> None:
        """Send a message. The head says how long the connection is kept."""
        if message["type"] == "http.response.start" and self._may_keep and CLOSE_HEADER not in message["headers"]:
            message["headers"] = [*message["headers"], *self._connection.keep_alive]
        try:
            await self._send(message)
        except Exception:
            if not self._transport.is_closing():
                raise
            await self.disconnected()  # uvicorn has answered the malformed body, and h11 takes no second response

    async def disconnected(self) -> None:
        """Wait at most a second until uvicorn has noticed that the client disconnected.

        It logs an error if the application returns earlier without a complete response. With httptools uvicorn notices
        only for the last of several pipelined requests, hence the limit.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(1):
                while (await self._receive())["type"] != "http.disconnect":
                    pass
