"""Reading a body no further than the limit."""

from __future__ import annotations

from starlette.requests import Request

from service.errors import BodyTooLarge, Fault


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body. Errors: BodyTooLarge, as soon as Content-Length or the bytes themselves pass the limit."""
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and (len(announced) > 18 or int(announced) > limit):
        raise _too_large(limit, f"Content-Length {announced[:30]}")
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise _too_large(limit, "more")
        chunks.append(chunk)
    return b"".join(chunks)


def _too_large(limit: int, got: str) -> BodyTooLarge:
    # The rest of the body stays unread, so this connection cannot carry another request.
    return BodyTooLarge(Fault("", f"at most {limit} bytes", got), headers={"Connection": "close"})
