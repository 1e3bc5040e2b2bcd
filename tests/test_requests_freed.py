"""All objects of a request are freed after the response without the garbage collector, which may run hours later."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any

import grpc
import httpx
import numpy as np
import pytest

from attention_service.backends.numpy.backend import NumpyBackend
from attention_service.codecs.decoded import Decoded
from attention_service.pipeline.attention import PreparedRequest
from attention_service.pipeline.execution import Execution
from tests.conftest import app, serving
from tests.helpers.messages import request
from tests.helpers.raw import connect
from tests.helpers.rpc import remote
from tests.helpers.waiting import until

pytestmark = pytest.mark.slow

JSON = {"Content-Type": "application/json"}
LARGE = [[0.5] * 64] * 3000
MANY = b"1," * 1_500_000  # a long body, which is decoded in a thread
LIMIT = 8_000_000
KINDS = {Decoded, Execution, PreparedRequest}


@pytest.fixture(scope="module")
def server() -> Iterator[httpx.Client]:
    with serving(app(max_body_bytes=LIMIT)) as client:
        client.post("/attention", content=body(input=[[1.0]]), headers=JSON)
        yield client


def body(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


@contextmanager
def assert_freed() -> Iterator[None]:
    """Disables garbage collection inside, and asserts at the end that no objects or tracebacks of requests are left."""
    gc.collect()
    gc.disable()
    gc.freeze()  # `gc.get_objects` lists only what is made from here on
    try:
        yield
        until(lambda: not _is_left())  # the server may still be returning from the last function
    finally:
        gc.enable()


def _is_left() -> bool:
    return any(type(found) in KINDS or _is_ours(found) for found in gc.get_objects())


def _is_ours(found: object) -> bool:
    """True for a traceback through the service. Does not use isinstance, which runs the code of lazy objects."""
    return type(found) is TracebackType and "/attention_service/" in found.tb_frame.f_code.co_filename


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (body(input=[[1.0, 2.0]]), 200),
        (body(input=LARGE), 200),
        (b'{"query": [' + MANY + b"1],}", 400),
        (b'{"query": [' + MANY + b"null]}", 422),
        (b'{"input": [[' + MANY + b"1]], \"n\": 1}", 422),
        (b'{"query": [1],}', 400),
        (b'{"query": [null]}', 422),
        (body(input=[[1e30] * 64] * 3000, dtype="float32"), 422),
        (body(input=[[1e30] * 4] * 4, dtype="float32"), 422),
        (b"{" + b" " * LIMIT + b"}", 413),
    ],
    ids=["small", "large", "no JSON, in a thread", "null, in a thread", "unknown field, in a thread", "no JSON", "null",
         "overflow in a thread", "overflow", "too long"],
)  # fmt: skip
def test_a_response_frees_its_request(server: httpx.Client, content: bytes, status: int) -> None:
    with assert_freed():
        assert server.post("/attention", content=content, headers=JSON).status_code == status
    with assert_freed():
        reply = server.post("/v2/models/attention/infer", content=content, headers=JSON)
        assert reply.status_code in (400, 413, 422)


def test_a_request_beyond_the_time_limit_is_freed() -> None:
    with serving(app(time_limit=0.001)) as client, assert_freed():
        assert client.post("/attention", content=body(input=LARGE), headers=JSON).status_code == 504


def test_a_request_beyond_the_memory_limit_is_freed() -> None:
    with serving(app(memory_limit=2**20)) as client, assert_freed():
        assert client.post("/attention", content=body(input=LARGE), headers=JSON).status_code in (413, 503)


def test_a_client_that_disconnects_releases_its_memory() -> None:
    """Objects and lease are released, wherever the body ends."""
    content = body(input=LARGE)
    head = b"POST /attention HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    service = app()
    admission = service.state.engine.admission
    with serving(service) as client:
        client.post("/attention", content=body(input=[[1.0]]), headers=JSON)
        with assert_freed():
            for sent in (len(content), len(content) // 2, 1000):
                with connect(client) as connection:
                    connection.sendall(head % len(content) + content[:sent])
                    # The event loop has read the request head when it responds to a later request.
                    assert client.get("/health/live").status_code == 200
                until(lambda: service.state.metrics.in_flight == 0)
        until(lambda: (admission.free, admission.counted_requests) == (admission.memory, 0))


@pytest.mark.parametrize("path", ["/attention", "/attention/compare", "/attention/heatmap"])
def test_a_request_is_freed_whatever_its_operation(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a request for which an allocation fails, whose error holds the frames of the computation."""

    def fail(*given: object) -> None:
        raise MemoryError

    content = body(input=[[0.5] * 4] * 30, is_causal=True)
    with serving(app()) as client:
        assert client.post(path, content=content, headers=JSON).status_code == 200  # fills caches
        with assert_freed():
            assert client.post(path, content=content, headers=JSON).status_code == 200
        monkeypatch.setattr(NumpyBackend, "execute", fail)
        monkeypatch.setattr(NumpyBackend, "bin_scores", fail)
        with assert_freed():
            assert client.post(path, content=content, headers=JSON).status_code == 413


@pytest.mark.parametrize("number", [0.5, 1e30], ids=["good", "overflow"])
@pytest.mark.parametrize("rows", [4, 3000], ids=["small", "large"])
def test_a_call_over_grpc_is_freed(rows: int, number: float) -> None:
    message = request({"input": np.full((rows, 64), number, np.float32)}, outputs=("output",))
    with remote() as server:
        server.ask("ServerLive")
        with assert_freed(), suppress(grpc.RpcError):
            server.infer(message)
        with assert_freed(), pytest.raises(grpc.RpcError):
            server.infer(request({"input": np.full((rows, 64), np.nan, np.float32)}, {"wrong": True}))
        with assert_freed(), suppress(grpc.RpcError):
            server.infer(message, timeout=0.001)
