"""Discarding the rest of a request body after an early response, so that its sender finds the response.

A server that closes a connection with bytes unread resets it, and a client that still sends may lose the response that
it has not read yet (RFC 9112, section 9.6). So the response ends only when the body is complete, or a limit is passed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from attention_service.http.head import parse_length

# Bytes that are discarded of a body whose length is unknown, or more than `ANNOUNCED`.
UNKNOWN: Final = 2**24
# Bytes that are discarded of a body whose length was announced.
ANNOUNCED: Final = 2**27
# Seconds to wait after each chunk of at most so many bytes, times the bodies that are being discarded: refused requests
# must not take the processor from others, and under overload their senders come back later.
PAUSE: Final = 0.003
CHUNK: Final = 2**17


class DiscardUnreadBody:
    """Ends a response when the request body is complete, was discarded up to a limit, or `seconds` are over."""

    def __init__(self, app: ASGIApp, seconds: float) -> None:
        self._app = app
        self._seconds = seconds
        self._discarding = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http" or not has_body(scope["headers"]):
            await self._app(scope, receive, send)
            return
        complete = False

        async def receive_and_check() -> Message:
            nonlocal complete
            message = await receive()
            complete = not message.get("more_body", False)  # neither has the message of a disconnect
            return message

        async def send_and_discard(message: Message) -> None:
            if complete or message["type"] != "http.response.body" or message.get("more_body", False):
                await send(message)
                return
            await send({**message, "more_body": True})
            left = discarded_bytes(scope["headers"])
            self._discarding += 1
            try:
                async with asyncio.timeout(self._seconds):
                    while not complete and left >= 0:
                        got = len((await receive_and_check()).get("body", b""))
                        left -= got
                        await asyncio.sleep(PAUSE * self._discarding * max(1, got / CHUNK))
            except TimeoutError:
                pass
            finally:  # also if the request is cancelled, or later bodies would be discarded ever more slowly
                self._discarding -= 1
            await send({"type": "http.response.body", "body": b""})

        await self._app(scope, receive_and_check, send_and_discard)


def has_body(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """True if these headers, in lower case, announce a body."""
    return any(name == b"transfer-encoding" or (name == b"content-length" and value != b"0") for name, value in headers)


def discarded_bytes(headers: Iterable[tuple[bytes, bytes]]) -> int:
    """How many bytes are discarded of the body that these headers, in lower case, announce."""
    length = parse_length(dict(headers).get(b"content-length", b""))
    return UNKNOWN if length is None or length >= ANNOUNCED else length
