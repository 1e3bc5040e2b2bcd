"""Requests and comparisons leave no reference cycles: their memory is freed without the garbage collector.

A separate process counts the garbage, as servers of other tests may leave garbage in this one at any time.
"""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from attention_service import compare
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


async def garbage_of_requests(fields: dict[str, Any], status: int) -> Counter[str]:
    """The types of all objects in reference cycles after twenty requests."""
    body = json.dumps(fields).encode()
    service = app()
    for _ in range(2):  # the first requests fill caches
        assert await ask(service, body) == status
    with counted() as garbage:
        for _ in range(20):
            await ask(service, body)
    return garbage


RANDOM = np.random.default_rng(0)
COMPARISONS: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "masked": {"mask": RANDOM.random((1, 4, 9, 9)) < 0.7, "bias": RANDOM.normal(size=(1, 4, 9, 9)), "sinks": [1.0] * 4},
    "rotated": {"rotary": {"base": 100.0}, "query_norm": {}, "softcap": 3.0, "window": {"left": 3}},
    "of two queries": {"normalization": "sigmoid"},
}


def garbage_of_comparisons(options: dict[str, Any], *, is_sent: bool) -> Counter[str]:
    """The types of all objects in reference cycles after a comparison, of an output of zeros or of none."""
    heads = {"query": 4, "key": 2, "value": 2}
    fields = {name: RANDOM.normal(size=(1, count, 9, 8)).astype(np.float16) for name, count in heads.items()} | options
    output = [np.zeros((1, 4, 9, 8), np.float16)] if is_sent else []
    compare(*output, **fields)  # fills caches
    with counted() as garbage:
        compare(*output, **fields)
    return garbage


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts the types of what is in reference cycles when this context ends."""
    found: Counter[str] = Counter()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    yield found
    gc.collect()
    found.update(f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.garbage)
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


@pytest.fixture(scope="module")
def garbage() -> dict[str, dict[str, int]]:
    done = subprocess.run([sys.executable, "-m", __name__], stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_leaves_no_reference_cycles(name: str, garbage: dict[str, dict[str, int]]) -> None:
    assert garbage[name] == {}


@pytest.mark.parametrize("name", COMPARISONS)
@pytest.mark.parametrize("is_sent", [True, False])
def test_a_comparison_leaves_no_reference_cycles(name: str, is_sent: bool, garbage: dict[str, dict[str, int]]) -> None:
    assert garbage[f"comparison, {name}, {is_sent}"] == {}


if __name__ == "__main__":
    found = {name: asyncio.run(garbage_of_requests(*request)) for name, request in REQUESTS.items()}
    for name, options in COMPARISONS.items():
        for is_sent in (True, False):
            found[f"comparison, {name}, {is_sent}"] = garbage_of_comparisons(options, is_sent=is_sent)
    print(json.dumps(found))
