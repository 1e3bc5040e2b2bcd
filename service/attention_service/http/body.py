"""Receiving a request body: up to a size limit, at a minimum rate, into memory that admission control granted."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import NamedTuple

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from attention_service.codecs.decoded import Body
from attention_service.errors import BodyTooLarge, TooSlow
from attention_service.http.head import CLOSE, parse_length
from attention_service.pipeline.admission import RESEND, UNCOUNTED
from attention_service.pipeline.execution import Execution


class BodyLimits(NamedTuple):
    """Limits of a body: `size` bytes, and a sender that is behind `rate` bytes per second by `grace` seconds at most.

    Bytes that are sent faster do not count for later: after `grace` seconds without a byte, each body ends.
    """

    size: int
    grace: float
    rate: float

    def too_large(self, got: str) -> BodyTooLarge:
        """A 413 whose response closes the connection, as the rest of the body is only discarded."""
        return BodyTooLarge.at("", f"at most {self.size} bytes", got, BodyTooLarge.ways_out, headers=CLOSE)

    def too_slow(self, received: int, *, ended: bool) -> TooSlow:
        """A 408 whose response closes the connection. ended: True if the body ended in favour of others"""
        expected = f"a body that is at most {self.grace:g} s behind {self.rate:g} bytes per second"
        if ended:
            expected = f"a body that sends as much again within {RESEND:g} s, while others wait for memory"
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


async def receive_body(receive: Receive, length: int | None, limits: BodyLimits, execution: Execution) -> Body:
    """The whole body. The lease of the execution grows as it arrives; while it waits to grow, the sender's time stops.

    length: as announced. In all, the body waits for memory until the deadline at most.

    Errors: BodyTooLarge as soon as it passes the limit, TooSlow, Busy, ClientDisconnect.
    """
    lease = execution.lease
    if length is not None and length > UNCOUNTED:
        execution.admission.check_capacity()
        lease.begin()
    now = asyncio.get_running_loop().time
    left = limits.grace  # seconds that the sender has until the next chunk
    waited = 0.0  # seconds for memory
    body = bytearray()
    try:
        async with asyncio.timeout(left) as timeout:
            while True:
                begun = now()
                message = await receive()
                left -= now() - begun
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                chunk: bytes = message.get("body", b"")
                size = len(body) + len(chunk)
                if size > limits.size:
                    raise limits.too_large("more")
                if size > UNCOUNTED:
                    if not lease.counted:
                        execution.admission.check_capacity()
                    timeout.reschedule(None)
                    execution.deadline.restart(waited)
                    begun = now()
                    await lease.receive(size, execution.deadline, timeout)
                    waited += now() - begun
                if not message.get("more_body", False):
                    break
                body += chunk
                left = min(left + len(chunk) / limits.rate, limits.grace)
                timeout.reschedule(now() + left)
    except TimeoutError:
        raise limits.too_slow(len(body), ended=lease.ended) from None
    lease.complete()
    if not body:
        return chunk
    body += chunk
    return body
