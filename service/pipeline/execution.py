"""One request at work: how long each step took, when its time is over, what memory it holds."""

from __future__ import annotations

import time
from typing import Final, Literal

from service.pipeline.admission import AdmissionController, Lease
from service.pipeline.deadline import Deadline

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
        """Add the time since the last step to the queue, and note the size of the batch."""
        self.step("queue")
        self.batch = size

    def header(self) -> bytes:
        """The value of a Server-Timing header (W3C Server Timing), in milliseconds, of the steps that are done."""
        done = self.decode * 1e3, self.plan * 1e3, self.queue * 1e3, self.compute * 1e3
        text = HEADER % done if self.batch == 1 else HEADER % done + b', batch;desc="%d"' % self.batch
        return text + b", encode;dur=%.3f" % (self.encode * 1e3) if self.encode else text


class Execution:
    """One request on its way through the pipeline.

    lease: None as long as the request needs no more memory than `UNCOUNTED`
    """

    __slots__ = ("_admission", "_deadline", "_seconds", "lease", "timings")

    def __init__(self, admission: AdmissionController, seconds: float) -> None:
        self._admission = admission
        self._seconds = seconds
        self._deadline: Deadline | None = None
        self.timings = Timings()
        self.lease: Lease | None = None

    @property
    def deadline(self) -> Deadline:
        """The end of its time, made when first asked for: small requests are done before they need one."""
        if self._deadline is None:
            self._deadline = Deadline(self._seconds)
        return self._deadline

    def restart_time_limit(self) -> None:
        """Start the time limit anew: the time that a client takes to send its body does not count."""
        self._deadline = None

    def admit(self, bound: int) -> Lease:
        """The lease, made by the first call. bound: bytes that are needed until the request is prepared, at most"""
        if self.lease is None:
            self.lease = self._admission.admit(bound)
        return self.lease

    def receive(self, bound: int) -> Lease:
        """The same before a large body is received. Errors: Busy where it would hardly be computed."""
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

    def release_slot(self) -> None:
        """Let another request compute."""
        if self.lease is not None:
            self.lease.release_slot()

    def release(self) -> None:
        """Give everything back. Safe to call twice."""
        if self.lease is not None:
            self.lease.release()
