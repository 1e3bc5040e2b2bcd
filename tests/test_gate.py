"""The gate: who may work, who waits, who is refused."""

from __future__ import annotations

import asyncio
import time

import pytest

from service.errors import Busy, TimeLimit
from service.gate import Coming, Gate, Permit
from service.stop import Abandoned, Stop

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def stop(seconds: float = 60) -> Stop:
    return Stop(seconds)


async def test_places_are_taken_and_given_back_in_order() -> None:
    gate = Gate(places=1, memory=100, queue=2)
    first = await gate.enter(10, stop())
    order: list[int] = []

    async def come(number: int) -> None:
        with await gate.enter(10, stop()):
            order.append(number)

    tasks = [asyncio.create_task(come(number)) for number in (1, 2)]
    await settle()
    assert (gate.taken, gate.waiting, gate.full, order) == (1, 2, True, [])
    with pytest.raises(Busy) as refusal:
        await gate.enter(10, stop())
    assert int(refusal.value.headers["Retry-After"]) >= 1
    first.leave()
    await asyncio.gather(*tasks)
    assert (order, gate.taken, gate.free) == ([1, 2], 0, 100)


def promised(gate: Gate) -> bool:
    return gate.promised


async def test_room_is_kept_for_who_will_come() -> None:
    """A place and two in line: three, whether they are here or will be."""
    gate = Gate(places=1, memory=100, queue=2)
    assert not promised(gate)
    with Coming(gate), Coming(gate):
        assert not promised(gate)
        permit = await gate.enter(1, Stop(9))
        assert promised(gate)
        assert not gate.full  # who is here already is not refused
    assert not promised(gate)
    permit.leave()


async def test_room_is_not_kept_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.gate.KEPT", 0.01)
    gate = Gate(places=1, memory=100, queue=0)
    with Coming(gate):
        assert promised(gate)
        await asyncio.sleep(0.05)
        assert not promised(gate)
    assert gate.expected == 0


async def test_who_needs_much_is_not_passed_by_who_needs_little() -> None:
    gate = Gate(places=9, memory=100, queue=9)
    first = await gate.enter(60, stop())
    large = asyncio.create_task(gate.enter(50, stop()))
    await settle()
    small = asyncio.create_task(gate.enter(1, stop()))
    await settle()
    assert not large.done()
    assert not small.done()
    first.leave()
    await settle()
    assert large.result()
    assert small.result()
    assert gate.free == 49


async def test_memory_can_be_kept_after_the_place_is_left() -> None:
    gate = Gate(places=1, memory=100, queue=0)
    permit = await gate.enter(80, stop())
    permit.leave_place()
    permit.leave_place()
    assert (gate.taken, gate.free) == (0, 20)
    permit.keep(30)
    permit.keep(90)
    assert gate.free == 70
    permit.grow(70)
    with pytest.raises(Busy):
        permit.grow(1)
    permit.resize(20)
    assert gate.free == 80
    permit.resize(90)
    assert gate.free == 10
    with pytest.raises(Busy):
        permit.resize(101)
    permit.leave()
    permit.leave()
    assert (gate.taken, gate.free) == (0, 100)


async def test_whether_somebody_would_be_refused() -> None:
    single, roomy = Gate(places=1, memory=100, queue=0), Gate(places=9, memory=100, queue=1)
    found = [single.refuses]
    with await single.enter(1, stop()):
        found.append(single.refuses)
    assert found == [False, True]
    with await roomy.enter(60, stop()):
        found = [roomy.refuses]
        waiting = asyncio.create_task(roomy.enter(60, stop()))
        await settle()
        found.append(roomy.refuses)
    (await waiting).leave()
    assert [*found, roomy.refuses] == [False, True, False]


async def test_a_client_that_hangs_up_leaves_the_queue() -> None:
    gate = Gate(places=1, memory=100, queue=1)
    first, gone = await gate.enter(1, stop()), stop()
    waiting = asyncio.create_task(gate.enter(1, gone))
    await settle()
    gone.abandon()
    with pytest.raises(Abandoned):
        await waiting
    assert gate.waiting == 0
    first.leave()
    assert isinstance(gate.try_enter(100), Permit)


@pytest.mark.parametrize("places", [1, 2])
async def test_a_client_that_hung_up_before_does_not_queue(places: int) -> None:
    """While its request was read in a thread, say, which nobody can stop."""
    gate, gone = Gate(places=places, memory=100, queue=1), stop()
    first = await gate.enter(1, stop())
    gone.abandon()
    late = asyncio.create_task(gate.enter(1, gone))
    await settle()
    assert late.done()
    with pytest.raises(Abandoned):
        await late
    first.leave()
    assert (gate.taken, gate.waiting, gate.free) == (0, 0, 100)


async def test_nobody_waits_longer_than_its_time() -> None:
    gate = Gate(places=1, memory=100, queue=1)
    await gate.enter(1, stop())
    start = time.monotonic()
    with pytest.raises(Busy):
        await gate.enter(1, stop(0.05))
    assert 0.04 < time.monotonic() - start < 5
    assert gate.waiting == 0


async def test_a_cancelled_task_gives_its_turn_to_the_next() -> None:
    gate = Gate(places=1, memory=100, queue=2)
    first = await gate.enter(1, stop())
    one, two = (asyncio.create_task(gate.enter(1, stop())) for _ in range(2))
    await settle()
    first.leave()  # the turn of one has come, and it is cancelled before it knows
    one.cancel()
    await settle()
    assert two.done()
    two.result().leave()
    assert (gate.taken, gate.free) == (0, 100)


def test_a_stop_ends_by_time_or_by_its_client() -> None:
    late, gone = stop(0.0), stop()
    gone.check()
    time.sleep(0.001)
    with pytest.raises(TimeLimit):
        late.check()
    gone.abandon()
    with pytest.raises(Abandoned):
        gone.check()


class EarlyStop(Stop):
    """One whose time is not quite over when a timer for it rings, as those of an event loop may."""

    @property
    def left(self) -> float:
        return 0.001


async def test_a_timer_that_rings_early_refuses_all_the_same() -> None:
    gate = Gate(places=1, memory=100, queue=10)
    with await gate.enter(1, EarlyStop(1)):
        with pytest.raises(Busy):
            await gate.enter(1, EarlyStop(1))
        assert gate.waiting == 0


class Clock:
    """One that goes when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def after(gate: Gate) -> int:
    return int(gate.busy().headers["Retry-After"])


async def hold(gate: Gate, clock: Clock, seconds: float, times: int) -> None:
    """Take a place for so long, again and again."""
    for _ in range(times):
        permit = gate.try_enter(0)
        assert permit is not None
        clock.now += seconds
        permit.leave_place()
        permit.leave()


async def test_who_is_refused_is_told_when_those_before_it_will_be_done() -> None:
    """By how long places were held lately, how many there are, and how many are here."""
    clock = Clock()
    gate = Gate(places=2, memory=100, queue=100, clock=clock)
    assert after(gate) == 1
    await hold(gate, clock, 3.0, times=100)
    first, second = gate.try_enter(1), gate.try_enter(1)
    assert first is not None
    assert second is not None
    assert after(gate) == 3  # both are done by then
    waiting = [asyncio.create_task(gate.enter(0, stop())) for _ in range(6)]
    await settle()
    assert after(gate) == 12  # eight, two at a time, for three seconds each
    clock.now += 5.0  # nobody has left for longer than usual
    assert after(gate) == 20
    clock.now += 1000.0
    assert after(gate) == 60
    for task in waiting:
        task.cancel()
    first.leave()
    second.leave()


async def test_what_was_long_ago_is_forgotten() -> None:
    clock = Clock()
    gate = Gate(places=1, memory=100, queue=100, clock=clock)
    await hold(gate, clock, 50.0, times=20)
    with await gate.enter(1, stop()):
        assert after(gate) > 40
    await hold(gate, clock, 0.5, times=50)
    with await gate.enter(1, stop()):
        assert after(gate) == 1


async def test_where_only_memory_is_bounded_all_that_are_here_leave_together() -> None:
    clock = Clock()
    gate = Gate(places=float("inf"), memory=100, queue=0, clock=clock)
    await hold(gate, clock, 4.0, times=100)
    permits = [gate.try_enter(10) for _ in range(10)]
    assert all(permits)
    with pytest.raises(Busy) as refusal:
        await gate.enter(1, stop())
    assert refusal.value.headers["Retry-After"] == "4"
