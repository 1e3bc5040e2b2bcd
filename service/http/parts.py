"""Answers in parts: each is sent from where it lies, none is copied to be joined with others."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from service.codecs.decoded import Part
from service.engine import Call
from service.http.disconnect import watching
from service.stop import Abandoned

# Bytes that fit into the buffers of any connection, so that sending them waits for nobody.
SHORT = 2**15


class PartedResponse(Response):
    """A body in parts. A list of them has a length, which is announced; others are made while the first are sent.

    call: gives back what it holds when the answer is out; patience: seconds to wait for the client to take a part;
    headers: more of them
    """

    def __init__(
        self,
        parts: Iterable[Part],
        media_type: str,
        call: Call,
        patience: float,
        headers: Iterable[tuple[bytes, bytes]] = (),
    ) -> None:
        # Response's own constructor is left out: it would copy and encode what is encoded already.
        self.status_code = 200
        self.background = None
        self.raw_headers = [
            (b"content-type", media_type.encode("latin-1")),
            (b"server-timing", call.timings.header()),
            *headers,
        ]
        self._length = sum(map(len, parts)) if isinstance(parts, list) else None
        if self._length is not None:
            self.raw_headers.append((b"content-length", b"%d" % self._length))
        self.sent = 0  # bytes
        self._parts = parts
        self._call = call
        self._patience = patience

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the head, then each part, then give back what the request held."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            if self._length is not None and self._length <= SHORT:
                body = b"".join(self._parts)
                await send({"type": "http.response.body", "body": body})
                self.sent = len(body)
            else:
                async with watching(receive, self._call.stop):
                    await self._send_parts(send)
        finally:
            self._call.leave()

    async def _send_parts(self, send: Send) -> None:
        """Errors: Abandoned, where nobody takes them."""
        now = asyncio.get_running_loop().time
        try:
            async with asyncio.timeout(self._patience) as patience:
                for part in worth_sending(self._parts):
                    patience.reschedule(now() + self._patience)
                    await send({"type": "http.response.body", "body": part, "more_body": True})
                    if self._call.stop.abandoned:
                        raise Abandoned
                    await asyncio.sleep(0)  # let others have their turn
                    self.sent += len(part)
                await send({"type": "http.response.body", "body": b""})
        except TimeoutError:
            raise Abandoned from None


def worth_sending(parts: Iterable[Part]) -> Iterator[Part]:
    """The same bytes, small parts together, large ones from where they lie."""
    small: list[Part] = []
    length = 0
    for part in parts:
        if length and length + len(part) >= SHORT:
            yield b"".join(small)
            small, length = [], 0
        if len(part) >= SHORT:
            yield part
        else:
            small.append(part)
            length += len(part)
    if small:
        yield b"".join(small)
