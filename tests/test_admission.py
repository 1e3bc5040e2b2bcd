"""Admission control: which requests get memory and slots, wait, or are refused. In virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attention_service.errors import BodyTooLarge, Busy, MemoryLimit, TooSlow
from attention_service.http.body import BodyLimits, receive_body
from attention_service.pipeline.admission import EXPECTED, PATIENCE, RESEND, AdmissionController, Lease
from attention_service.pipeline.deadline import Cancelled, Deadline
from attention_service.pipeline.execution import Execution
from tests.helpers.documents import ROOT
from tests.helpers.virtual_time import run
from tests.helpers.waiting import turns


def in_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def call(**arguments: Any) -> None:
        run(test(**arguments))

    return call


def controller(slots: int = 1, memory: int = 100, queue: int = 9) -> AdmissionController:
    return AdmissionController(slots, memory, queue, asyncio.get_running_loop().time)


def grow(lease: Lease, memory: int, *, slot: bool = False, seconds: float = 1000) -> asyncio.Task[None]:
    return asyncio.create_task(lease.grow(memory, Deadline(seconds), slot=slot))


async def in_line(admission: AdmissionController, *memory: int) -> list[Lease]:
    """Leases of complete bodies, each of which holds so much memory."""
    leases = [Lease(admission) for _ in memory]
    for lease, size in zip(leases, memory, strict=True):
        lease.begin()
        await lease.grow(size, Deadline(9))
    return leases


class Sender:
    """A body that arrives piece by piece. ended: True once it ends with 408"""

    def __init__(self, admission: AdmissionController) -> None:
        self.lease = Lease(admission)
        self.ended = False
        self._sizes: asyncio.Queue[int] = asyncio.Queue()
        self.task = asyncio.create_task(self._receive())

    async def send(self, size: int) -> None:
        """Send until `size` bytes were sent."""
        self._sizes.put_nowait(size)
        await turns()

    async def _receive(self) -> None:
        with self.lease:
            try:
                async with asyncio.timeout(None) as timeout:
                    while True:
                        await self.lease.receive(await self._sizes.get(), Deadline(1000), timeout)
            except TimeoutError:
                self.ended = True


@in_virtual_time
async def test_a_lease_grows_shrinks_and_is_released() -> None:
    admission = controller()
    with Lease(admission) as lease:
        lease.begin()
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
    with pytest.raises(MemoryLimit, match=r"about 101B, while 100B is allowed"):
        await in_line(controller(), 101)


@in_virtual_time
async def test_slots_are_granted_in_the_order_of_completion() -> None:
    admission = controller()
    leases = await in_line(admission, 1, 1, 1, 1)
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
async def test_the_first_in_line_is_not_passed_by_requests_that_would_delay_it() -> None:
    admission = controller(slots=9)
    running, large, small, smaller = await in_line(admission, 60, 0, 0, 0)
    waiting = [grow(large, 80), grow(small, 21), grow(smaller, 20)]
    await turns()
    # When the running request is done, there are still 80 bytes beside 20, but not beside 21.
    assert [task.done() for task in waiting] == [False, False, True]
    running.release()
    await turns()
    assert [task.done() for task in waiting] == [True, False, True]
    large.release()
    await turns()
    assert waiting[1].done()


@in_virtual_time
async def test_a_request_that_waits_for_a_slot_does_not_keep_others_from_memory() -> None:
    admission = controller(slots=1)
    running, waiting, inline = await in_line(admission, 10, 10, 10)
    await running.grow(10, Deadline(9), slot=True)
    task = grow(waiting, 20, slot=True)
    await turns()
    await inline.grow(80 - 10, Deadline(9))
    assert not task.done()
    running.release()
    await task


@in_virtual_time
async def test_a_body_holds_what_has_come_and_nothing_for_what_was_announced() -> None:
    admission = controller()
    silent = Lease(admission)
    silent.begin()
    sender = Sender(admission)
    await sender.send(7)
    assert (silent.memory, sender.lease.memory, admission.free) == (0, 7, 93)


@in_virtual_time
async def test_bodies_that_arrive_share_half_of_the_memory() -> None:
    admission = controller()
    first, second, third = (Sender(admission) for _ in range(3))
    await first.send(20)
    await second.send(30)
    await third.send(1)
    assert (third.lease.waits, admission.free) == (True, 50)
    await first.send(90)  # the oldest may exceed the half: else none could be completed
    assert (first.lease.waits, first.lease.memory) == (True, 20)  # but 30 are taken
    second.lease.release()
    await turns()
    assert (first.lease.memory, third.lease.waits) == (90, True)
    await first.lease.grow(90, Deadline(9))  # complete, it leaves the half to others
    assert third.lease.memory == 1


@in_virtual_time
async def test_of_bodies_that_fill_the_half_slow_ones_end() -> None:
    """Not the one that has been silent for longest, nor the smallest or the youngest: a sender may wait in between."""
    admission = controller(memory=1000)
    quick, slow, waiting = (Sender(admission) for _ in range(3))
    await quick.send(100)
    await slow.send(380)
    await waiting.send(50)
    assert waiting.lease.waits
    await asyncio.sleep(PATIENCE / 2)
    await quick.send(110)
    await asyncio.sleep(PATIENCE / 4)
    await slow.send(385)
    assert not slow.ended
    await asyncio.sleep(PATIENCE / 2)
    assert (quick.ended, slow.ended, waiting.ended) == (False, True, False)
    assert (waiting.lease.memory, admission.free) == (50, 1000 - 110 - 50)


@in_virtual_time
async def test_all_slow_bodies_end_at_once() -> None:
    """One after the other, small silent bodies would protect large ones that are sent slowly."""
    admission = controller(memory=1000)
    silent = [Sender(admission) for _ in range(5)]
    for sender in silent:
        await sender.send(100)
    waiting = [Sender(admission) for _ in range(5)]
    for sender in waiting:
        await sender.send(10)
    assert [sender.lease.waits for sender in waiting] == [True] * 5
    await asyncio.sleep(1.5 * PATIENCE)
    assert [sender.ended for sender in silent] == [True] * 5
    assert [sender.lease.memory for sender in waiting] == [10] * 5


@in_virtual_time
async def test_small_silent_bodies_do_not_protect_large_slow_ones() -> None:
    """Which could hold the half for as long as new silent bodies come, so that no other body would be received."""
    admission = controller(memory=1000)
    large = [Sender(admission) for _ in range(2)]
    for sender in large:
        await sender.send(240)
    silent = [Sender(admission) for _ in range(4)]
    for sender in silent:
        await sender.send(5)
    waiting = Sender(admission)
    await waiting.send(30)
    assert waiting.lease.waits
    for size in range(241, 246):
        await large[0].send(size)
        await asyncio.sleep(PATIENCE / 2)
    assert [sender.ended for sender in [large[0], *silent]] == [True] * 5
    assert waiting.lease.memory == 30


@in_virtual_time
async def test_steady_senders_are_never_slow() -> None:
    """Not even where they fill the half, and were not read for a while, as they waited themselves."""
    admission = controller(memory=1000)
    senders = [Sender(admission) for _ in range(20)]
    sent = 0
    for _ in range(100):
        sent += 2
        for sender in senders:
            await sender.send(sent)
        await asyncio.sleep(PATIENCE / 4)
    assert not any(sender.ended for sender in senders)
    assert any(sender.lease.waits for sender in senders)
    assert senders[0].lease.memory == 200


@in_virtual_time
async def test_a_body_that_waited_a_moment_ago_is_not_slow() -> None:
    """It could send no more meanwhile."""
    admission = controller(memory=1000)
    silent, waited, first, second, waiting = (Sender(admission) for _ in range(5))
    for sender, size in ((silent, 10), (waited, 300), (first, 185), (waited, 306)):
        await sender.send(size)
    await asyncio.sleep(PATIENCE / 4)
    await waiting.send(200)
    assert waited.lease.waits
    await asyncio.sleep(PATIENCE / 4)
    first.task.cancel()
    await turns()
    assert (waited.lease.memory, waiting.lease.waits) == (306, True)
    await asyncio.sleep(0.8 * PATIENCE)  # `waiting` is the oldest that waits, from three quarters on
    await second.send(180)
    await waited.send(311)
    assert waited.lease.waits
    await asyncio.sleep(PATIENCE / 2)
    second.task.cancel()
    await asyncio.sleep(PATIENCE / 2)
    assert (silent.ended, waited.ended, waited.lease.memory) == (True, False, 311)


@in_virtual_time
async def test_bodies_that_wait_for_requests_that_compute_end_no_other_body() -> None:
    admission = controller()
    (computing,) = await in_line(admission, 80)
    silent, waiting = Sender(admission), Sender(admission)
    await silent.send(15)
    await waiting.send(10)
    await asyncio.sleep(10 * PATIENCE)
    assert (silent.ended, waiting.lease.waits) == (False, True)
    computing.release()
    await turns()
    assert not waiting.lease.waits


@in_virtual_time
async def test_bodies_do_not_take_memory_that_the_first_in_line_waits_for() -> None:
    admission = controller()
    running, large = await in_line(admission, 60, 10)
    first, second = Sender(admission), Sender(admission)
    task = grow(large, 80)
    await first.send(20)
    await second.send(1)
    assert (first.lease.memory, second.lease.waits) == (20, True)
    running.release()
    await task


@in_virtual_time
async def test_a_body_larger_than_half_is_received_beside_silent_connections() -> None:
    admission = controller()
    for _ in range(3):  # they announce a body, and send next to nothing
        Lease(admission).begin()
    sender = Sender(admission)
    for size in range(10, 101, 10):
        await sender.send(size)
    assert sender.lease.memory == 100


@in_virtual_time
async def test_bodies_announced_early_do_not_each_exceed_the_half() -> None:
    admission = controller()
    early, late = Sender(admission), Sender(admission)
    early.lease.begin()
    await late.send(60)
    await early.send(20)
    assert (late.lease.memory, early.lease.waits) == (60, True)


@in_virtual_time
async def test_a_full_queue_refuses_requests() -> None:
    admission = controller(queue=1)
    holder, waiting, refused = await in_line(admission, 1, 1, 1)
    await holder.grow(1, Deadline(9), slot=True)
    task = grow(waiting, 1, slot=True)
    await turns()
    with pytest.raises(Busy) as refusal:
        await refused.grow(1, Deadline(9), slot=True)
    assert int(refusal.value.headers["Retry-After"]) >= 1
    holder.release()
    await task


@in_virtual_time
async def test_retry_after_is_when_all_that_are_here_will_be_done() -> None:
    """A slot was held for 8 s: 0.1 + (8 - 0.1) / 8 = 1.0875 s on average, three times: one computes, one waits."""
    admission = controller(queue=1)
    before, holder, waiting, refused = await in_line(admission, 1, 1, 1, 1)
    await before.grow(1, Deadline(9), slot=True)
    await asyncio.sleep(8)
    before.release()
    await holder.grow(1, Deadline(9), slot=True)
    task = grow(waiting, 1, slot=True)
    await turns()
    with pytest.raises(Busy) as refusal:
        await refused.grow(1, Deadline(9), slot=True)
    assert refusal.value.headers["Retry-After"] == "4"  # of 3.26, with the one that is refused
    holder.release()
    await task


@in_virtual_time
async def test_bodies_that_have_just_begun_to_arrive_count_against_the_capacity() -> None:
    """They count for a limited time, so that clients that send nothing do not block others."""
    admission = controller(slots=1, queue=1)
    leases = [Lease(admission) for _ in range(2)]
    for lease in leases:
        lease.begin()
    with pytest.raises(Busy):
        admission.check_capacity()
    await asyncio.sleep(EXPECTED)
    admission.check_capacity()
    for lease in leases:
        lease.complete()
    with pytest.raises(Busy):
        admission.check_capacity()


@in_virtual_time
async def test_a_request_waits_no_longer_than_its_deadline() -> None:
    admission = controller()
    _, waiting = await in_line(admission, 100, 0)
    with pytest.raises(Busy) as refusal:
        await waiting.grow(1, Deadline(0.5))
    assert int(refusal.value.headers["Retry-After"]) >= 1
    assert admission.waiting == 0


@in_virtual_time
async def test_a_request_whose_client_disconnects_stops_waiting() -> None:
    admission, deadline = controller(), Deadline(9)
    _, waiting = await in_line(admission, 100, 0)
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
    holder, waiting = await in_line(admission, 100, 0)
    task = grow(waiting, 100, slot=True)
    await turns()
    holder.release()  # granted, but the task is cancelled before it runs again
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    waiting.release()
    assert (admission.free, admission.slots_taken, admission.counted_requests) == (100, 0, 0)


@in_virtual_time
async def test_of_decoded_requests_that_wait_for_one_another_the_last_is_refused() -> None:
    admission = controller(slots=9)
    leases = await in_line(admission, 30, 30, 30)
    tasks = [grow(lease, 70) for lease in leases]
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


@in_virtual_time
async def test_a_decoded_request_goes_ahead_if_the_first_could_not_start_anyway() -> None:
    admission = controller(slots=9)
    first, second, third = await in_line(admission, 30, 30, 30)
    tasks = [grow(first, 90), grow(second, 50), grow(third, 40)]
    await turns()
    assert [task.done() for task in tasks] == [False, False, True]
    third.release()
    await turns()
    assert [task.done() for task in tasks] == [False, True, True]
    second.release()
    await tasks[0]


@in_virtual_time
async def test_bodies_that_arrive_end_before_requests_in_line() -> None:
    """The first in line needs what two bodies hold, and one of them suffices."""
    admission = controller(slots=9)
    (large,) = await in_line(admission, 20)
    bodies = [Sender(admission) for _ in range(2)]
    for body in bodies:
        await body.send(20)
    task = grow(large, 80)
    for body in bodies:
        await body.send(21)
    with pytest.raises(Busy):
        await bodies[1].task
    await task
    assert (bodies[0].lease.waits, admission.free) == (True, 0)
    large.release()
    await turns()
    assert bodies[0].lease.memory == 21


class Plan(NamedTuple):
    """One random request.

    start: seconds; size: bytes of its body; chunks: bytes and the pause after each; silent: True if it sends only half
    decode, compute: bytes that it needs beside its body; seconds: of each
    """

    start: float
    size: int
    chunk: int
    pause: float
    silent: bool
    decode: int
    compute: int
    seconds: float


def plans(memory: int) -> st.SearchStrategy[list[Plan]]:
    seconds = st.sampled_from([0.0, 0.01, 0.3, 2.0, 15.0])
    plan = st.builds(
        Plan, st.floats(0, 20), st.integers(1, memory), st.integers(1, memory), seconds, st.booleans(),
        st.integers(0, memory), st.integers(0, memory), seconds,
    )  # fmt: skip
    return st.lists(plan, min_size=1, max_size=25)


LIMIT, MINIMUM_RATE, TIME_LIMIT = 2**22, 2**12, 1e6
ENDS = (BodyTooLarge, Busy, MemoryLimit, TooSlow)


class RandomRequests:
    """Runs plans against one controller, as the pipeline does, and checks its accounts after each step."""

    def __init__(self, admission: AdmissionController) -> None:
        self._admission = admission
        self._leases: list[Lease] = []
        self.ends: list[str] = []
        self.started: list[int] = []

    def check(self) -> None:
        """The memory never exceeds the budget, and is that of all leases."""
        admission = self._admission
        assert admission.free == LIMIT - sum(lease.memory for lease in self._leases)
        assert admission.free >= 0
        assert admission.slots_taken == sum(lease.has_slot for lease in self._leases) <= admission.slots
        bodies = [lease.memory for lease in admission.arriving if lease.memory]
        assert sum(bodies[1:]) <= LIMIT // 2

    async def run(self, plan: Plan) -> None:
        """One request, from its first byte to its end."""
        await asyncio.sleep(plan.start)
        execution = Execution(self._admission, TIME_LIMIT)
        lease = execution.lease
        self._leases.append(lease)
        try:
            with lease:
                limits = BodyLimits(LIMIT, grace=30, rate=MINIMUM_RATE)
                await receive_body(self._sender(plan), plan.size, limits, execution)
                await self._compute(plan, execution)
                self.ends.append("done")
        except ENDS as error:
            self.ends.append(type(error).__name__)
        self.check()

    async def _compute(self, plan: Plan, execution: Execution) -> None:
        for more in (plan.decode, plan.compute):
            await execution.grow(min(LIMIT, plan.size + more), slot=True)
            self.check()
            await asyncio.sleep(plan.seconds)
            execution.lease.release_slot()
            execution.lease.shrink(plan.size)
            self.check()

    def _sender(self, plan: Plan) -> Callable[[], Coroutine[Any, Any, Any]]:
        sent = 0

        async def receive() -> Any:
            nonlocal sent
            self.check()
            await asyncio.sleep(plan.pause)
            if plan.silent and sent >= plan.size // 2:
                await asyncio.get_running_loop().create_future()
            chunk = min(max(plan.chunk, plan.size // 20), plan.size - sent)
            sent += chunk
            return {"type": "http.request", "body": bytes(chunk), "more_body": sent < plan.size}

        return receive


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(plans(LIMIT), st.integers(1, 3))
def test_random_requests_all_end_within_the_budget(found: list[Plan], slots: int) -> None:
    """Granted, refused or timed out. Nobody waits until the deadline, which is far: no starvation, no deadlock."""

    async def main() -> None:
        admission = controller(slots=slots, memory=LIMIT, queue=100)
        requests = RandomRequests(admission)
        await asyncio.gather(*(requests.run(plan) for plan in found))
        assert len(requests.ends) == len(found)
        assert (admission.free, admission.slots_taken, admission.counted_requests) == (LIMIT, 0, 0)
        # One after the other: 20 pauses of 15 seconds each, then 30 seconds of silence or two computations.
        assert asyncio.get_running_loop().time() < 20 + len(found) * (20 * 15 + 30 + PATIENCE)
        if all(plan.pause < 1 and not plan.silent for plan in found):  # no sender is too slow
            assert "done" in requests.ends

    run(main())


def test_bodies_wait_as_long_as_the_documentation_says() -> None:
    text = " ".join((ROOT / "docs" / "operations.md").read_text(encoding="utf-8").split())
    assert (
        "When it has waited two seconds for a part of the half, those end with 408 that were read all the time" in text
    )
    assert "would take more than a minute, at that speed, to send again what they hold" in text
    assert (PATIENCE, RESEND) == (2, 60)
