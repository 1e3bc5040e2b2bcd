"""The floor: bare ASGI that reads the body and answers with a fixed number of bytes."""

from __future__ import annotations

from typing import Any

ANSWERS: dict[int, bytes] = {}


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answer with as many bytes as the path says: 123 for /123. With ?keep the body is put together first."""
    if scope["type"] != "http":
        return
    more, kept, keeps = True, [], scope["query_string"] == b"keep"
    while more:
        message = await receive()
        more = message.get("more_body", False)
        kept += [message.get("body", b"")] * keeps
    b"".join(kept)
    size = int(scope["path"][1:] or 0)
    body = ANSWERS.setdefault(size, b"0" * size)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(size).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})
