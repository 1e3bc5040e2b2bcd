"""Dynamic batching: results, errors and deadlines of a request do not depend on the other requests of its batch."""

from __future__ import annotations

import asyncio
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

from attention_service.attention.plan import Plan
from attention_service.attention.result import Result
from attention_service.backends.base import no_check
from attention_service.backends.numpy.backend import NumpyBackend
from attention_service.codecs.decoded import Decoded
from attention_service.codecs.table import CODECS
from attention_service.codecs.typed_arrays import decode
from attention_service.errors import Busy, InvalidArray, Overflow, TimeLimit
from attention_service.pipeline.admission import AdmissionController, Lease
from attention_service.pipeline.deadline import Cancelled, Deadline
from attention_service.pipeline.engine import Engine
from attention_service.pipeline.execution import Execution
from attention_service.pipeline.prepare import make_spec_and_plan
from attention_service.pipeline.run import admit, compute
from attention_service.settings import Settings
from tests.conftest import app, serving
from tests.helpers.backends import BACKENDS
from tests.helpers.virtual_time import run
from tests.helpers.waiting import turns, until, until_async
from tests.helpers.wire import typed_array as encode
from tests.test_observability import samples

# Options that keep NumPy from taking its path for small requests.
CAUSAL: dict[str, Any] = {"is_causal": True, "encoding": "base64"}
WINDOW = 0.05


def request(seed: int, q: int = 5, d: int = 4, **options: Any) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    arrays = {name: encode(random.normal(size=(q, d))) for name in ("query", "key", "value")}
    return arrays | CAUSAL | options


# Over HTTP: requests arrive while the event loop is blocked, so that they form a batch, which is computed inline or in
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

    async def main() -> float:
        with_batches = engine(inline_flops=10**9)
        for seed in range(20):
            await attend(with_batches, [decoded(seed)])
        return asyncio.get_running_loop().time()

    assert run(main()) == 0


# Within one iteration of an event loop, so that the batches are deterministic.

anyio = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def new_execution(seconds: float = 60) -> Execution:
    call = Execution(AdmissionController(1, 2**30, 0), seconds)
    call.timings.begin()
    return call


async def occupy(engine: Engine) -> Lease:
    """A lease that holds a slot."""
    lease = Lease(engine.admission)
    await lease.grow(1, Deadline(60), slot=True)
    return lease


def decoded(seed: int, tokens: int = 5, **options: Any) -> Decoded:
    random = np.random.default_rng(seed)
    fields = {name: random.normal(size=(tokens, 4)) for name in ("query", "key", "value")}
    return Decoded(fields | {"is_causal": True} | options, frozenset())


def plan_of(decoded: Decoded) -> Plan:
    return make_spec_and_plan(decoded)[1]


def engine(**settings: Any) -> Engine:
    return Engine(Settings.model_construct(**{"batch_window": 60.0} | settings))


def peak_bytes(decoded: Decoded) -> int:
    """The estimated peak memory of computing a request with NumPy, in bytes."""
    return NumpyBackend().peak_bytes(plan_of(decoded), "cpu")


async def attend_one(engine: Engine, decoded: Decoded, call: Execution) -> Result:
    operation = engine.attention
    request = operation.prepare(decoded)
    cost = operation.cost(request, CODECS["application/json"])
    strategy = await admit(operation, request, cost, decoded, engine.settings.inline_flops, call)
    result = await compute(operation, request, cost, strategy, call)
    call.lease.release_slot()
    return result


def attend_alone(decoded: Decoded) -> Result:
    attention = engine(batch_window=0.0).attention
    return attention.compute(attention.prepare(decoded), no_check)


async def attend(
    engine: Engine, inputs: list[Decoded], calls: list[Execution] | None = None
) -> list[Result | BaseException]:
    calls = [new_execution() for _ in inputs] if calls is None else calls
    tasks = (attend_one(engine, decoded, call) for decoded, call in zip(inputs, calls, strict=True))
    return await asyncio.gather(*tasks, return_exceptions=True)


def assert_same_as_single(results: list[Result | BaseException], inputs: list[Decoded]) -> None:
    for result, decoded in zip(results, inputs, strict=True):
        assert isinstance(result, Result)
        np.testing.assert_allclose(result.output, attend_alone(decoded).output, rtol=1e-13, atol=1e-15)


def test_nothing_is_batched_unless_a_window_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU neither."""
    monkeypatch.setattr(NumpyBackend, "is_gpu", lambda *given: True)
    assert Engine(Settings.model_construct()).batcher is None
    assert Engine(Settings.model_construct(batch_window=0.002)).batcher is not None


@anyio
@pytest.mark.parametrize("inline_flops", [1000, 10**9], ids=["worker", "inline"])
async def test_requests_of_one_loop_iteration_share_a_batch(inline_flops: int) -> None:
    inputs, calls = [decoded(seed) for seed in range(9)], [new_execution() for _ in range(9)]
    with_batches, batches = engine(inline_flops=inline_flops), list[int]()
    assert with_batches.batcher is not None
    with_batches.batcher.on_batch = batches.append
    assert_same_as_single(await attend(with_batches, inputs, calls), inputs)
    assert [call.timings.batch for call in calls] == [9] * 9
    assert batches == [9]
    assert (with_batches.admission.slots_taken, with_batches.admission.free) == (0, with_batches.admission.memory)


@anyio
async def test_requests_wait_for_a_running_batch_or_the_window() -> None:
    with_batches = engine(inline_flops=1000, concurrency=1)
    lease = await occupy(with_batches)
    calls = [new_execution() for _ in range(4)]
    first = asyncio.create_task(attend(with_batches, [decoded(0), decoded(1)], calls[:2]))
    await turns()  # they wait for the slot
    assert with_batches.admission.waiting == 1
    second = asyncio.create_task(attend(with_batches, [decoded(2)], calls[2:3]))
    await turns()
    third = asyncio.create_task(attend(with_batches, [decoded(3)], calls[3:]))
    await turns()
    assert not any(task.done() for task in (first, second, third))
    lease.release()
    assert_same_as_single([*await first, *await second, *await third], [decoded(seed) for seed in range(4)])
    assert [call.timings.batch for call in calls] == [2, 2, 2, 2]

    hurried = engine(inline_flops=1000, concurrency=1, batch_window=0.02)
    lease = await occupy(hurried)
    calls = [new_execution() for _ in range(4)]
    first = asyncio.create_task(attend(hurried, [decoded(0), decoded(1)], calls[:2]))
    await turns()
    second = asyncio.create_task(attend(hurried, [decoded(2), decoded(3)], calls[2:]))
    # The second batch waits for the window, and then for a slot.
    await until_async(lambda: hurried.admission.waiting == 2)
    fifth = await attend(hurried, [decoded(4)])  # a single request is too small to need a slot
    lease.release()
    assert_same_as_single([*await first, *await second, *fifth], [decoded(seed) for seed in range(5)])


@anyio
@pytest.mark.parametrize("inline_flops", [1000, 10**9], ids=["worker", "inline"])
async def test_each_request_of_a_batch_gets_its_own_error(inline_flops: int) -> None:
    inputs = [decoded(seed) for seed in range(6)]
    inputs[1].fields["query"][:], inputs[1].fields["key"][:] = 1e200, 1e200
    inputs[2].fields["value"][1, 3] = np.nan
    calls = [new_execution() for _ in range(6)]
    calls[3], calls[4] = new_execution(0), new_execution()
    assert calls[3].deadline.left == 0
    calls[4].deadline.cancelled = True
    results = await attend(engine(inline_flops=inline_flops), inputs, calls)
    kinds = [type(result) for result in results]
    assert kinds == [Result, Overflow, InvalidArray, TimeLimit, Cancelled, Result]
    assert_same_as_single([results[0], results[5]], [inputs[0], inputs[5]])


@anyio
async def test_a_request_cancelled_before_its_batch_starts_is_not_computed() -> None:
    with_batches = engine(inline_flops=1000, concurrency=1)
    lease = await occupy(with_batches)
    inputs, calls = [decoded(seed) for seed in range(3)], [new_execution() for _ in range(3)]
    waiting = asyncio.create_task(attend(with_batches, inputs, calls))
    await turns()
    calls[1].deadline.cancel()
    await turns()
    lease.release()
    results = await waiting
    assert isinstance(results[1], Cancelled)
    assert_same_as_single([results[0], results[2]], [inputs[0], inputs[2]])
    assert [call.timings.batch for call in calls] == [2, 1, 2]


@anyio
async def test_a_batch_whose_requests_are_all_cancelled_releases_its_slot() -> None:
    with_batches = engine(inline_flops=1000, concurrency=1)
    lease = await occupy(with_batches)
    calls = [new_execution() for _ in range(3)]
    waiting = asyncio.create_task(attend(with_batches, [decoded(seed) for seed in range(3)], calls))
    await turns()
    for call in calls:
        call.deadline.cancel()
    lease.release()
    assert [type(result) for result in await waiting] == [Cancelled] * 3
    assert_same_as_single(await attend(with_batches, [decoded(7)]), [decoded(7)])
    assert with_batches.admission.slots_taken == 0


@anyio
async def test_cancelling_a_task_does_not_affect_its_batch() -> None:
    with_batches = engine(inline_flops=1000, concurrency=1)
    with await occupy(with_batches):
        task, other = (
            asyncio.create_task(attend_one(with_batches, decoded(seed), new_execution())) for seed in range(2)
        )
        await turns()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert_same_as_single([await other], [decoded(1)])


@anyio
async def test_a_full_queue_refuses_all_requests_of_a_batch() -> None:
    with_batches = engine(inline_flops=1000, concurrency=1, queue=0)
    with await occupy(with_batches):
        results = await attend(with_batches, [decoded(seed) for seed in range(3)])
    assert [type(result) for result in results] == [Busy] * 3


@anyio
async def test_a_batch_stays_within_the_memory_limit() -> None:
    inputs, calls = [decoded(seed) for seed in range(30)], [new_execution() for _ in range(30)]
    limit = peak_bytes(inputs[0]) * 8 + 1
    for inline_flops in (1000, 10**9):
        small = engine(inline_flops=inline_flops, memory_limit=limit)
        assert_same_as_single(await attend(small, inputs, calls), inputs)
        assert {call.timings.batch for call in calls} == {8, 6}
        assert small.admission.free == small.admission.memory


def batchable_requests(seed: int) -> list[Decoded]:
    """Twelve requests that may share a batch, with a random layout, batch size, lengths and masking."""
    random = np.random.default_rng(seed)
    layout, groups = str(random.choice(["ld", "dl", "bld", "bhld", "hld"])), int(random.integers(1, 3))
    heads, d, e = groups * int(random.integers(1, 3)), *map(int, random.integers(1, 6, 2))
    b, q, k = map(int, random.integers((1, 1, 2), (4, 9, 9)))
    common: dict[str, Any] = {"layout": layout, "include": [name for name in EVERYTHING if random.random() < 0.5]}
    if "h" not in layout:
        common |= {"num_heads": heads, "num_kv_heads": groups}
    if "attention_weights" in common["include"]:
        is_average = "hidden_by" not in common["include"] and random.random() < 0.3
        common |= {"average_heads": bool(is_average)}
        common |= {"top_k": 2} if random.random() < 0.3 else {}

    if random.random() < 0.4:
        common |= {"is_causal": True, "query_offset": int(random.integers(-4, 6))}
    for name, length in (("query_lengths", q), ("key_lengths", k)):
        common |= {name: int(random.integers(0, length + 1))} if random.random() < 0.3 else {}

    def one() -> Decoded:
        def array(h: int, length: int, features: int) -> np.ndarray:
            sizes = {"b": b, "h": h, "l": length, "d": features if "h" in layout else h * features}
            return random.normal(size=[sizes[axis] for axis in layout])

        arrays = {"query": array(heads, q, d), "key": array(groups, k, d), "value": array(groups, k, e)}
        return Decoded(arrays | common, frozenset())

    return [one() for _ in range(12)]


@pytest.mark.slow
@anyio
async def test_random_batches_give_the_results_of_single_requests() -> None:
    batched = 0
    for seed in range(40):
        inputs, calls = batchable_requests(seed), [new_execution() for _ in range(12)]
        results = await attend(engine(inline_flops=10**9), inputs, calls)
        batched += sum(call.timings.batch > 1 for call in calls)
        for decoded, result in zip(inputs, results, strict=True):
            assert isinstance(result, Result)
            alone = attend_alone(decoded)
            ours, theirs = flat(result.arrays), flat(alone.arrays)
            assert ours.keys() == theirs.keys()
            for name, array in theirs.items():
                assert (ours[name].shape, ours[name].dtype) == (array.shape, array.dtype)
                np.testing.assert_allclose(ours[name], array, rtol=1e-12, atol=1e-13, err_msg=f"{seed} {name}")
            assert result.metadata._replace(kernel="") == alone.metadata._replace(kernel="")
    assert batched > 400


@anyio
async def test_requests_of_a_batch_that_runs_out_of_memory_are_computed_singly(monkeypatch: pytest.MonkeyPatch) -> None:
    execute = NumpyBackend.execute

    def short_of_memory(self: NumpyBackend, plan: Any, *given: Any) -> Any:
        if plan.sizes.batch_size > 1:
            raise MemoryError
        return execute(self, plan, *given)

    monkeypatch.setattr(NumpyBackend, "execute", short_of_memory)
    inputs, with_batches, batches = [decoded(seed) for seed in range(4)], engine(), list[int]()
    assert with_batches.batcher is not None
    with_batches.batcher.on_batch = batches.append
    assert_same_as_single(await attend(with_batches, inputs), inputs)
    assert batches == []


@anyio
@pytest.mark.parametrize("cancelled", [1, 3])
async def test_a_batch_is_cancelled_only_if_all_its_requests_are(
    cancelled: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch with a remaining request is computed; without one, its computation stops."""
    execute, loop = NumpyBackend.execute, asyncio.get_running_loop()
    inputs, calls = [decoded(seed) for seed in range(3)], [new_execution() for _ in range(3)]

    def leave(call: Execution) -> None:
        call.deadline.cancel()

    def slow(self: NumpyBackend, plan: Any, operands: Any, device: str, check: Any) -> Any:
        for call in calls[:cancelled]:
            loop.call_soon_threadsafe(leave, call)
        until(lambda: all(call.deadline.cancelled for call in calls[:cancelled]))
        check()
        return execute(self, plan, operands, device, check)

    monkeypatch.setattr(NumpyBackend, "execute", slow)
    results = await attend(engine(inline_flops=1000), inputs, calls)
    assert [isinstance(result, Cancelled) for result in results] == [True] * cancelled + [False] * (3 - cancelled)
    monkeypatch.undo()
    assert_same_as_single(results[cancelled:], inputs[cancelled:])
