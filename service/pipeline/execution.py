"""One request at work: how long each step took, when its time is over, what memory it holds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Final, Literal, Self, TypeVar

from anyio import to_thread

from service.pipeline.admission import AdmissionController, Lease
from service.pipeline.deadline import Deadline

T = TypeVar("T")

# Bytes of a request that are not worth a lease: about what a server buffers of any connection.
UNCOUNTED: Final = 2**16
HEADER: Final = b"decode;dur=%.3f, plan;dur=%.3f, queue;dur=%.3f, compute;dur=%.3f"
Step = Literal["decode", "plan", "queue", "compute", "encode"]


class Timings:
    """Seconds spent on each step of one request. batch: requests that were computed in one batch"""

    __slots__ = ("_since", "batch", "compute", "decode", "encode", "plan", "queue")

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
    """One request on its way through the pipeline. A context manager that releases what the request holds.

    disconnected: returns when the client is disconnected; None where the transport tells it otherwise
    lease: None as long as the request needs no more memory than `UNCOUNTED`
    received: bytes of the body; facts: metadata of the result, once it is computed
    """

    __slots__ = ("_admission", "_deadline", "_disconnected", "_seconds", "facts", "lease", "received", "timings")

    def __init__(
        self,
        admission: AdmissionController,
        seconds: float,
        disconnected: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._admission = admission
        self._seconds = seconds
        self._disconnected = disconnected
        self._deadline: Deadline | None = None
        self.timings = Timings()
        self.lease: Lease | None = None
        self.received = 0
        self.facts: Mapping[str, Any] = {}

    @property
    def deadline(self) -> Deadline:
        """The end of its time, made when first asked for: small requests are done before they need one."""
        if self._deadline is None:
            self._deadline = Deadline(self._seconds)
        return self._deadline

    def restart_time_limit(self) -> None:
        """Start the time limit anew: the time that a client takes to send its body does not count."""
        self._deadline = None

    @property
    def memory_limit(self) -> int:
        """Bytes that all requests may hold together."""
        return self._admission.memory

    @property
    def is_only_one(self) -> bool:
        """True if no other large request is at work."""
        return self._admission.at_work <= 1

    def admit(self, bound: int) -> Lease:
        """The lease, made by the first call. bound: bytes that are needed until the request is prepared, at most"""
        if self.lease is None:
            self.lease = self._admission.admit(bound)
        return self.lease

    def admit_body(self, bound: int) -> Lease:
        """The lease, before a large body is received. Errors: Busy where it would hardly be computed."""
        if self.lease is None:
            self._admission.check_capacity()
        return self.admit(bound)

    async def grow(self, memory: int, *, slot: bool = False, compute: bool = False) -> None:
        """Hold this much memory, waiting for it if necessary; nothing where that is not worth counting.

        compute: True for the computation; all before it shares a part of the memory

        Errors: Busy, Cancelled.
        """
        if self.lease is None:
            if memory <= UNCOUNTED and not slot:
                return
            self.admit(memory)
        assert self.lease is not None
        await self.lease.grow(memory, self.deadline, slot=slot, compute=compute)

    def shrink(self, memory: int) -> None:
        """Hold no more than this."""
        if self.lease is not None:
            self.lease.shrink(memory)

    @property
    def has_slot(self) -> bool:
        """True while the request holds a slot."""
        return self.lease is not None and self.lease.has_slot

    def release_slot(self) -> None:
        """Let another request compute."""
        if self.lease is not None:
            self.lease.release_slot()

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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.lease is not None:
            self.lease.release()


async def _cancel_after(disconnected: Callable[[], Awaitable[None]], deadline: Deadline) -> None:
    await disconnected()
    deadline.cancel()
