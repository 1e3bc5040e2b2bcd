"""Answers in parts: each is sent from where it lies, none is copied to be joined with others."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from service.codecs.decoded import Part


class PartedResponse(Response):
    """A body of several parts, whose length is known."""

    def __init__(self, parts: list[Part], media_type: str, headers: Mapping[str, str]) -> None:
        length = str(sum(len(part) for part in parts))
        super().__init__(None, 200, {**headers, "Content-Length": length}, media_type)
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the head, then each part."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        last = len(self._parts) - 1
        for place, part in enumerate(self._parts):
            await send({"type": "http.response.body", "body": part, "more_body": place < last})
