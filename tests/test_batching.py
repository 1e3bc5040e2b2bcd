"""Dynamic batching within one iteration of an event loop, so that the batches are deterministic."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from attention_service.attention.plan import Plan
from attention_service.attention.result import Result
from attention_service.backends.base import no_check
from attention_service.backends.numpy.backend import NumpyBackend
from attention_service.codecs.decoded import Decoded
from attention_service.codecs.table import CODECS
from attention_service.errors import Busy, InvalidArray, Overflow, TimeLimit
from attention_service.pipeline.admission import AdmissionController, Lease
from attention_service.pipeline.deadline import Cancelled, Deadline
from attention_service.pipeline.engine import Engine
from attention_service.pipeline.execution import Execution
from attention_service.pipeline.prepare import make_spec_and_plan
from attention_service.pipeline.run import admit, compute
from attention_service.settings import Settings
from tests.helpers.virtual_time import run
from tests.helpers.waiting import turns, until, until_async
from tests.test_batching_http import EVERYTHING, flat

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


def test_consecutive_requests_do_not_wait() -> None:
    """Requests wait for the batch window only while others are computed."""

    async def main() -> float:
        with_batches = engine(inline_flops=10**9)
        for seed in range(20):
            await attend(with_batches, [decoded(seed)])
        return asyncio.get_running_loop().time()

    assert run(main()) == 0


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
@pytest.mark.parametrize("inline_factor", [1, 100], ids=["worker", "inline"])
async def test_requests_that_hold_all_memory_are_computed_in_a_batch(inline_factor: int) -> None:
    """Eight of them at a time: their batch waits for no memory that they hold."""
    inputs = [decoded(seed, tokens=200) for seed in range(30)]
    operation = engine().attention
    cost = operation.cost(operation.prepare(inputs[0]), CODECS["application/json"])
    limit = 8 * cost.peak(inputs[0].nbytes)
    small = engine(inline_flops=cost.flops * inline_factor, memory_limit=limit)
    calls = [Execution(small.admission, 60) for _ in inputs]

    async def one(decoded: Decoded, call: Execution) -> Result:
        call.timings.begin()
        with call.lease:
            return await attend_one(small, decoded, call)

    found = await asyncio.gather(*map(one, inputs, calls))
    assert_same_as_single(list(found), inputs)
    assert max(call.timings.batch for call in calls) == 8
    assert small.admission.free == small.admission.memory == limit


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
