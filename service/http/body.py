"""Reading a body no further than the limit."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from service.codecs.decoded import Body
from service.errors import BodyTooLarge, Fault


def announced(headers: Mapping[bytes, bytes], limit: int) -> int | None:
    """What Content-Length says; None if it says nothing. Errors: BodyTooLarge."""
    length = headers.get(b"content-length", b"")
    if not length.isdigit():
        return None
    if len(length) > 18 or int(length) > limit:
        raise _too_large(limit, f"Content-Length {length[:30].decode('ascii')}")
    return int(length)


async def read_body(receive: Receive, limit: int, take: Callable[[int], None] | None = None) -> Body:
    """The whole body. Errors: BodyTooLarge, as soon as it passes the limit; ClientDisconnect; what `take` raises.

    take: told of the bytes that came, before more are read
    """
    body: Body = b""
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect()
        chunk = message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) + len(chunk) > limit:
            raise _too_large(limit, "more")
        if take is not None:
            take(len(chunk))
        if not body:
            body = bytearray(chunk) if more else chunk
        else:
            body += chunk  # while the next is on its way: joining all in the end would keep the client waiting
    return body


def _too_large(limit: int, got: str) -> BodyTooLarge:
    # The rest of the body stays unread, so this connection cannot carry another request.
    return BodyTooLarge(Fault("", f"at most {limit} bytes", got), headers={"Connection": "close"})
