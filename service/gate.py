"""How many requests may be at work at once, with how much memory; a bounded number waits in line, others are refused.

A gate belongs to one event loop, in whose thread all of this runs.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Final

from service.errors import Busy, Fault
from service.stop import Abandoned, Stop

# Seconds that a place is held, as long as nobody knows better.
USUAL: Final = 0.1
# How much the last one who left a place counts among all before (as round trips do in RFC 6298).
RECENT: Final = 1 / 8
# Seconds after which whoever is refused is told to ask again, at most.
LATEST: Final = 60
# Seconds for which room is kept for whoever still sends.
KEPT: Final = 1.0


class Permit:
    """A place and some memory, until they are given back. A context manager that gives back what is left."""

    __slots__ = ("_gate", "_memory", "_place", "_since")

    def __init__(self, gate: Gate, memory: int) -> None:
        self._gate = gate
        self._memory = memory
        self._place = True
        self._since = gate.granted()

    def leave_place(self) -> None:
        """The work is done; its memory is still needed."""
        if self._place:
            self._place = False
            self._gate.left(self._since)
            self._gate._give(0, place=True)

    def grow(self, memory: int) -> None:
        """Take more memory, if there is some at once: whoever holds memory must not wait for more. Errors: Busy."""
        if memory > self._gate.free:
            raise self._gate.busy()
        self._gate.free -= memory
        self._memory += memory

    def keep(self, memory: int) -> None:
        """Give back what is above this."""
        if memory < self._memory:
            spare, self._memory = self._memory - memory, memory
            self._gate._give(spare, place=False)

    def resize(self, memory: int) -> None:
        """Keep this much, or take more as `grow` does. Errors: Busy."""
        if memory > self._memory:
            self.grow(memory - self._memory)
        else:
            self.keep(memory)

    def leave(self) -> None:
        """Give back everything. Does nothing the second time."""
        memory, place = self._memory, self._place
        self._memory, self._place = 0, False
        if place:
            self._gate.left(self._since)
        if memory or place:
            self._gate._give(memory, place=place)

    def __enter__(self) -> Permit:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.leave()


class Coming:
    """Room in line for somebody who will be there soon, or no more: else those who are slow would keep others out."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def __enter__(self) -> Coming:
        self._gate.expected += 1
        self._kept = True
        self._timer = asyncio.get_running_loop().call_later(KEPT, self._leave)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._timer.cancel()
        self._leave()

    def _leave(self) -> None:
        if self._kept:
            self._kept = False
            self._gate.expected -= 1


class Gate:
    """First come, first served: who needs much is not passed by those who need little.

    places: that are taken at once; memory: bytes that are; queue: how many may wait; clock: seconds
    """

    def __init__(self, places: float, memory: int, queue: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.places = places
        self.memory = memory
        self.free = memory
        self.taken = 0
        self.expected = 0
        self._queue = queue
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()
        self._clock = clock
        self._granted = clock()
        self._held = USUAL

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)

    @property
    def full(self) -> bool:
        """Whether nobody else may wait."""
        return len(self._waiting) >= self._queue

    @property
    def promised(self) -> bool:
        """Whether those who are here, or will be soon, leave no room for anybody else."""
        return self.waiting + self.expected >= self._queue + max(0, self.places - self.taken)

    @property
    def refuses(self) -> bool:
        """Whether who cannot enter at once is refused, and somebody could not: nobody else may wait."""
        return self.full and (self.taken >= self.places or self.waiting > 0)

    def try_enter(self, memory: int) -> Permit | None:
        """A permit, if there is one at once."""
        if self._waiting or self.taken >= self.places or memory > self.free:
            return None
        self.taken += 1
        self.free -= memory
        return Permit(self, memory)

    async def enter(self, memory: int, stop: Stop) -> Permit:
        """A permit, waited for no longer than the request has time. Errors: Busy, Abandoned."""
        if stop.abandoned:  # while it was read, say: nobody would take it out of the line
            raise Abandoned
        permit = self.try_enter(memory)
        if permit is not None:
            return permit
        if self.full:
            raise self.busy()
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (turn, memory)
        self._waiting.append(entry)
        stop.on_abandon = turn.cancel
        late: list[bool] = []  # a look at the clock would not do: timers may be a little early

        def give_up() -> None:
            late.append(turn.cancel())

        timer = asyncio.get_running_loop().call_later(stop.left, give_up)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it was this task that was cancelled, its turn just come
                self._give(memory, place=True)
            else:
                self._waiting.remove(entry)
                self._call()
            if stop.abandoned:
                raise Abandoned from None
            if any(late):
                raise self.busy() from None
            raise  # somebody cancelled the task itself
        finally:
            timer.cancel()
            stop.on_abandon = bool
        return Permit(self, memory)

    def granted(self) -> float:
        """Somebody has a place from now on; when that is."""
        self._granted = self._clock()
        return self._granted

    def left(self, since: float) -> None:
        """Somebody leaves a place that was held since then."""
        self._held += (self._clock() - since - self._held) * RECENT

    def busy(self) -> Busy:
        """The refusal, with when it is worth asking again: when all that are here now will be done.

        Places were lately held for so long, and those that are taken have been for as long as none was granted.
        """
        here = len(self._waiting) + self.taken
        held = max(self._held, self._clock() - self._granted)
        after = min(LATEST, max(1, math.ceil(held * here / max(1, min(self.places, here)))))
        fault = Fault("", "a server with room for this request", f"{self.taken} at work and {self.waiting} waiting")
        return Busy(fault, headers={"Retry-After": str(after)})

    def _give(self, memory: int, *, place: bool) -> None:
        self.free += memory
        self.taken -= place
        self._call()

    def _call(self) -> None:
        """Let in whoever is next, as long as there is room."""
        while self._waiting:
            turn, memory = self._waiting[0]
            if turn.cancelled():  # will take itself out
                return
            if self.taken >= self.places or memory > self.free:
                return
            self._waiting.popleft()
            self.taken += 1
            self.free -= memory
            turn.set_result(None)
