"""Reading a body no further than the limit."""

from __future__ import annotations

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from service.errors import BodyTooLarge, Fault


async def read_body(announced: bytes, receive: Receive, limit: int) -> bytes:
    """The whole body. `announced` is what Content-Length says, empty if it is not there.

    Errors: BodyTooLarge, as soon as Content-Length or the bytes themselves pass the limit; ClientDisconnect.
    """
    if announced.isdigit() and (len(announced) > 18 or int(announced) > limit):
        raise _too_large(limit, f"Content-Length {announced[:30].decode('ascii')}")
    chunks: list[bytes] = []
    size = 0
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect()
        chunk = message.get("body", b"")
        more = message.get("more_body", False)
        size += len(chunk)
        if size > limit:
            raise _too_large(limit, "more")
        chunks.append(chunk)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _too_large(limit: int, got: str) -> BodyTooLarge:
    # The rest of the body stays unread, so this connection cannot carry another request.
    return BodyTooLarge(Fault("", f"at most {limit} bytes", got), headers={"Connection": "close"})
