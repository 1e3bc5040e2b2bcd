"""Receiving a request body: up to a size limit, at a minimum rate, into memory that admission control granted."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Generator, Mapping
from types import coroutine
from typing import Any, NamedTuple

from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive

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
    message, coming = received_now(receive())
    body: Body | None = None if message is None else small_body(message, min(UNCOUNTED, limits.size))
    if body is None:
        body = await _receive_parts(message, coming, receive, limits, execution)
    lease.complete()
    return body


async def _receive_parts(
    message: Message | None, coming: Awaitable[Message], receive: Receive, limits: BodyLimits, execution: Execution
) -> Body:
    """The whole body. message: the first one, if it is there; coming: what waits for it if it is not"""
    lease = execution.lease
    now = asyncio.get_running_loop().time
    left = limits.grace  # seconds that the sender has until the next chunk
    waited = 0.0  # seconds for memory
    body = bytearray()
    try:
        async with asyncio.timeout(left) as timeout:
            while True:
                begun = now()
                message = await coming if message is None else message
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
                message, coming = None, receive()
    except TimeoutError:
        raise limits.too_slow(len(body), ended=lease.ended) from None
    if not body:
        return chunk
    body += chunk
    return body


def small_body(message: Message, most: int) -> bytes | None:
    """The whole body if a message has it, and it has at most so many bytes."""
    if message["type"] != "http.request" or message.get("more_body", False):
        return None
    body: bytes = message.get("body", b"")
    return body if len(body) <= most else None


def received_now(receiving: Awaitable[Message]) -> tuple[Message | None, Awaitable[Message]]:
    """The message if it is there already, else None; and what waits for it.

    A small body has come whole with its head: a timer for its sender would take a tenth of its computation.
    """
    steps = receiving.__await__()
    try:
        future = next(steps)
    except StopIteration as done:
        return done.value, receiving
    return None, _resumed(steps, future)


@coroutine
def _resumed(steps: Generator[Any, Any, Message], future: Any) -> Generator[Any, Any, Message]:
    """What an awaitable returns that waits for a future already."""
    try:
        while True:
            try:
                value = yield future
            except BaseException as error:
                future = steps.throw(error)
            else:
                future = steps.send(value)
    except StopIteration as done:
        message: Message = done.value
        return message
