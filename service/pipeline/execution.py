"""One request at work: how long each step took, when its time is over, what memory it holds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final, Literal, TypeVar

from anyio import to_thread

from service.pipeline.admission import AdmissionController, Lease
from service.pipeline.deadline import Deadline

T = TypeVar("T")

HEADER: Final = b"decode;dur=%.3f, plan;dur=%.3f, queue;dur=%.3f, compute;dur=%.3f"
Step = Literal["decode", "plan", "queue", "compute", "encode"]


class Timings:
    """Seconds spent on each step of one request. batch: requests that were computed in one batch"""

    def __init__(self) -> None:
        self.decode = self.plan = self.queue = self.compute = self.encode = 0.0
        self.batch = 1

    def begin(self) -> None:
        """Start the clock: the time until now belongs to no step."""
        self._since = time.perf_counter()

    def step(self, name: Step) -> None:
        """Add the time since the last step to this one."""
        now = time.perf_counter()
        setattr(self, name, getattr(self, name) + now - self._since)
        self._since = now

    def begin_batch(self, size: int) -> None:
        """Add the time since the last step to the queue, and keep the size of the batch."""
        self.step("queue")
        self.batch = size

    def header(self) -> bytes:
        """The value of a Server-Timing header (W3C Server Timing), in milliseconds, of the steps that are done."""
        done = self.decode * 1e3, self.plan * 1e3, self.queue * 1e3, self.compute * 1e3
        text = HEADER % done if self.batch == 1 else HEADER % done + b', batch;desc="%d"' % self.batch
        return text + b", encode;dur=%.3f" % (self.encode * 1e3) if self.encode else text


class Execution:
    """What one request holds on its way through the pipeline: a lease, a deadline, and the time that each step took.

    disconnected: returns when the client is disconnected; None where the transport tells it otherwise
    received: bytes of the body; facts: metadata of the result, once it is computed
    """

    def __init__(
        self,
        admission: AdmissionController,
        seconds: float,
        disconnected: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.admission = admission
        self.lease = Lease(admission)
        self.deadline = Deadline(seconds)
        self.timings = Timings()
        self.received = 0
        self.facts: Mapping[str, Any] = {}
        self._disconnected = disconnected

    async def grow(self, memory: int, *, slot: bool = False, compute: bool = False) -> None:
        """Hold this much memory, and a slot if asked, before the deadline. See `Lease.grow`."""
        await self.lease.grow(memory, self.deadline, slot=slot, compute=compute)

    async def in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function in a worker thread. If this task is cancelled, the deadline is, which ends the function."""
        try:
            return await to_thread.run_sync(function, *arguments)
        except asyncio.CancelledError:
            self.deadline.cancel()
            raise

    @asynccontextmanager
    async def cancel_on_disconnect(self) -> AsyncIterator[None]:
        """Inside, the deadline is cancelled when the client disconnects. The body must have been received whole."""
        if self._disconnected is None:
            yield
            return
        task = asyncio.create_task(_cancel_after(self._disconnected, self.deadline))
        try:
            yield
        finally:
            task.cancel()


async def _cancel_after(disconnected: Callable[[], Awaitable[None]], deadline: Deadline) -> None:
    await disconnected()
    deadline.cancel()
