"""Admission control: which requests get memory and slots, wait, or are refused. In virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

import pytest

from attention_service.errors import Busy, MemoryLimit
from attention_service.pipeline.admission import EXPECTED, AdmissionController, Lease
from attention_service.pipeline.deadline import Cancelled, Deadline
from tests.helpers.virtual_time import run
from tests.helpers.waiting import turns


def in_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def call(**arguments: Any) -> None:
        run(test(**arguments))

    return call


def controller(slots: int = 1, memory: int = 100, queue: int = 9) -> AdmissionController:
    return AdmissionController(slots, memory, queue, asyncio.get_running_loop().time)


def grow(lease: Lease, memory: int, *, slot: bool = False) -> asyncio.Task[None]:
    return asyncio.create_task(lease.grow(memory, Deadline(1000), slot=slot))


@in_virtual_time
async def test_a_lease_grows_shrinks_and_is_released() -> None:
    admission = controller()
    with admission.new_lease(80) as lease:
        await lease.grow(30, Deadline(9))
        assert (admission.free, lease.memory) == (70, 30)
        await lease.grow(80, Deadline(9), slot=True)
        assert (admission.free, admission.slots_taken) == (20, 1)
        lease.release_slot()
        lease.release_slot()
        lease.shrink(10)
        assert (admission.free, admission.slots_taken) == (90, 0)
    lease.release()
    assert (admission.free, admission.counted_requests) == (100, 0)


@in_virtual_time
async def test_a_request_larger_than_the_memory_limit_is_refused() -> None:
    lease = controller().new_lease(200)
    with pytest.raises(MemoryLimit, match=r"at most 100B.*about 101B"):
        await lease.grow(101, Deadline(9))


@in_virtual_time
async def test_slots_are_granted_in_the_order_of_arrival() -> None:
    admission = controller()
    leases = [admission.new_lease(1) for _ in range(4)]
    await leases[3].grow(1, Deadline(9), slot=True)
    order: list[int] = []

    async def compute(number: int) -> None:
        await leases[number].grow(1, Deadline(1000), slot=True)
        order.append(number)
        leases[number].release()

    tasks = [asyncio.create_task(compute(number)) for number in (2, 0, 1)]
    await turns()
    assert (order, admission.waiting) == ([], 3)
    leases[3].release()
    await asyncio.gather(*tasks)
    assert order == [0, 1, 2]


@in_virtual_time
async def test_a_small_request_does_not_delay_an_older_large_one() -> None:
    admission = controller(slots=9)
    first, large, small = (admission.new_lease(0) for _ in range(3))
    await first.grow(60, Deadline(9))
    waiting = [grow(large, 50), grow(small, 51)]
    await turns()
    assert [task.done() for task in waiting] == [False, False]
    first.release()
    await turns()
    assert [task.done() for task in waiting] == [True, False]
    large.release()
    await turns()
    assert waiting[1].done()


@in_virtual_time
async def test_memory_that_an_older_request_does_not_need_is_granted_to_others() -> None:
    admission = controller(slots=9)
    first, large, small = (admission.new_lease(0) for _ in range(3))
    await first.grow(60, Deadline(9))
    waiting = grow(large, 80)
    await turns()
    await small.grow(20, Deadline(9), last=True)  # when the first request is done, there are still 80 free
    first.release()
    await waiting


@in_virtual_time
async def test_bodies_that_arrive_leave_memory_for_computations() -> None:
    admission = controller(slots=9)
    first, second, third = (admission.new_lease(0) for _ in range(3))
    await first.grow(20, Deadline(9))
    await second.grow(5, Deadline(9))
    waiting = grow(third, 1)
    await turns()
    assert not waiting.done()  # a quarter of the memory is in use
    await first.grow(30, Deadline(9))  # the oldest request may use more
    await first.grow(40, Deadline(9), last=True)
    await waiting


@in_virtual_time
async def test_a_full_queue_refuses_requests() -> None:
    admission = controller(queue=1)
    holder, waiting, refused = (admission.new_lease(1) for _ in range(3))
    await holder.grow(1, Deadline(9), slot=True)
    before = admission.full
    task = grow(waiting, 1, slot=True)
    await turns()
    assert (before, admission.full) == (False, True)
    with pytest.raises(Busy) as refusal:
        await refused.grow(1, Deadline(9), slot=True)
    assert int(refusal.value.headers["Retry-After"]) >= 1
    holder.release()
    await task


@in_virtual_time
async def test_bodies_that_have_just_begun_to_arrive_count_against_the_capacity() -> None:
    """They count for a limited time, so that clients that send nothing do not block others."""
    admission = controller(slots=1, queue=1)
    leases = [admission.new_lease(1) for _ in range(2)]
    with pytest.raises(Busy):
        admission.check_capacity()
    await asyncio.sleep(EXPECTED)
    admission.check_capacity()
    for lease in leases:
        lease.receiving = False
    with pytest.raises(Busy):
        admission.check_capacity()


@in_virtual_time
async def test_a_request_waits_no_longer_than_its_deadline() -> None:
    admission = controller()
    holder, waiting = admission.new_lease(100), admission.new_lease(1)
    await holder.grow(100, Deadline(9))
    with pytest.raises(Busy):
        await waiting.grow(1, Deadline(0.5))
    assert admission.waiting == 0


@in_virtual_time
async def test_a_request_whose_client_disconnects_stops_waiting() -> None:
    admission, deadline = controller(), Deadline(9)
    holder, waiting = admission.new_lease(100), admission.new_lease(1)
    await holder.grow(100, Deadline(9))
    task = asyncio.create_task(waiting.grow(1, deadline))
    await turns()
    deadline.cancel()
    with pytest.raises(Cancelled):
        await task
    with pytest.raises(Cancelled):  # nor does it start to wait
        await waiting.grow(1, deadline)
    assert admission.waiting == 0


@in_virtual_time
async def test_a_cancelled_task_releases_its_lease() -> None:
    admission = controller()
    holder, waiting = admission.new_lease(100), admission.new_lease(100)
    await holder.grow(100, Deadline(9))
    task = grow(waiting, 100, slot=True)
    await turns()
    holder.release()  # granted, but the task is cancelled before it runs again
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    waiting.release()
    assert (admission.free, admission.slots_taken, admission.counted_requests) == (100, 0, 0)


@in_virtual_time
async def test_half_received_bodies_can_all_be_completed() -> None:
    """Ten bodies of 30 bytes share 100 bytes: each has arrived in part, and grows by single bytes in random order."""
    admission, chance = controller(), random.Random(0)
    done: list[int] = []
    longest: list[int] = []

    async def receive(number: int) -> None:
        with admission.new_lease(30) as lease:
            for size in range(1, 31):
                await lease.grow(size, Deadline(1000))
                longest.append(admission.memory - admission.free)
                await asyncio.sleep(chance.random())
            done.append(number)

    await asyncio.gather(*(receive(number) for number in range(10)))
    assert sorted(done) == list(range(10))
    assert 25 < max(longest) <= 25 + 30  # a quarter of the memory, and the oldest body
    assert admission.free == 100


@in_virtual_time
async def test_a_deadlock_of_requests_refuses_the_youngest() -> None:
    """They need more memory than their leases announced."""
    admission = controller(slots=9)
    leases = [admission.new_lease(30) for _ in range(3)]
    for lease in leases:
        await lease.grow(30, Deadline(9), last=True)
    tasks = [grow(lease, 60) for lease in leases]
    await turns()
    with pytest.raises(Busy):
        await tasks[2]
    leases[2].release()
    await tasks[0]
    assert not tasks[1].done()
    leases[0].release()
    await tasks[1]
    leases[1].release()
    assert admission.free == 100


@pytest.mark.parametrize("seed", range(20))
@in_virtual_time
async def test_random_requests_all_finish_and_release_their_memory(seed: int) -> None:
    """Each request is granted its memory or refused, and at the end all memory is free."""
    chance, admission = random.Random(seed), controller(slots=2, memory=1000, queue=1000)
    ends = {"done": 0, "busy": 0}

    async def one() -> None:
        await asyncio.sleep(chance.random() * 5)
        body = chance.randint(1, 200)
        with admission.new_lease(2 * body) as lease:
            try:
                for size in range(1, body, 20):
                    await lease.grow(size, Deadline(10**6))
                    await asyncio.sleep(chance.random() * 0.1)
                lease.receiving = False
                await lease.grow(2 * body, Deadline(10**6), slot=True)
                await asyncio.sleep(chance.random())
                lease.release_slot()
                lease.shrink(body)
                await lease.grow(chance.randint(body, 700), Deadline(10**6), slot=True, last=True)
                await asyncio.sleep(chance.random())
                lease.release_slot()
                assert sum(other.memory for other in admission._leases) + admission.free == 1000
                assert admission.free >= 0
                ends["done"] += 1
            except Busy:
                ends["busy"] += 1

    await asyncio.gather(*(one() for _ in range(60)))
    assert sum(ends.values()) == 60
    assert ends["done"] >= 30
    assert (admission.free, admission.slots_taken, admission.counted_requests) == (1000, 0, 0)
