"""Streaming responses: encoded chunks are sent one by one, none is copied to be joined with others."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from service.codecs.chunks import Encoded
from service.http.disconnect import CancelOnDisconnect
from service.pipeline.deadline import Cancelled
from service.pipeline.execution import UNCOUNTED, Execution


class ChunkedResponse(Response):
    """A body in chunks, which are encoded while it is sent.

    headers: more of them
    lock: held while a chunk is encoded, so that each turn of the event loop encodes one, however many are sent
    """

    def __init__(
        self,
        encoded: Encoded,
        media_type: str,
        execution: Execution,
        lock: asyncio.Lock,
        headers: Iterable[tuple[bytes, bytes]] = (),
    ) -> None:
        # Response's own constructor is left out: it would copy and encode what is encoded already.
        self.status_code = 200
        self.background = None
        self.raw_headers = [
            (b"content-type", media_type.encode("latin-1")),
            (b"server-timing", execution.timings.header()),
            *headers,
        ]
        if encoded.length is not None:
            self.raw_headers.append((b"content-length", b"%d" % encoded.length))
        self._chunks = encoded.chunks
        self._length = encoded.length
        self._execution = execution
        self._lock = lock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the head and each chunk, then release what the request held."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            if self._length is not None and self._length <= UNCOUNTED:
                await send({"type": "http.response.body", "body": b"".join(self._chunks)})
            else:
                async with CancelOnDisconnect(receive, self._execution):
                    await self._send_chunks(send)
        finally:
            self._execution.release()

    async def _send_chunks(self, send: Send) -> None:
        """Errors: Cancelled."""
        chunks = iter(self._chunks)
        while True:
            async with self._lock:
                chunk = next(chunks, None)
                await asyncio.sleep(0)
            if chunk is None:
                break
            # A copy: a transport holds a view of an array until the last byte is sent, when the lease has ended.
            await send({"type": "http.response.body", "body": bytes(chunk), "more_body": True})
            if self._execution.deadline.cancelled:
                raise Cancelled
        # Servers wait here until the client has taken nearly everything: only then the memory is free.
        await send({"type": "http.response.body", "body": b""})
