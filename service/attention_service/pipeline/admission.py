"""Admission control: one budget of memory and a number of slots for worker threads, shared by all requests of a worker.

A request holds one `Lease` from the first byte of its body to the last byte of its response. The rule:

1. While a body arrives, its lease holds the bytes that have come. All bodies that arrive hold at most half of the
   memory; only the oldest of them may exceed that. A body for which there is no memory is not read any further. When
   it has waited PATIENCE seconds for a part of the half, those end with 408 that were read all the time, but so slowly
   that they would take more than RESEND seconds to send again what they hold.
2. A request is received when its body is complete. It asks for memory and a slot to decode, and later to compute. Both
   are granted in the order in which requests were received, and then to bodies.
3. Requests and bodies behind the first that waits for memory are granted some only if they leave enough for it.
4. A request or body that waits until its deadline ends with 503.
5. If all that hold memory wait, none would become free. Then the first received request that can be served goes ahead.
   If there is none, the youngest body ends; without bodies, the last received request. Never the first that waits.

So a request waits only for earlier ones, which wait themselves, or compute or send their response in limited time.

An AdmissionController belongs to one event loop; all methods run in its thread.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from pydantic import ByteSize

from attention_service.errors import Busy, MemoryLimit
from attention_service.pipeline.deadline import Cancelled, Deadline

# Bytes that a request may take uncounted: a parsed body and its arrays, or an answer, of the smallest requests.
UNCOUNTED: Final = 2**16
# Seconds that a slot is held, until there is a measurement.
INITIAL_HOLD: Final = 0.1
# Weight of the newest measurement in the average (as for round trips in RFC 6298).
SMOOTHING: Final = 1 / 8
# Retry-After is at most so many seconds.
MAX_RETRY_AFTER: Final = 60
# Seconds for which a request whose body is still arriving counts as one that will need a slot.
EXPECTED: Final = 1.0
# Seconds that a body waits for other bodies until slow ones end. A lost packet is usually sent again by then.
PATIENCE: Final = 2.0
# A body is slow if it would take more seconds than this, at its speed, to send again what it holds. The largest body of
# the default settings, 64 MiB, comes at 1.1 MB/s then. Little memory may be held slowly, much memory only briefly.
RESEND: Final = 60.0


@dataclass(eq=False, slots=True)
class Lease:
    """The memory and the slot of one request. A context manager that releases both.

    It is not counted until `begin`, or until it grows beyond `UNCOUNTED` or asks for a slot.
    """

    controller: AdmissionController
    counted: bool = False
    memory: int = 0  # bytes held
    has_slot: bool = False
    started: float = 0.0
    slot_granted: float = 0.0
    missing: int = 0  # bytes that it waits for
    wants_slot: bool = False
    granted: asyncio.Future[None] | None = None  # done when it has them
    timeout: asyncio.Timeout | None = None  # ends its body, while that arrives
    read_since: float = 0.0  # since when its body has been read without waiting
    ended: bool = False  # True once its body was ended in favour of others

    def begin(self) -> None:
        """Count the request from now on."""
        if not self.counted:
            self.counted = True
            self.started = self.read_since = self.controller.clock()
            self.controller.arriving[self] = None

    async def receive(self, size: int, deadline: Deadline, timeout: asyncio.Timeout) -> None:
        """Wait until the lease holds the `size` bytes of a body that have come. timeout: ends the body when it expires

        Errors: as of `grow`; TimeoutError if the body was ended in favour of others.
        """
        if self.ended:
            raise TimeoutError
        self.begin()
        if not self.memory:  # as old as its first bytes, not as its announcement
            self.controller.arriving[self] = self.controller.arriving.pop(self)
        self.timeout = timeout
        await self.controller.acquire(self, size, False, deadline)

    def complete(self) -> None:
        """Put the request behind those received before, now that its body is complete."""
        if self in self.controller.arriving:
            del self.controller.arriving[self]
            self.controller.received[self] = self.timeout = None

    async def grow(self, memory: int, deadline: Deadline, *, slot: bool = False) -> None:
        """Wait until the lease holds at least `memory` bytes in total, and a slot if `slot`.

        A lease that is not counted yet and asks for at most UNCOUNTED bytes and no slot stays uncounted: it returns at
        once and holds nothing. Any other call counts the lease, and may wait.

        Errors, after which the lease keeps what it held:
        - MemoryLimit if all memory is less than `memory`
        - Busy if it would have to wait, the queue is full, and it needs a slot or holds no memory yet
        - Busy (503, not the 504 of TimeLimit) if the deadline passes while waiting, or it ends in favour of others
        - Cancelled if the deadline is cancelled. A disconnect does that within `Execution.cancel_on_disconnect` only
        """
        if self.counted or slot or memory > UNCOUNTED:
            self.begin()
            self.complete()
            await self.controller.acquire(self, memory, slot and not self.has_slot, deadline)

    def shrink(self, memory: int) -> None:
        """Release the memory above this."""
        if self.counted:
            self.controller.release(self, max(0, self.memory - memory), slot=False)

    def release_slot(self) -> None:
        """Release the slot and keep the memory."""
        if self.has_slot:
            self.controller.release(self, 0, slot=True)

    def release(self) -> None:
        """Release everything. Safe to call twice."""
        if self.counted:
            self.complete()
            self.counted = False
            del self.controller.received[self]
            self.controller.release(self, self.memory, slot=True)

    @property
    def waits(self) -> bool:
        """True while it waits for memory or a slot."""
        return self.granted is not None and not self.granted.done()

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


class AdmissionController:
    """Grants memory and slots to the leases of one worker.

    slots: jobs in worker threads at once, of decoding or computing
    memory: bytes for all leases; queue: received requests that may wait; clock: seconds
    on_release: called after each release of memory
    """

    def __init__(self, slots: int, memory: int, queue: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.slots = slots
        self.memory = memory
        self.free = memory
        self.slots_taken = 0
        self.clock = clock
        self.arriving: dict[Lease, None] = {}  # those of bodies that arrive, the oldest first
        self.received: dict[Lease, None] = {}  # all others, the first received first
        self.on_release: Callable[[], object] = lambda: None
        self._queue = queue
        self._last_grant = clock()
        self._hold = INITIAL_HOLD

    @property
    def waiting(self) -> int:
        """Received requests that wait for memory or a slot."""
        return sum(1 for lease in self.received if lease.waits)

    @property
    def counted_requests(self) -> int:
        """Requests whose memory is counted: those that arrive, wait, compute, or are being answered."""
        return len(self.arriving) + len(self.received)

    def has_room(self, memory: int) -> bool:
        """True if so much memory is free, and no request or body waits for any."""
        return memory <= self.free and not any(lease.waits for lease in (*self.received, *self.arriving))

    def check_capacity(self) -> None:
        """Errors: Busy if the requests that compute, wait, or have just begun to arrive leave no place in the queue."""
        now = self.clock()
        expected = len(self.received) + sum(1 for lease in self.arriving if now - lease.started < EXPECTED)
        if expected >= self.slots + self._queue:
            raise self.busy()

    async def acquire(self, lease: Lease, memory: int, slot: bool, deadline: Deadline) -> None:
        """See `Lease.receive` and `Lease.grow`."""
        if deadline.cancelled:  # for example while the request was decoded in a thread
            raise Cancelled
        if memory > self.memory:
            raise memory_limit_error(memory, self.memory, state="allowed")
        queue_full = lease in self.received and self.waiting >= self._queue
        lease.missing, lease.wants_slot = max(0, memory - lease.memory), slot
        granted = lease.granted = asyncio.get_running_loop().create_future()
        self._serve()
        if granted.done():  # as usual, without a timer
            lease.granted = None
            granted.result()
            return
        try:
            if queue_full and (slot or not lease.memory):
                raise self.busy()
            async with asyncio.timeout(deadline.left):
                while lease in self.arriving and not granted.done():
                    is_oldest = lease is next(body for body in self.arriving if body.waits)
                    before = {body: body.memory for body in self.arriving} if is_oldest else {}
                    await asyncio.wait([granted], timeout=PATIENCE)
                    lease.read_since = self.clock()
                    if not granted.done():
                        self._end_slow(lease, before)
                await deadline.wait(granted)
        except TimeoutError:
            raise self.busy() from None
        finally:
            lease.granted = None
            if not granted.done() or granted.cancelled() or granted.exception() is not None:
                self._serve()  # others may have what it does not wait for any longer

    def release(self, lease: Lease, memory: int, *, slot: bool) -> None:
        """Take memory, and the slot if asked, back from a lease, and serve those that wait."""
        lease.memory -= memory
        self.free += memory
        if slot and lease.has_slot:
            lease.has_slot = False
            self.slots_taken -= 1
            self._hold += (self.clock() - lease.slot_granted - self._hold) * SMOOTHING
        self.on_release()
        self._serve()

    def busy(self) -> Busy:
        """The refusal. Retry-After: when all that are here will be done, by how long slots were held lately."""
        here = self.waiting + self.slots_taken
        hold = max(self._hold, self.clock() - self._last_grant)
        after = min(MAX_RETRY_AFTER, max(1, math.ceil(hold * here / max(1, min(self.slots, here)))))
        got = f"{self.slots_taken} slots in use, {self.waiting} waiting"
        return Busy.at("", "a server with capacity for this request", got, headers={"Retry-After": str(after)})

    def _serve(self) -> None:
        """Grant what can be granted, to received requests and then to bodies. If all wait, apply rule 5."""
        leases = [*self.received, *self.arriving]
        waiting = [lease for lease in leases if lease.waits]
        if not waiting:
            return
        bodies = [body for body in self.arriving if body.memory or body.waits]
        arrived = sum(body.memory for body in bodies)
        room = math.inf  # bytes for those behind the first that waits for memory (rule 3)
        for lease in waiting:
            may = lease.missing <= room or not lease.missing
            if lease.missing and lease in self.arriving and lease is not bodies[0]:
                may = may and arrived + lease.missing <= self.memory // 2  # rule 1
            if may and self._is_free(lease):
                self._grant(lease)
                room -= lease.missing
                arrived += lease.missing if lease in self.arriving else 0
            elif lease.missing and room == math.inf:
                behind = sum(other.memory for other in leases[leases.index(lease) + 1 :])
                room = self.memory - lease.memory - lease.missing - behind
        waiting = [lease for lease in waiting if lease.waits]
        if not waiting or any(not lease.waits and (lease.memory or lease.has_slot) for lease in leases):
            return
        ahead = next((lease for lease in waiting if lease in self.received and self._is_free(lease)), None)
        holding = [lease for lease in leases if lease.memory and lease is not waiting[0]]
        if ahead is not None:
            self._grant(ahead)
        elif holding and (granted := holding[-1].granted) is not None:
            granted.set_exception(self.busy())

    def _is_free(self, lease: Lease) -> bool:
        return lease.missing <= self.free and (self.slots_taken < self.slots or not lease.wants_slot)

    def _grant(self, lease: Lease) -> None:
        lease.memory += lease.missing
        self.free -= lease.missing
        if lease.wants_slot:
            lease.has_slot = True
            self.slots_taken += 1
            lease.slot_granted = self._last_grant = self.clock()
        assert lease.granted is not None
        lease.granted.set_result(None)

    def _end_slow(self, lease: Lease, before: dict[Lease, int]) -> None:
        """End the slow bodies (rule 1), for which `lease` waits. before: bytes held PATIENCE seconds ago"""
        if sum(body.memory for body in self.arriving) + lease.missing <= self.memory // 2:
            return
        for body, held in before.items():
            was_read = not body.waits and self.clock() - body.read_since >= PATIENCE
            if body in self.arriving and was_read and (body.memory - held) * RESEND < body.memory * PATIENCE:
                body.ended = True
                if body.timeout is not None and not body.timeout.expired():
                    body.timeout.reschedule(0)


def memory_limit_error(needed: int, available: int | None, advice: str = "", state: str = "free") -> MemoryLimit:
    """The error for a request that needs more memory than there is. state: of the available memory: free or allowed"""
    got = f"a request that needs about {ByteSize(needed).human_readable()}"
    if available is not None:
        got += f", while {ByteSize(available).human_readable()} is {state}"
    return MemoryLimit.at("", "a request that fits into memory", got, advice)
