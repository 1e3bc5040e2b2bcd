"""Streaming responses: one chunk at a time is encoded and sent; a small response is sent in one piece."""

from __future__ import annotations

import asyncio

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from attention_service.codecs.chunks import Encoded
from attention_service.pipeline.admission import UNCOUNTED
from attention_service.pipeline.deadline import Cancelled
from attention_service.pipeline.execution import Execution


class ChunkedResponse(Response):
    """A body in chunks, which are encoded while it is sent.

    The lease of the execution is released when the body is sent.

    lock: held while a chunk is encoded, so that each turn of the event loop encodes one, however many responses are
    sent
    """

    def __init__(self, encoded: Encoded, execution: Execution, lock: asyncio.Lock) -> None:
        # Response's own constructor is left out: it would copy and encode what is encoded already.
        self.status_code = 200
        self.background = None
        self.raw_headers = [*encoded.headers, (b"server-timing", execution.timings.header().encode())]
        self._chunks = encoded.chunks
        self._execution = execution
        self._lock = lock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the head and each chunk, then release the lease."""
        with self._execution.lease:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            if isinstance(self._chunks, list) and len(self._chunks) == 1:
                chunk = bytes(self._chunks[0])
                if len(chunk) > UNCOUNTED:  # the last message waits until the client has taken nearly everything
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                    chunk = b""
                await send({"type": "http.response.body", "body": chunk})
            else:
                async with self._execution.cancel_on_disconnect():
                    await self._send_chunks(send)

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
