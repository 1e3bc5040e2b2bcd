"""Answers in parts: each is sent from where it lies, none is copied to be joined with others."""

from __future__ import annotations

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from service.codecs.decoded import Part


class PartedResponse(Response):
    """A body of several parts, whose length is known. Headers are ready to be sent."""

    def __init__(self, parts: list[Part], media_type: str, timing: str) -> None:
        # Response's own constructor is left out: it would copy and encode what is encoded already.
        self.status_code = 200
        self.background = None
        self.raw_headers = [
            (b"content-type", media_type.encode("latin-1")),
            (b"content-length", b"%d" % sum(map(len, parts))),
            (b"server-timing", timing.encode("latin-1")),
        ]
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the head, then each part."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        last = len(self._parts) - 1
        for place, part in enumerate(self._parts):
            await send({"type": "http.response.body", "body": part, "more_body": place < last})
