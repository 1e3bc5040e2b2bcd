"""Admission control: one budget of memory and a number of slots for worker threads, shared by all requests of a worker.

A request holds one `Lease` from the first byte of its body to the last byte of its response. The lease grows as the
body arrives, and again when the request is prepared and its computation is estimated. Requests that must wait are
served by age, the oldest first.

No request can block another for ever:

- A lease has a bound: the most memory that it is known to need. It may grow only if the older leases could afterwards
  still finish in order of age: the oldest reaches its bound and releases its memory, then the next, and so on
  (Dijkstra's banker's algorithm). So bodies that are half received can always be completed.
- Requests that do not compute yet share a quarter of the memory, so that they do not take it from those that could.
- A request turns out to need more when it is prepared. If then every lease that holds memory waits, the youngest of
  them is refused with 503, and what it holds goes to the others.

An AdmissionController belongs to one event loop; all methods run in its thread.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from pydantic import ByteSize

from attention_service.errors import Busy, MemoryLimit
from attention_service.pipeline.deadline import Cancelled, Deadline

# Bytes of a request that are not counted: about as much as a server buffers for every connection.
UNCOUNTED: Final = 2**16
# Seconds that a slot is held, until there is a measurement.
INITIAL_HOLD: Final = 0.1
# Weight of the newest measurement in the average (as for round trips in RFC 6298).
SMOOTHING: Final = 1 / 8
# Retry-After is at most so many seconds.
MAX_RETRY_AFTER: Final = 60
# Requests that do not compute yet share 1 / PREPARING_SHARE of the memory. The oldest of them may exceed it.
PREPARING_SHARE: Final = 4
# Seconds for which a request whose body is still arriving counts as one that will need a slot.
EXPECTED: Final = 1.0


class Growth(NamedTuple):
    """The total memory in bytes that a lease asks for, and a slot if `slot`. last: see `Lease.grow`"""

    memory: int
    slot: bool = False
    last: bool = False


@dataclass(eq=False, slots=True)
class Lease:
    """The memory and the slot of one request. A context manager that releases both.

    It is not counted until `begin`, or until it grows beyond `UNCOUNTED` or asks for a slot.
    """

    controller: AdmissionController
    counted: bool = False
    bound: int = 0  # bytes that it may hold at most, as far as is known: first to decode, then to compute
    memory: int = 0  # bytes held
    has_slot: bool = False
    receiving: bool = True  # until the body is complete
    preparing: bool = True  # until it was granted what it needs to compute
    started: float = 0.0
    slot_granted: float = 0.0
    wanted: Growth = field(init=False)  # what it asked for last
    turn: asyncio.Future[None] | None = None  # while it waits for that; done when it is granted

    def begin(self, bound: int) -> None:
        """Count the request from now on. bound: bytes that it needs until it is prepared, at most"""
        if not self.counted:
            self.controller.add(self, bound)

    async def grow(self, memory: int, deadline: Deadline, *, slot: bool = False, last: bool = False) -> None:
        """Wait until the lease holds at least `memory` bytes in total, and a slot if `slot`.

        A lease that is not counted yet and asks for at most UNCOUNTED bytes and no slot stays uncounted: it returns at
        once and holds nothing. Any other call counts the lease, and may wait, even for memory that the lease holds.

        last: True for the last call before computing, which may take memory that preparing requests may not

        Errors:
        - MemoryLimit if all memory is less than `memory`
        - Busy if it would have to wait, the queue is full, and it needs a slot or holds no memory yet
        - Busy (503, not the 504 of TimeLimit) if the deadline passes while waiting
        - Busy if the request is the youngest of several that wait for one another
        - Cancelled if the deadline is cancelled. A disconnect does that within `Execution.cancel_on_disconnect` only

        After an error the lease keeps what it held.
        """
        if self.counted or slot or memory > UNCOUNTED:
            self.begin(memory)
            await self.controller.acquire(self, Growth(memory, slot and not self.has_slot, last), deadline)

    def shrink(self, memory: int) -> None:
        """Release the memory above this, which is also the new bound."""
        if self.counted:
            self.bound = memory
            self.controller.release(self, max(0, self.memory - memory), slot=False)

    def release_slot(self) -> None:
        """Release the slot and keep the memory."""
        if self.has_slot:
            self.controller.release(self, 0, slot=True)

    def release(self) -> None:
        """Release everything. Safe to call twice."""
        self.controller.remove(self)

    @property
    def waits(self) -> bool:
        """True while it waits to grow."""
        return self.turn is not None and not self.turn.done()

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


class AdmissionController:
    """Grants memory and slots to the leases of one worker.

    slots: jobs in worker threads at once, of decoding, computing, or a batch
    memory: bytes for all leases; queue: requests that may wait; clock: seconds
    """

    def __init__(self, slots: int, memory: int, queue: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.slots = slots
        self.memory = memory
        self.free = memory
        self.slots_taken = 0
        self._queue = queue
        self._leases: dict[Lease, None] = {}  # by age
        self._clock = clock
        self._granted = clock()
        self._hold = INITIAL_HOLD

    @property
    def waiting(self) -> int:
        """Requests that wait for memory or a slot."""
        return sum(1 for lease in self._leases if lease.waits)

    @property
    def counted_requests(self) -> int:
        """Requests whose memory is counted: those that arrive, wait, compute, or are being answered."""
        return len(self._leases)

    @property
    def full(self) -> bool:
        """True if all slots are taken and no other request may wait."""
        return self.slots_taken >= self.slots and self.waiting >= self._queue

    def check_capacity(self) -> None:
        """Errors: Busy if the requests that compute, wait, or have just begun to arrive leave no place in the queue."""
        now = self._clock()
        expected = sum(1 for lease in self._leases if not lease.receiving or now - lease.started < EXPECTED)
        if expected >= self.slots + self._queue:
            raise self.busy()

    def new_lease(self, bound: int) -> Lease:
        """A lease without memory yet. bound: bytes that the request needs until it is prepared, at most"""
        lease = Lease(self)
        lease.begin(bound)
        return lease

    def add(self, lease: Lease, bound: int) -> None:
        """See `Lease.begin`."""
        lease.counted, lease.bound, lease.started = True, min(bound, self.memory), self._clock()
        self._leases[lease] = None

    async def acquire(self, lease: Lease, growth: Growth, deadline: Deadline) -> None:
        """See `Lease.grow`."""
        if deadline.cancelled:  # for example while the request was decoded in a thread
            raise Cancelled
        if growth.memory > self.memory:
            expected = f"a request that needs at most {ByteSize(self.memory).human_readable()}"
            raise MemoryLimit.at("", expected, f"one that needs about {ByteSize(growth.memory).human_readable()}")
        lease.wanted, lease.bound = growth, max(lease.bound, growth.memory)
        slot_awaited = any(other.waits and other.wanted.slot for other in self._leases)
        if self._fits(lease) and not (growth.slot and slot_awaited):
            self._grant(lease)
            if growth.last:
                self._serve()  # the share of those that do not compute has become free
            return
        if self.waiting >= self._queue and (growth.slot or not lease.memory):
            raise self.busy()
        await self._wait(lease, deadline)

    def release(self, lease: Lease, memory: int, *, slot: bool) -> None:
        """Take memory, and the slot if asked, back from a lease, and serve those that wait."""
        lease.memory -= memory
        self.free += memory
        if slot and lease.has_slot:
            lease.has_slot = False
            self.slots_taken -= 1
            self._hold += (self._clock() - lease.slot_granted - self._hold) * SMOOTHING
        self._serve()

    def remove(self, lease: Lease) -> None:
        """End a lease. Does nothing the second time."""
        if lease.counted:
            lease.counted = False
            del self._leases[lease]
            self.release(lease, lease.memory, slot=True)

    def busy(self) -> Busy:
        """The refusal. Retry-After: when all that are here will be done, by how long slots were held lately."""
        here = self.waiting + self.slots_taken
        hold = max(self._hold, self._clock() - self._granted)
        after = min(MAX_RETRY_AFTER, max(1, math.ceil(hold * here / max(1, min(self.slots, here)))))
        got = f"{self.slots_taken} slots in use, {self.waiting} waiting"
        return Busy.at("", "a server with capacity for this request", got, headers={"Retry-After": str(after)})

    async def _wait(self, lease: Lease, deadline: Deadline) -> None:
        turn = lease.turn = asyncio.get_running_loop().create_future()
        self._serve()
        try:
            async with asyncio.timeout(deadline.left):
                await deadline.wait(turn)
        except TimeoutError:
            raise self.busy() from None
        finally:
            lease.turn = None
            self._serve()

    def _serve(self) -> None:
        """Grant what fits, by age. If every lease waits, refuse the youngest that holds memory."""
        slots_free = True
        for lease in [lease for lease in self._leases if lease.waits]:
            if self._fits(lease) and (slots_free or not lease.wanted.slot):
                self._grant(lease)
                assert lease.turn is not None
                lease.turn.set_result(None)
            elif lease.wanted.slot:
                slots_free = False  # no younger request passes one that waits for a slot
        if self._leases and all(lease.waits or not (lease.memory or lease.has_slot) for lease in self._leases):
            self._break_deadlock()

    def _break_deadlock(self) -> None:
        waiting = [lease for lease in self._leases if lease.waits]
        victim = next((lease for lease in reversed(waiting[1:]) if lease.memory), None)
        if victim is not None and victim.turn is not None:
            victim.turn.set_exception(self.busy())

    def _fits(self, lease: Lease) -> bool:
        """True if the lease can be granted what it wants, and all older leases could still reach their bounds."""
        growth = lease.wanted
        available = self.free - (growth.memory - lease.memory)
        if available < 0 or (growth.slot and self.slots_taken >= self.slots):
            return False
        oldest = True  # of those that do not compute
        for older in self._leases:
            if older is lease:
                break
            if older.bound - older.memory > available:
                return False
            available += older.memory
            oldest = oldest and not older.preparing
        if growth.last or oldest or not lease.preparing:
            return True
        others = sum(other.memory for other in self._leases if other.preparing and other is not lease)
        return others + growth.memory <= self.memory // PREPARING_SHARE

    def _grant(self, lease: Lease) -> None:
        extra = max(0, lease.wanted.memory - lease.memory)
        lease.memory += extra
        self.free -= extra
        lease.preparing = lease.preparing and not lease.wanted.last
        if lease.wanted.slot:
            lease.has_slot = True
            self.slots_taken += 1
            lease.slot_granted = self._granted = self._clock()
