"""Requests leave no reference cycles: their memory is freed after the response without the garbage collector.

A separate process counts the garbage, as servers of other tests may leave garbage in this one at any time.
"""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

from tests.conftest import app

pytestmark = pytest.mark.slow

ROWS = [[float(i + j) for j in range(64)] for i in range(200)]


async def ask(service: Any, body: bytes, content_type: bytes = b"application/json") -> int:
    """The status of the response to a request, sent to the ASGI application without a server."""
    statuses: list[Any] = []
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http", "method": "POST",
        "path": "/attention", "raw_path": b"/attention", "root_path": "", "query_string": b"", "state": {},
        "headers": [(b"host", b"x"), (b"content-type", content_type), (b"content-length", str(len(body)).encode())],
    }  # fmt: skip
    messages = iter([{"type": "http.request", "body": body}])

    async def receive() -> dict[str, Any]:
        garbage_by_request = next(messages, None)
        return garbage_by_request or await asyncio.get_running_loop().create_future()

    async def send(message: dict[str, Any]) -> None:
        statuses.append(message.get("status"))

    await service(scope, receive, send)
    await asyncio.sleep(0)
    return int(statuses[0])


REQUESTS: dict[str, tuple[dict[str, Any], int]] = {
    "small": ({"input": [[1.0, 2.0]]}, 200),
    "small, causal": ({"input": [[1.0, 2.0]], "is_causal": True, "include": ["scores"]}, 200),
    "large, in base64": ({"input": ROWS, "encoding": "base64"}, 200),
    "large": ({"input": ROWS}, 200),
    "a wrong field": ({"input": [[1.0, 2.0]], "scale": "x"}, 422),
    "a ragged array": ({"input": [[1.0], [1.0, 2.0]]}, 422),
    "overflow": ({"input": [[1e300]], "dtype": "float32"}, 422),
    "nothing": ({}, 422),
}


async def garbage(fields: dict[str, Any], status: int) -> Counter[str]:
    """The types of all objects in reference cycles after twenty requests."""
    body = json.dumps(fields).encode()
    service = app()
    for _ in range(2):  # the first requests fill caches
        assert await ask(service, body) == status
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    for _ in range(20):
        await ask(service, body)
    gc.collect()
    garbage_by_request = Counter(f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.garbage)
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()
    return garbage_by_request


@pytest.fixture(scope="module")
def garbage_by_request() -> dict[str, dict[str, int]]:
    done = subprocess.run([sys.executable, "-m", __name__], stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_leaves_no_reference_cycles(name: str, garbage_by_request: dict[str, dict[str, int]]) -> None:
    assert garbage_by_request[name] == {}


if __name__ == "__main__":
    print(json.dumps({name: asyncio.run(garbage(*request)) for name, request in REQUESTS.items()}))
