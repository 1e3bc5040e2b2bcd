"""Requests leave no cycles: what they held is free when they are answered, not when somebody looks for garbage."""

from __future__ import annotations

import asyncio
import gc
import json
from typing import Any

import pytest

from tests.conftest import app

ROWS = [[float(i + j) for j in range(64)] for i in range(200)]


async def ask(service: Any, body: bytes, content_type: bytes = b"application/json") -> int:
    """One request, without a server; its status."""
    statuses: list[Any] = []
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http", "method": "POST",
        "path": "/attention", "raw_path": b"/attention", "root_path": "", "query_string": b"", "state": {},
        "headers": [(b"host", b"x"), (b"content-type", content_type), (b"content-length", str(len(body)).encode())],
    }  # fmt: skip
    messages = iter([{"type": "http.request", "body": body}])

    async def receive() -> dict[str, Any]:
        found = next(messages, None)
        return found or await asyncio.get_running_loop().create_future()

    async def send(message: dict[str, Any]) -> None:
        statuses.append(message.get("status"))

    await service(scope, receive, send)
    await asyncio.sleep(0)
    return int(statuses[0])


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        ({"input": [[1.0, 2.0]]}, 200),
        ({"input": [[1.0, 2.0]], "is_causal": True, "include": ["scores"]}, 200),
        ({"input": ROWS, "encoding": "base64"}, 200),
        ({"input": ROWS}, 200),
        ({"input": [[1.0, 2.0]], "scale": "x"}, 422),
        ({"input": [[1.0], [1.0, 2.0]]}, 422),
        ({"input": [[1e300]], "dtype": "float32"}, 422),
        ({}, 422),
    ],
)
def test_no_cycles(request_: dict[str, Any], status: int) -> None:
    body = json.dumps(request_).encode()
    service = app()

    async def count() -> int:
        assert await ask(service, body) == status
        await ask(service, body)
        gc.collect()
        gc.disable()
        try:
            for _ in range(20):
                await ask(service, body)
            return gc.collect()
        finally:
            gc.enable()

    assert asyncio.run(count()) <= 20  # a few of asyncio's own; each request of ours would leave dozens
