"""Answers in parts: each is sent from where it lies, none is copied to be joined with others."""

from __future__ import annotations

from collections.abc import Iterable

from anyio import sleep
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from service.codecs.decoded import Part


class PartedResponse(Response):
    """A body in parts. A list of them has a length, which is announced; others are made while the first are sent."""

    def __init__(self, parts: Iterable[Part], media_type: str, timing: str) -> None:
        # Response's own constructor is left out: it would copy and encode what is encoded already.
        self.status_code = 200
        self.background = None
        self.raw_headers = [
            (b"content-type", media_type.encode("latin-1")),
            (b"server-timing", timing.encode("latin-1")),
        ]
        if isinstance(parts, list):
            self.raw_headers.append((b"content-length", b"%d" % sum(map(len, parts))))
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the head, then each part."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        parts = self._parts
        if isinstance(parts, list):
            last = len(parts) - 1
            for place, part in enumerate(parts):
                await send({"type": "http.response.body", "body": part, "more_body": place < last})
            return
        for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
            await sleep(0)  # let others have their turn
        await send({"type": "http.response.body", "body": b""})
