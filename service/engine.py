"""One way to compute, whoever asks: check the cost, run on a backend."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Final, Literal

import numpy as np
from anyio import to_thread
from pydantic import ByteSize

from service import backends
from service.attention.operands import make_operands
from service.attention.plan import Plan
from service.attention.result import Result, make_result
from service.attention.spec import SCORE_MATRICES, AttentionSpec
from service.errors import Busy, Fault, MemoryLimit
from service.gate import Gate, Permit
from service.jobs import Job
from service.settings import Settings
from service.stop import Stop

HEADER: Final = b"decode;dur=%.3f, plan;dur=%.3f, queue;dur=%.3f, compute;dur=%.3f"
Step = Literal["decode", "plan", "queue", "compute", "encode"]


class Timings:
    """Seconds spent on each step of one request."""

    __slots__ = ("_since", "compute", "decode", "encode", "plan", "queue")

    def __init__(self) -> None:
        self.decode = self.plan = self.queue = self.compute = self.encode = 0.0

    def begin(self) -> None:
        """Leave out the time until now."""
        self._since = time.perf_counter()

    def step(self, name: Step) -> None:
        """Book the time since the last step under this name."""
        now = time.perf_counter()
        setattr(self, name, getattr(self, name) + now - self._since)
        self._since = now

    def header(self) -> bytes:
        """The value of a Server-Timing header (W3C Server Timing), in milliseconds, without what was not done yet."""
        done = self.decode * 1e3, self.plan * 1e3, self.queue * 1e3, self.compute * 1e3
        if not self.encode:
            return HEADER % done
        return (HEADER + b", encode;dur=%.3f") % (*done, self.encode * 1e3)


class Call:
    """One request on its way: its times, and what it holds until it is answered."""

    __slots__ = ("_permits", "_seconds", "_stop", "timings")

    def __init__(self, seconds: float) -> None:
        self.timings = Timings()
        self._seconds = seconds
        self._stop: Stop | None = None
        self._permits: list[Permit] = []

    @property
    def stop(self) -> Stop:
        """What ends it early, from when that is first asked for: what is quick does not need it."""
        if self._stop is None:
            self._stop = Stop(self._seconds)
        return self._stop

    def hold(self, permit: Permit) -> None:
        """Keep what a permit grants until the end."""
        self._permits.append(permit)

    def keep(self, memory: int) -> None:
        """Give back what of the memory for the body is above this."""
        if self._permits:
            self._permits[0].keep(memory)

    def resize(self, memory: int) -> None:
        """Hold this much in the place of the memory for the body. Errors: Busy."""
        self._permits[0].resize(memory)

    def leave(self) -> None:
        """Give everything back."""
        for permit in self._permits:
            permit.leave()


class Engine:
    """Computes attention within the limits of the settings.

    bodies: the gate to memory for bodies and what is read from them
    work: the gate to places and memory for computing
    stopping: whether the service has been told to stop
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.bodies = Gate(math.inf, settings.body_memory, settings.places_to_wait)
        self.work = Gate(settings.concurrency, settings.work_memory, settings.places_to_wait)
        self.stopping = False
        backends.use_threads(settings.compute_threads)

    def is_quick(self, job: Job) -> bool:
        """Whether computing takes less time than handing it to a thread would."""
        return job.plan.flops <= self._settings.inline_flops

    def check_ready(self) -> None:
        """Whether requests are welcome, large ones too. Errors: Busy where they are not."""
        if self.stopping:
            raise Busy(Fault("", "a server that takes requests", "one that stops"), headers={"Retry-After": "1"})
        for gate in (self.work, self.bodies):
            if gate.refuses:
                raise gate.busy()

    async def attend(self, job: Job, call: Call, beside: int = 0) -> Result:
        """Compute without blocking the event loop for long.

        beside: bytes that a large answer takes beside what is computed, held until all is given back
        Errors: InvalidRequest, MemoryLimit, Busy, TimeLimit.
        """
        memory = job.plan.peak_bytes + beside
        self._admit(job.plan, memory)
        if self.is_quick(job):
            result = execute(job.plan, job.spec, job.sources)
        else:
            permit = await self.work.enter(memory, call.stop)
            call.hold(permit)
            call.timings.step("queue")
            try:
                result = await to_thread.run_sync(execute, job.plan, job.spec, job.sources, call.stop)
            finally:
                permit.leave_place()
        call.timings.step("compute")
        return result

    def compute(self, job: Job) -> Result:
        """The same without an event loop."""
        self._admit(job.plan, job.plan.peak_bytes)
        return execute(job.plan, job.spec, job.sources)

    def _admit(self, plan: Plan, memory: int) -> None:
        limit = self.work.memory
        if memory > limit:
            raise MemoryLimit.at(
                "",
                f"a request that needs at most {ByteSize(limit).human_readable()}",
                f"one that needs about {ByteSize(memory).human_readable()}",
                _advice(plan),
            )


def _advice(plan: Plan) -> str:
    """What would make a plan smaller."""
    returned = plan.selection.include & SCORE_MATRICES
    if not returned:
        return "fewer queries or keys at a time need less"
    if returned == {"attention_weights"} and plan.selection.top_k is None:
        return "top_k, select_queries, select_heads, or include without attention_weights need less"
    return f"include without {', '.join(sorted(returned))} needs less"


# Overflow is found by looking at the numbers, with an error that says what to do; a warning would add nothing.
@np.errstate(all="ignore")
def execute(plan: Plan, spec: AttentionSpec, sources: Mapping[str, np.ndarray], stop: Stop | None = None) -> Result:
    """Do as planned, with the numbers of the request, on the backend that it asks for.

    sources: the fields that query, key and value come from; stop: looked at between tiles

    Errors: InvalidRequest; Abandoned and TimeLimit by `stop`.
    """
    executor = backends.choose(spec.backend, spec.device)
    if (result := executor.quick(plan, sources, spec.device)) is not None:
        return result
    check = None if stop is None else stop.check
    return make_result(plan, executor.execute(plan, make_operands(spec, plan, sources), spec.device, check))
