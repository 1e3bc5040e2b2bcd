"""One request in the pipeline: its timings, its deadline, its lease."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from anyio import to_thread

from attention_service.attention.result import Metadata
from attention_service.pipeline.admission import AdmissionController, Lease
from attention_service.pipeline.deadline import Deadline

T = TypeVar("T")

Step = Literal["decode", "prepare", "queue", "compute", "encode"]


@dataclass(slots=True)
class Timings:
    """Seconds spent on each step of one request."""

    decode: float = 0.0
    prepare: float = 0.0
    queue: float = 0.0
    compute: float = 0.0
    encode: float = 0.0
    since: float = 0.0

    def begin(self) -> None:
        """Start the clock: the time until now belongs to no step."""
        self.since = time.perf_counter()

    def step(self, name: Step) -> None:
        """Add the time since the last step to this one."""
        now = time.perf_counter()
        setattr(self, name, getattr(self, name) + now - self.since)
        self.since = now

    def header(self) -> str:
        """The value of a Server-Timing header (W3C Server Timing), in milliseconds, of the steps that are done."""
        steps = self.decode * 1e3, self.prepare * 1e3, self.queue * 1e3, self.compute * 1e3
        # UP031: four numbers by % take half of the time of an f-string, in every response.
        text = "decode;dur=%.3f, prepare;dur=%.3f, queue;dur=%.3f, compute;dur=%.3f" % steps  # noqa: UP031
        return f"{text}, encode;dur={self.encode * 1e3:.3f}" if self.encode else text


class Execution:
    """The state of one request in the pipeline: its lease, its deadline, and the time that each step took.

    disconnected: returns when the client has disconnected; None for gRPC, which cancels the task instead
    received: bytes of the body; decoded_bytes: of its decoded fields, if they count
    metadata: of the result, once it is computed; the response has it too
    timings: None for new ones
    """

    def __init__(
        self,
        admission: AdmissionController,
        seconds: float,
        disconnected: Callable[[], Awaitable[None]] | None = None,
        timings: Timings | None = None,
    ) -> None:
        self.admission = admission
        self.lease = Lease(admission)
        self.deadline = Deadline(seconds)
        self.timings = Timings() if timings is None else timings
        self.received = 0
        self.decoded_bytes = 0
        self.metadata: Metadata | None = None
        self._disconnected = disconnected

    def begin(self, received: int) -> None:
        """Start the clock and the time limit, now that the body was received: so many bytes."""
        self.received = received
        self.deadline.restart()
        self.timings.begin()

    async def grow(self, memory: int, *, slot: bool = False) -> None:
        """Wait, until the deadline at most, for memory and a slot. See `Lease.grow`."""
        await self.lease.grow(memory, self.deadline, slot=slot)

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
