"""Telling the server's connection how far a request is."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class ReportProgress:
    """Reports to `scope["state"]["connection"]`, which service.server puts there; does nothing under other servers.

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

        transport = connection.transport  # service.server's, which uvicorn's protocol has under this name

        async def receive_and_report() -> Message:
            message = await receive()
            connection.body_taken()
            return message

        async def send_and_report(message: Message) -> None:
            if transport.is_closing():
                await disconnected()
                return
            if message["type"] == "http.response.start":
                transport.cork()
                await send(message)
                return
            await send(message)
            transport.uncork()
            if not message.get("more_body", False):
                connection.response_complete()

        async def disconnected() -> None:
            """Wait until uvicorn knows, which logs an error for an application that returns without a response."""
            while (await receive())["type"] != "http.disconnect":
                pass

        connection.request_started()
        try:
            await self._app(scope, receive_and_report, send_and_report)
        except asyncio.CancelledError:  # by uvicorn, as the time to stop is over
            transport.abort()
            await disconnected()
