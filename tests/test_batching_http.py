"""Dynamic batching over HTTP: a response does not depend on the other requests of its batch."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPResponse
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from attention_service.codecs.typed_arrays import decode
from tests.conftest import app, serving
from tests.helpers.backends import BACKENDS
from tests.helpers.waiting import until
from tests.helpers.wire import typed_array as encode
from tests.test_observability import samples

# Options that keep NumPy from taking its path for small requests.
CAUSAL: dict[str, Any] = {"is_causal": True, "encoding": "base64"}
WINDOW = 0.05


def request(seed: int, q: int = 5, d: int = 4, **options: Any) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    arrays = {name: encode(random.normal(size=(q, d))) for name in ("query", "key", "value")}
    return arrays | CAUSAL | options


# Requests arrive while the event loop is blocked, so that they form a batch, which is computed inline or in
# the only worker thread.

BLOCKER: dict[str, Any] = {"input": encode(np.ones((10_000, 1))), "normalization": "sum", "include": []}
INLINE, WORKER = {"inline_flops": 10**10}, {"inline_flops": 5000, "concurrency": 1}


class Answer:
    """A complete response: status, headers, body."""

    def __init__(self, connection: socket.socket) -> None:
        with connection, HTTPResponse(connection, method="POST") as response:
            response.begin()
            self.status, self.headers = response.status, response.headers
            self.body: dict[str, Any] = json.loads(response.read())

    @property
    def batch(self) -> int:
        """The number of requests in the batch."""
        found = re.search(r'batch;desc="(\d+)"', self.headers["server-timing"])
        return int(found[1]) if found else 1


def connect(client: httpx.Client) -> socket.socket:
    return socket.create_connection((client.base_url.host, client.base_url.port or 80), 30)


def send(connection: socket.socket, body: dict[str, Any]) -> socket.socket:
    content = json.dumps(body).encode()
    head = f"POST /attention HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    connection.sendall(f"{head}\r\nConnection: close\r\n\r\n".encode() + content)
    return connection


class BlockedLoop:
    """An application whose event loop is blocked from a request for /hold until the block of `hold` ends."""

    def __init__(self, service: ASGIApp) -> None:
        self._service = service
        self.is_blocked, self.may_continue = threading.Event(), threading.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("path") == "/hold":
            self.is_blocked.set()
            self.may_continue.wait(30)
        await self._service(scope, receive, send)

    @contextmanager
    def hold(self, client: httpx.Client) -> Iterator[None]:
        self.is_blocked.clear()
        self.may_continue.clear()
        with connect(client) as connection:
            connection.sendall(b"GET /hold HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            assert self.is_blocked.wait(30)
            try:
                yield
            finally:
                self.may_continue.set()
            assert connection.recv(12) == b"HTTP/1.1 404"


class BatchingService(NamedTuple):
    """A service with dynamic batching, and its client."""

    client: httpx.Client
    blocked: BlockedLoop

    def all_at_once(self, bodies: list[dict[str, Any]]) -> list[socket.socket]:
        """Connections with these requests, which arrive within one iteration of the event loop."""
        connections = [connect(self.client) for _ in bodies]
        assert (
            self.client.get("/health/live").status_code == 200
        )  # the server has accepted the earlier connections, too
        with self.blocked.hold(self.client):
            blocker = send(connect(self.client), BLOCKER)
            for connection, body in zip(connections, bodies, strict=True):
                send(connection, body)
        assert Answer(blocker).status == 200
        return connections


def flat(fields: dict[str, Any]) -> dict[str, Any]:
    """All arrays of a response by name, with top_weights as two arrays."""
    top = {f"top_weights/{name}": array for name, array in fields.get("top_weights", {}).items()}
    return {name: array for name, array in fields.items() if name not in ("metadata", "top_weights")} | top


def arrays(answer: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: decode(value, "") for name, value in flat(answer).items()}


# For 16-bit types: one unit in the last place.
TOLERANCE = {"float64": 1e-13, "float32": 2e-6, "bfloat16": 2.0**-7, "int32": 0.0, "int64": 0.0}


def assert_same(ours: dict[str, Any], alone: dict[str, Any], *, by_type: bool = False) -> None:
    """Assert equal metadata, and arrays equal up to the rounding of float64, or of each array's type (`by_type`)."""
    first, second = arrays(ours), arrays(alone)
    assert first.keys() == second.keys()
    for name, array in second.items():
        tolerance = TOLERANCE[array.dtype.name] if by_type else 1e-13
        np.testing.assert_allclose(first[name], array, rtol=tolerance, atol=tolerance / 10)
    ids = ("request_id",)
    theirs = {name: value for name, value in alone["metadata"].items() if name not in ids}
    assert {name: value for name, value in ours["metadata"].items() if name not in ids} == theirs


@pytest.fixture(scope="module", params=[INLINE, WORKER], ids=["inline", "worker"])
def batching(request: pytest.FixtureRequest) -> Iterator[BatchingService]:
    blocked = BlockedLoop(app(batch_window=WINDOW, **request.param))
    with serving(blocked) as client:
        yield BatchingService(client, blocked)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_batch_gives_the_same_results_as_single_requests(
    batching: BatchingService, client: httpx.Client, backend: str
) -> None:
    include = ["attention_weights", "logsumexp", "received"]
    bodies = [request(seed, backend=backend, include=include) for seed in range(40)]
    assert batching.client.post("/attention", json=bodies[0]).is_success  # which has the backend loaded
    before = samples(batching.client)
    answers = [Answer(connection) for connection in batching.all_at_once(bodies)]
    after = samples(batching.client)
    for body, answer in zip(bodies, answers, strict=True):
        assert_same(answer.body, client.post("/attention", json=body).json())
    assert max(answer.batch for answer in answers) >= 10
    names = ("attention_batches_total", "attention_batched_requests_total")
    batches, requests = (after[name] - before[name] for name in names)
    assert 1 <= batches <= requests / 2
    assert requests == sum(answer.batch > 1 for answer in answers)


@pytest.mark.parametrize("backend", BACKENDS)
def test_requests_with_different_options_do_not_share_a_batch(
    batching: BatchingService, client: httpx.Client, backend: str
) -> None:
    options: list[dict[str, Any]] = [
        {"q": 3},
        {"q": 7},
        {"q": 7, "d": 6, "num_heads": 2, "num_kv_heads": 2},
        {"q": 7, "scale": 0.25},
        {"q": 7, "layout": "dl", "query_lengths": 3},
        {"q": 4, "dtype": "float16", "top_k": 2},
        {"q": 4, "query_offset": -1, "softcap": 2.0},
    ]
    bodies = [request(seed, backend=backend, **options[seed % len(options)]) for seed in range(42)]
    answers = [Answer(connection) for connection in batching.all_at_once(bodies)]
    for body, answer in zip(bodies, answers, strict=True):
        assert_same(answer.body, client.post("/attention", json=body).json())
        assert answer.batch <= 6
    assert sum(answer.batch > 1 for answer in answers) > 20


EVERYTHING = ["attention_weights", "scores", "masked_scores", "hidden_by", "logsumexp", "entropy", "received", "query",
              "key", "value", "present_key", "head_outputs"]  # fmt: skip
# Numbers of queries and keys, and masking options.
LENGTHS: list[tuple[int, int, dict[str, Any]]] = [
    (5, 7, {}),
    (6, 6, {"is_causal": True}),
    (8, 5, {"query_lengths": 5}),
    (7, 8, {"key_lengths": 2}),
    (5, 5, {"is_causal": True, "query_offset": -2}),
    (8, 6, {"is_causal": True, "query_offset": 3, "key_lengths": 0}),
]
OPTIONS: dict[str, dict[str, Any]] = {
    "everything": {"include": EVERYTHING, "softcap": 3.0},
    "top_k": {"include": ["attention_weights"], "top_k": 3},
    "no scores": {"include": []},
    "tokens as columns": {"include": EVERYTHING, "layout": "dl"},
    "halves": {"include": EVERYTHING, "dtype": "bfloat16"},
    "groups": {"include": [*EVERYTHING, "present_value"], "num_heads": 4, "num_kv_heads": 2},
    "an average": {"include": ["attention_weights", "received"], "num_heads": 2, "average_heads": True},
}


def request_of_length(seed: int, **options: Any) -> dict[str, Any]:
    """A request that may share a batch with all others of these options and lengths; the seed chooses the lengths."""
    random = np.random.default_rng(seed)
    q, k, hiding = LENGTHS[seed % len(LENGTHS)]
    features = 8 // options.get("num_heads", 1) * options.get("num_kv_heads", options.get("num_heads", 1))
    made = {"query": random.normal(size=(q, 8)), "key": random.normal(size=(k, features))}
    made["value"] = random.normal(size=(k, features))
    turned = {name: array.T if options.get("layout") == "dl" else array for name, array in made.items()}
    return {name: encode(np.ascontiguousarray(array)) for name, array in turned.items()} | hiding | options


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_batch_gives_every_output_of_single_requests(
    batching: BatchingService, client: httpx.Client, backend: str, option: str
) -> None:
    bodies = [request_of_length(seed, backend=backend, encoding="base64", **OPTIONS[option]) for seed in range(30)]
    answers = [Answer(connection) for connection in batching.all_at_once(bodies)]
    for body, answer in zip(bodies, answers, strict=True):
        assert_same(answer.body, client.post("/attention", json=body).json(), by_type=option == "halves")
    assert max(answer.batch for answer in answers) >= 3


def test_requests_with_arrays_or_sums_as_options_are_not_batched(batching: BatchingService) -> None:
    """Masks and other options that are arrays, windows, sums that may be 0, and requests on NumPy's small path."""
    others: list[dict[str, Any]] = [
        {"mask": [True, True, True, True, False]},
        {"window": {"left": 1}},
        {"normalization": "sum"},
        {"is_causal": False},
    ]
    bodies = [request(seed) | others[seed % len(others)] for seed in range(16)]
    answers = [Answer(connection) for connection in batching.all_at_once(bodies)]
    assert {answer.batch for answer in answers} == {1}


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_error_of_one_request_does_not_affect_its_batch(
    batching: BatchingService, client: httpx.Client, backend: str
) -> None:
    """An overflow of scores is found while the batch is computed, an infinite number before."""
    bodies = [request(seed, backend=backend) for seed in range(20)]
    bodies[3]["query"] = bodies[3]["key"] = encode(np.full((5, 4), 1e200))
    bodies[7]["value"] = encode(np.full((5, 4), np.inf))
    answers = [Answer(connection) for connection in batching.all_at_once(bodies)]
    for place, (body, answer) in enumerate(zip(bodies, answers, strict=True)):
        alone = client.post("/attention", json=body)
        assert answer.status == alone.status_code == (422 if place in (3, 7) else 200)
        if answer.status == 200:
            assert_same(answer.body, alone.json())
    assert [answers[place].body["code"] for place in (3, 7)] == ["overflow", "invalid_array"]
    assert answers[7].body["errors"][0]["pointer"].startswith("/value/0/0")


def test_a_client_that_disconnects_does_not_affect_its_batch(batching: BatchingService, client: httpx.Client) -> None:
    bodies = [request(seed) for seed in range(30)]
    connections = batching.all_at_once(bodies)
    for connection in connections[::3]:
        connection.close()
    for place, (body, connection) in enumerate(zip(bodies, connections, strict=True)):
        if place % 3:
            assert_same(Answer(connection).body, client.post("/attention", json=body).json())
    until(lambda: samples(batching.client)["attention_requests_in_flight"] == 1)  # the request for /metrics itself


def test_all_requests_of_a_batch_beyond_the_time_limit_get_a_504() -> None:
    with serving(app(batch_window=WINDOW, time_limit=1e-9)) as client:
        answers = [Answer(send(connect(client), request(seed))) for seed in range(5)]
    assert {(answer.status, answer.body["code"]) for answer in answers} == {(504, "time_limit")}


def test_consecutive_requests_do_not_wait_for_a_batch(batching: BatchingService) -> None:
    """Requests wait for the batch window only while others are computed."""
    for seed in range(20):
        response = batching.client.post("/attention", json=request(seed))
        assert "batch" not in response.headers["server-timing"]
