"""Small requests computed together: nobody's answer, error or patience may depend on who else is there."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPResponse
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from service.attention.plan import Plan
from service.attention.result import Result
from service.backends.numpy.backend import NumpyBackend
from service.codecs import CODECS
from service.codecs.decoded import Decoded
from service.codecs.typed_arrays import decode
from service.errors import Busy, InvalidArray, Overflow, TimeLimit
from service.pipeline.admission import AdmissionController, Lease
from service.pipeline.admit import admit
from service.pipeline.compute import compute
from service.pipeline.deadline import Cancelled, Deadline
from service.pipeline.engine import Engine
from service.pipeline.execute import execute
from service.pipeline.execution import Execution
from service.pipeline.prepare import make_spec_and_plan
from service.settings import Settings
from tests.backends import BACKENDS
from tests.conftest import app, serving
from tests.test_watching import samples
from tests.wire import typed_array as encode

# Requests that NumPy would not answer at once anyway.
CAUSAL: dict[str, Any] = {"is_causal": True, "encoding": "base64"}
WINDOW = 0.05


def request(seed: int, q: int = 5, d: int = 4, **options: Any) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    arrays = {name: encode(random.normal(size=(q, d))) for name in ("query", "key", "value")}
    return arrays | CAUSAL | options


# Over HTTP: requests come while the event loop does something else, so that they are at hand together, and others are
# computed in it or at the only place beside it.

BLOCKER: dict[str, Any] = {"input": encode(np.ones((10_000, 1))), "normalization": "sum", "include": []}
INLINE, BESIDE = {"inline_flops": 10**10}, {"inline_flops": 5000, "concurrency": 1}


class Answer:
    """One answer, read to its end."""

    def __init__(self, connection: socket.socket) -> None:
        with connection, HTTPResponse(connection, method="POST") as response:
            response.begin()
            self.status, self.headers = response.status, response.headers
            self.body: dict[str, Any] = json.loads(response.read())

    @property
    def batch(self) -> int:
        """How many were computed together."""
        found = re.search(r'batch;desc="(\d+)"', self.headers["server-timing"])
        return int(found[1]) if found else 1


def connect(client: httpx.Client) -> socket.socket:
    return socket.create_connection((client.base_url.host, client.base_url.port or 80), 30)


def send(connection: socket.socket, body: dict[str, Any]) -> socket.socket:
    content = json.dumps(body).encode()
    head = f"POST /attention HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    connection.sendall(f"{head}\r\nConnection: close\r\n\r\n".encode() + content)
    return connection


class Held:
    """A service whose event loop stands still from a request for /hold until it may go on."""

    def __init__(self, service: ASGIApp) -> None:
        self._service = service
        self.stands, self.may_go_on = threading.Event(), threading.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("path") == "/hold":
            self.stands.set()
            self.may_go_on.wait(30)
        await self._service(scope, receive, send)

    @contextmanager
    def hold(self, client: httpx.Client) -> Iterator[None]:
        self.stands.clear()
        self.may_go_on.clear()
        with connect(client) as connection:
            connection.sendall(b"GET /hold HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            assert self.stands.wait(30)
            try:
                yield
            finally:
                self.may_go_on.set()
            assert connection.recv(12) == b"HTTP/1.1 404"


class Gathering(NamedTuple):
    """A service that gathers, and its client."""

    client: httpx.Client
    held: Held

    def all_at_once(self, bodies: list[dict[str, Any]]) -> list[socket.socket]:
        """Connections with these requests, which come in one turn of the loop."""
        connections = [connect(self.client) for _ in bodies]
        assert self.client.get("/health/live").status_code == 200  # they are accepted, as this one came later
        with self.held.hold(self.client):
            blocker = send(connect(self.client), BLOCKER)
            for connection, body in zip(connections, bodies, strict=True):
                send(connection, body)
        assert Answer(blocker).status == 200
        return connections


def flat(fields: dict[str, Any]) -> dict[str, Any]:
    """All arrays of an answer, top_weights as two."""
    top = {f"top_weights/{name}": array for name, array in fields.get("top_weights", {}).items()}
    return {name: array for name, array in fields.items() if name not in ("metadata", "top_weights")} | top


def arrays(answer: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: decode(value, "") for name, value in flat(answer).items()}


# Of halves: one in the last place that is returned.
TOLERANCE = {"float64": 1e-13, "float32": 2e-6, "bfloat16": 2.0**-7, "int64": 0.0}


def assert_same(ours: dict[str, Any], alone: dict[str, Any], *, by_type: bool = False) -> None:
    """Within what float64 allows for another order of sums, or each array's type; the metadata to the last letter."""
    first, second = arrays(ours), arrays(alone)
    assert first.keys() == second.keys()
    for name, array in second.items():
        tolerance = TOLERANCE[array.dtype.name] if by_type else 1e-13
        np.testing.assert_allclose(first[name], array, rtol=tolerance, atol=tolerance / 10)
    ids = ("request_id",)
    theirs = {name: value for name, value in alone["metadata"].items() if name not in ids}
    assert {name: value for name, value in ours["metadata"].items() if name not in ids} == theirs


@pytest.fixture(scope="module", params=[INLINE, BESIDE], ids=["inline", "beside"])
def gathering(request: pytest.FixtureRequest) -> Iterator[Gathering]:
    held = Held(app(batch_window=WINDOW, experimental=frozenset({"padding"}), **request.param))
    with serving(held) as client:
        yield Gathering(client, held)


@pytest.mark.parametrize("backend", BACKENDS)
def test_answers_are_those_of_requests_by_themselves(gathering: Gathering, client: httpx.Client, backend: str) -> None:
    include = ["attention_weights", "logsumexp", "received"]
    bodies = [request(seed, backend=backend, include=include) for seed in range(40)]
    before = samples(gathering.client)
    answers = [Answer(connection) for connection in gathering.all_at_once(bodies)]
    after = samples(gathering.client)
    for body, answer in zip(bodies, answers, strict=True):
        assert_same(answer.body, client.post("/attention", json=body).json())
    assert max(answer.batch for answer in answers) >= 10
    names = ("attention_batches_total", "attention_batched_requests_total")
    batches, requests = (after[name] - before[name] for name in names)
    assert 1 <= batches <= requests / 2
    assert requests == sum(answer.batch > 1 for answer in answers)


@pytest.mark.parametrize("backend", BACKENDS)
def test_kinds_do_not_mix(gathering: Gathering, client: httpx.Client, backend: str) -> None:
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
    answers = [Answer(connection) for connection in gathering.all_at_once(bodies)]
    for body, answer in zip(bodies, answers, strict=True):
        assert_same(answer.body, client.post("/attention", json=body).json())
        assert answer.batch <= 6
    assert sum(answer.batch > 1 for answer in answers) > 20


EVERYTHING = ["attention_weights", "scores", "masked_scores", "logsumexp", "entropy", "received", "query", "key",
              "value", "present_key", "head_outputs"]  # fmt: skip
# One kind, though they have so many queries and keys, and what each hides differs beside that.
LENGTHS: list[tuple[int, int, dict[str, Any]]] = [
    (5, 7, {}),
    (6, 6, {"is_causal": True}),
    (8, 5, {"query_lengths": 5}),
    (7, 8, {"key_lengths": 2}),
    (5, 5, {"is_causal": True, "query_offset": -2}),
    (8, 6, {"is_causal": True, "query_offset": 3, "key_lengths": 0}),
]
WAYS: dict[str, dict[str, Any]] = {
    "everything": {"include": EVERYTHING, "softcap": 3.0},
    "top_k": {"include": ["attention_weights"], "top_k": 3},
    "no scores": {"include": []},
    "tokens as columns": {"include": EVERYTHING, "layout": "dl"},
    "halves": {"include": EVERYTHING, "dtype": "bfloat16"},
    "groups": {"include": [*EVERYTHING, "present_value"], "num_heads": 4, "num_kv_heads": 2},
    "an average": {"include": ["attention_weights", "received"], "num_heads": 2, "average_heads": True},
}


def of_lengths(seed: int, **options: Any) -> dict[str, Any]:
    """A request of one kind with all others that have these options."""
    random = np.random.default_rng(seed)
    q, k, hiding = LENGTHS[seed % len(LENGTHS)]
    features = 8 // options.get("num_heads", 1) * options.get("num_kv_heads", options.get("num_heads", 1))
    made = {"query": random.normal(size=(q, 8)), "key": random.normal(size=(k, features))}
    made["value"] = random.normal(size=(k, features))
    turned = {name: array.T if options.get("layout") == "dl" else array for name, array in made.items()}
    return {name: encode(np.ascontiguousarray(array)) for name, array in turned.items()} | hiding | options


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_who_is_shorter_is_filled_up(gathering: Gathering, client: httpx.Client, backend: str, way: str) -> None:
    bodies = [of_lengths(seed, backend=backend, encoding="base64", **WAYS[way]) for seed in range(30)]
    answers = [Answer(connection) for connection in gathering.all_at_once(bodies)]
    for body, answer in zip(bodies, answers, strict=True):
        assert_same(answer.body, client.post("/attention", json=body).json(), by_type=way == "halves")
    assert max(answer.batch for answer in answers) >= 20


def test_what_differs_beyond_numbers_is_not_gathered(gathering: Gathering) -> None:
    """Masks, labels per row and whatever else is an array; sums, of which one may be 0; what is answered at once."""
    others: list[dict[str, Any]] = [
        {"mask": [True, True, True, True, False]},
        {"window": {"left": 1}},
        {"normalization": "sum"},
        {"is_causal": False},
    ]
    bodies = [request(seed) | others[seed % len(others)] for seed in range(16)]
    answers = [Answer(connection) for connection in gathering.all_at_once(bodies)]
    assert {answer.batch for answer in answers} == {1}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_wrong_request_is_wrong_alone(gathering: Gathering, client: httpx.Client, backend: str) -> None:
    """Scores that overflow are found when all are computed, a number that is none before."""
    bodies = [request(seed, backend=backend) for seed in range(20)]
    bodies[3]["query"] = bodies[3]["key"] = encode(np.full((5, 4), 1e200))
    bodies[7]["value"] = encode(np.full((5, 4), np.inf))
    answers = [Answer(connection) for connection in gathering.all_at_once(bodies)]
    for place, (body, answer) in enumerate(zip(bodies, answers, strict=True)):
        alone = client.post("/attention", json=body)
        assert answer.status == alone.status_code == (422 if place in (3, 7) else 200)
        if answer.status == 200:
            assert_same(answer.body, alone.json())
    assert [answers[place].body["code"] for place in (3, 7)] == ["overflow", "invalid_array"]
    assert answers[7].body["errors"][0]["pointer"].startswith("/value/0/0")


def test_who_hangs_up_does_not_take_others_along(gathering: Gathering, client: httpx.Client) -> None:
    bodies = [request(seed) for seed in range(30)]
    connections = gathering.all_at_once(bodies)
    for connection in connections[::3]:
        connection.close()
    for place, (body, connection) in enumerate(zip(bodies, connections, strict=True)):
        if place % 3:
            assert_same(Answer(connection).body, client.post("/attention", json=body).json())
    assert samples(gathering.client)["attention_requests_in_flight"] == 1, "this one"


def test_time_is_over_for_all_of_a_batch_when_it_is_over() -> None:
    with serving(app(batch_window=WINDOW, time_limit=1e-9)) as client:
        answers = [Answer(send(connect(client), request(seed))) for seed in range(5)]
    assert {(answer.status, answer.body["code"]) for answer in answers} == {(504, "time_limit")}


def test_one_after_the_other_nobody_waits(gathering: Gathering) -> None:
    """The window is for those who come while others are at work."""
    start = time.monotonic()
    for seed in range(20):
        response = gathering.client.post("/attention", json=request(seed))
        assert "batch" not in response.headers["server-timing"]
    assert time.monotonic() - start < 20 * WINDOW


# Within one turn of an event loop, so that it is certain who is together.

anyio = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def fresh(seconds: float = 60) -> Execution:
    call = Execution(AdmissionController(1, 2**30, 0), seconds)
    call.timings.begin()
    return call


async def occupy(engine: Engine) -> Lease:
    """Take a slot."""
    lease = engine.admission.admit(1)
    await lease.grow(1, Deadline(60), slot=True)
    return lease


def job(seed: int, tokens: int = 5, **options: Any) -> Decoded:
    random = np.random.default_rng(seed)
    fields = {name: random.normal(size=(tokens, 4)) for name in ("query", "key", "value")}
    return Decoded(fields | {"is_causal": True} | options, frozenset())


def plan_of(job: Decoded) -> Plan:
    return make_spec_and_plan(job)[1]


def engine(**settings: Any) -> Engine:
    defaults: dict[str, Any] = {"batch_window": 60.0, "experimental": frozenset({"padding"})}
    return Engine(Settings.model_construct(**defaults | settings))


def peak_bytes(job: Decoded) -> int:
    """What computing a request by NumPy takes, of memory."""
    return NumpyBackend().peak_bytes(plan_of(job), "cpu")


async def attend_one(engine: Engine, job: Decoded, call: Execution) -> Result:
    request = engine.plans.prepare(job)
    return await compute(request, await admit(request, CODECS["application/json"], call), engine.batcher, call)


def attend_alone(job: Decoded) -> Result:
    return execute(engine(batch_window=0.0).plans.prepare(job))


async def attend(
    engine: Engine, jobs: list[Decoded], calls: list[Execution] | None = None
) -> list[Result | BaseException]:
    calls = [fresh() for _ in jobs] if calls is None else calls
    tasks = (attend_one(engine, job, call) for job, call in zip(jobs, calls, strict=True))
    return await asyncio.gather(*tasks, return_exceptions=True)


def assert_right(results: list[Result | BaseException], jobs: list[Decoded]) -> None:
    for result, job in zip(results, jobs, strict=True):
        assert isinstance(result, Result)
        np.testing.assert_allclose(result.output, attend_alone(job).output, rtol=1e-13, atol=1e-15)


@anyio
@pytest.mark.parametrize("inline_flops", [1000, 10**9], ids=["beside", "inline"])
async def test_who_comes_in_one_turn_goes_together(inline_flops: int) -> None:
    jobs, calls = [job(seed) for seed in range(9)], [fresh() for _ in range(9)]
    with_batches, batches = engine(inline_flops=inline_flops), list[int]()
    assert with_batches.batcher is not None
    with_batches.batcher.on_batch = batches.append
    assert_right(await attend(with_batches, jobs, calls), jobs)
    assert [call.timings.batch for call in calls] == [9] * 9
    assert batches == [9]
    assert (with_batches.admission.slots_taken, with_batches.admission.free) == (0, with_batches.admission.memory)


@anyio
async def test_who_comes_while_others_are_at_work_waits_for_them_or_the_window() -> None:
    with_batches = engine(inline_flops=1000, concurrency=1)
    permit = await occupy(with_batches)
    calls = [fresh() for _ in range(4)]
    first = asyncio.create_task(attend(with_batches, [job(0), job(1)], calls[:2]))
    await asyncio.sleep(0.01)  # they wait for the place, and so are at work
    second = asyncio.create_task(attend(with_batches, [job(2)], calls[2:3]))
    await asyncio.sleep(0.01)
    third = asyncio.create_task(attend(with_batches, [job(3)], calls[3:]))
    await asyncio.sleep(0.05)
    assert not any(task.done() for task in (first, second, third))
    permit.release()
    assert_right([*await first, *await second, *await third], [job(seed) for seed in range(4)])
    assert [call.timings.batch for call in calls] == [2, 2, 2, 2]

    hurried = engine(inline_flops=1000, concurrency=1, batch_window=0.02)
    permit = await occupy(hurried)
    calls = [fresh() for _ in range(4)]
    first = asyncio.create_task(attend(hurried, [job(0), job(1)], calls[:2]))
    await asyncio.sleep(0.01)
    second = asyncio.create_task(attend(hurried, [job(2), job(3)], calls[2:]))
    await asyncio.sleep(0.1)
    assert hurried.admission.waiting == 2  # the second have waited for the window, and ask for a place by themselves
    third = asyncio.create_task(attend(hurried, [job(4)]))
    await asyncio.sleep(0.1)
    assert third.done()  # by itself it is too small to need one
    permit.release()
    assert_right([*await first, *await second, *await third], [job(seed) for seed in range(5)])


@anyio
@pytest.mark.parametrize("inline_flops", [1000, 10**9], ids=["beside", "inline"])
async def test_each_has_its_own_error(inline_flops: int) -> None:
    jobs = [job(seed) for seed in range(6)]
    jobs[1].fields["query"][:], jobs[1].fields["key"][:] = 1e200, 1e200
    jobs[2].fields["value"][1, 3] = np.nan
    calls = [fresh() for _ in range(6)]
    calls[3], calls[4] = fresh(0), fresh()
    assert calls[3].deadline.left == 0
    calls[4].deadline.cancelled = True
    results = await attend(engine(inline_flops=inline_flops), jobs, calls)
    kinds = [type(result) for result in results]
    assert kinds == [Result, Overflow, InvalidArray, TimeLimit, Cancelled, Result]
    assert_right([results[0], results[5]], [jobs[0], jobs[5]])


@anyio
async def test_who_leaves_before_it_begins_is_not_computed() -> None:
    with_batches = engine(inline_flops=1000, concurrency=1)
    permit = await occupy(with_batches)
    jobs, calls = [job(seed) for seed in range(3)], [fresh() for _ in range(3)]
    waiting = asyncio.create_task(attend(with_batches, jobs, calls))
    await asyncio.sleep(0.01)
    calls[1].deadline.cancel()
    await asyncio.sleep(0.01)
    permit.release()
    results = await waiting
    assert isinstance(results[1], Cancelled)
    assert_right([results[0], results[2]], [jobs[0], jobs[2]])
    assert [call.timings.batch for call in calls] == [2, 1, 2]


@anyio
async def test_all_who_leave_leave_nothing() -> None:
    with_batches = engine(inline_flops=1000, concurrency=1)
    permit = await occupy(with_batches)
    calls = [fresh() for _ in range(3)]
    waiting = asyncio.create_task(attend(with_batches, [job(seed) for seed in range(3)], calls))
    await asyncio.sleep(0.01)
    for call in calls:
        call.deadline.cancel()
    permit.release()
    assert [type(result) for result in await waiting] == [Cancelled] * 3
    assert_right(await attend(with_batches, [job(7)]), [job(7)])
    assert with_batches.admission.slots_taken == 0


@anyio
async def test_a_task_that_is_cancelled_is_cancelled() -> None:
    with_batches = engine(inline_flops=1000, concurrency=1)
    with await occupy(with_batches):
        task, other = (asyncio.create_task(attend_one(with_batches, job(seed), fresh())) for seed in range(2))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert_right([await other], [job(1)])


@anyio
async def test_no_place_is_no_place_for_all_of_them() -> None:
    with_batches = engine(inline_flops=1000, concurrency=1, queue=0)
    with await occupy(with_batches):
        results = await attend(with_batches, [job(seed) for seed in range(3)])
    assert [type(result) for result in results] == [Busy] * 3


@anyio
async def test_a_batch_takes_no_more_memory_than_there_is() -> None:
    jobs, calls = [job(seed) for seed in range(30)], [fresh() for _ in range(30)]
    limit = peak_bytes(jobs[0]) * 8 + 1
    for inline_flops in (1000, 10**9):
        small = engine(inline_flops=inline_flops, memory_limit=limit)
        assert_right(await attend(small, jobs, calls), jobs)
        assert {call.timings.batch for call in calls} == {8, 6}
        assert small.admission.free == small.admission.memory


def of_one_kind(seed: int) -> list[Decoded]:
    """Twelve of any layout, batch sizes and lengths, each hiding what it likes."""
    random = np.random.default_rng(seed)
    layout, groups = str(random.choice(["ld", "dl", "bld", "bhld", "hld"])), int(random.integers(1, 3))
    heads, d, e = groups * int(random.integers(1, 3)), *map(int, random.integers(1, 6, 2))
    most_q, most_k = (2 ** int(power) for power in random.integers(1, 4, 2))
    common: dict[str, Any] = {"layout": layout, "include": [name for name in EVERYTHING if random.random() < 0.5]}
    if "h" not in layout:
        common |= {"num_heads": heads, "num_kv_heads": groups}
    if "attention_weights" in common["include"]:
        common |= {"average_heads": bool(random.random() < 0.3)}
        common |= {"top_k": 2} if random.random() < 0.3 else {}

    def one() -> Decoded:
        q, k = (int(random.integers(most // 2 + 1, most + 1)) for most in (most_q, most_k))
        b, hiding = int(random.integers(1, 4)), dict[str, Any]()
        if random.random() < 0.4:
            hiding |= {"is_causal": True, "query_offset": int(random.integers(-4, 6))}
        for name, length in (("query_lengths", q), ("key_lengths", k)):
            hiding |= {name: int(random.integers(0, length + 1))} if random.random() < 0.3 else {}

        def array(h: int, length: int, features: int) -> np.ndarray:
            sizes = {"b": b, "h": h, "l": length, "d": features if "h" in layout else h * features}
            return random.normal(size=[sizes[axis] for axis in layout])

        arrays = {"query": array(heads, q, d), "key": array(groups, k, d), "value": array(groups, k, e)}
        return Decoded(arrays | common | hiding, frozenset())

    return [one() for _ in range(12)]


@anyio
async def test_nobody_sees_what_others_are_filled_up_with() -> None:
    together = 0
    for seed in range(40):
        jobs, calls = of_one_kind(seed), [fresh() for _ in range(12)]
        results = await attend(engine(inline_flops=10**9), jobs, calls)
        together += sum(call.timings.batch > 1 for call in calls)
        for job, result in zip(jobs, results, strict=True):
            assert isinstance(result, Result)
            alone = attend_alone(job)
            ours, theirs = flat(result.arrays), flat(alone.arrays)
            assert ours.keys() == theirs.keys()
            for name, array in theirs.items():
                assert (ours[name].shape, ours[name].dtype) == (array.shape, array.dtype)
                np.testing.assert_allclose(ours[name], array, rtol=1e-12, atol=1e-13, err_msg=f"{seed} {name}")
            assert result.metadata._replace(kernel="") == alone.metadata._replace(kernel="")
    assert together > 400


@anyio
@pytest.mark.parametrize("inline_flops", [2000, 10**9], ids=["beside", "inline"])
async def test_who_would_make_all_others_too_long_begins_anew(
    inline_flops: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is room for eight long ones, or for ten short ones, but not for nine that are filled up."""
    tokens = [5] * 8 + [8] * 3 + [5] * 3
    jobs, calls = [job(seed, length) for seed, length in enumerate(tokens)], [fresh() for _ in tokens]
    short, long = peak_bytes(jobs[0]), peak_bytes(jobs[8])
    small = engine(inline_flops=inline_flops, memory_limit=long * 8 + 1)
    assert 10 * short < small.admission.memory < 9 * long
    entered: list[int] = []
    admit = small.admission.admit

    def noted(bound: int) -> Lease:
        entered.append(bound)
        return admit(bound)

    monkeypatch.setattr(small.admission, "admit", noted)
    assert_right(await attend(small, jobs, calls), jobs)
    assert [call.timings.batch for call in calls] == [8] * 8 + [6] * 6
    assert entered == ([8 * short, 6 * long] if inline_flops == 2000 else [])
    assert small.admission.free == small.admission.memory


@anyio
async def test_what_does_not_fit_together_may_fit_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    execute = NumpyBackend.execute

    def short_of_memory(self: NumpyBackend, plan: Any, *given: Any) -> Any:
        if plan.sizes.batch_size > 1:
            raise MemoryError
        return execute(self, plan, *given)

    monkeypatch.setattr(NumpyBackend, "execute", short_of_memory)
    jobs, with_batches, batches = [job(seed) for seed in range(4)], engine(), list[int]()
    assert with_batches.batcher is not None
    with_batches.batcher.on_batch = batches.append
    assert_right(await attend(with_batches, jobs), jobs)
    assert batches == []


@anyio
@pytest.mark.parametrize("gone", [1, 3])
async def test_who_leaves_while_it_is_computed(gone: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as one is there, it is computed; when nobody is, it is stopped."""
    execute, loop = NumpyBackend.execute, asyncio.get_running_loop()
    jobs, calls = [job(seed) for seed in range(3)], [fresh() for _ in range(3)]

    def leave(call: Execution) -> None:
        call.deadline.cancel()

    def slow(self: NumpyBackend, plan: Any, operands: Any, device: str, check: Any) -> Any:
        for call in calls[:gone]:
            loop.call_soon_threadsafe(leave, call)
        while not all(call.deadline.cancelled for call in calls[:gone]):
            time.sleep(0.001)
        check()
        return execute(self, plan, operands, device, check)

    monkeypatch.setattr(NumpyBackend, "execute", slow)
    results = await attend(engine(inline_flops=1000), jobs, calls)
    assert [isinstance(result, Cancelled) for result in results] == [True] * gone + [False] * (3 - gone)
    monkeypatch.undo()
    assert_right(results[gone:], jobs[gone:])
