"""Receiving a request body: up to a size limit, at a minimum rate, into memory that admission control granted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from attention_service.codecs.decoded import Body
from attention_service.errors import BodyTooLarge, TooSlow
from attention_service.http.head import CLOSE, parse_length
from attention_service.pipeline.admission import UNCOUNTED
from attention_service.pipeline.execution import Execution

# Bytes by which the lease of a body grows.
STEP: Final = 2**20


class BodyLimits(NamedTuple):
    """Limits of a body: `size` bytes, and `grace` seconds plus one second for every `rate` bytes received."""

    size: int
    grace: float
    rate: float

    def too_large(self, got: str) -> BodyTooLarge:
        """A 413 whose response closes the connection, as the rest of the body is only discarded."""
        return BodyTooLarge.at("", f"at most {self.size} bytes", got, headers=CLOSE)

    def too_slow(self, received: int) -> TooSlow:
        """A 408 whose response closes the connection."""
        expected = f"a body that arrives within {self.grace:g} s and 1 s more for every {self.rate:g} bytes"
        return TooSlow.at("", expected, f"{received} bytes", headers=CLOSE)


def content_length(headers: Mapping[bytes, bytes], limits: BodyLimits) -> int | None:
    """The Content-Length; None if there is none. Errors: BodyTooLarge."""
    value = headers.get(b"content-length", b"")
    length = parse_length(value)
    if length is not None and length > limits.size:
        raise limits.too_large(f"Content-Length {value[:30].decode('ascii')}")
    return length


async def receive_disconnect(receive: Receive) -> None:
    """Return when the client is disconnected. Its body must have been received whole."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def receive_body(
    receive: Receive, length: int | None, limits: BodyLimits, execution: Execution, bound: Callable[[int, int], int]
) -> Body:
    """The whole body. The lease of the execution grows as it arrives; while it waits to grow, the sender's time stops.

    length: as announced; bound: `decode_bound` of the codec

    Errors: BodyTooLarge as soon as it passes the limit, TooSlow, Busy, ClientDisconnect.
    """
    most = limits.size if length is None else length
    if length is not None and length > UNCOUNTED:
        execution.admission.check_capacity()
        execution.lease.begin(bound(length, limits.size))
    now = asyncio.get_running_loop().time
    start = now()
    body = bytearray()
    try:
        async with asyncio.timeout_at(start + limits.grace) as timeout:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                chunk: bytes = message.get("body", b"")
                size = len(body) + len(chunk)
                if size > limits.size:
                    raise limits.too_large("more")
                if size > UNCOUNTED and size > execution.lease.memory:
                    if not execution.lease.counted:
                        execution.admission.check_capacity()
                        execution.lease.begin(bound(most, limits.size))
                    timeout.reschedule(None)
                    start -= now()  # the wait for memory does not count as time of the sender
                    execution.deadline.restart()
                    await execution.grow(min(size + STEP, most))
                    start += now()
                if not message.get("more_body", False):
                    break
                body += chunk
                timeout.reschedule(start + limits.grace + size / limits.rate)
    except TimeoutError:
        raise limits.too_slow(len(body)) from None
    execution.lease.receiving = False
    if not body:
        return chunk
    body += chunk
    return body
