"""One way to compute, whoever asks: check the cost, run on a backend."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

import numpy as np
from anyio import to_thread
from pydantic import ByteSize

from service import backends
from service.attention.operands import make_operands
from service.attention.plan import Plan
from service.attention.result import Result, make_result
from service.attention.spec import SCORE_MATRICES, AttentionSpec, Backend
from service.backends import Executor
from service.backends.room import NoRoom
from service.batches import Batches
from service.errors import Busy, Fault, MemoryLimit
from service.gate import Gate, Permit
from service.jobs import Job
from service.process import memory_left
from service.settings import Settings
from service.stop import Stop

logger = logging.getLogger("attention")

# Seconds that a small request waits for others where a GPU computes, unless the settings say.
BATCH_WINDOW: Final = 0.002
# How many times as much is computed in the event loop while nobody else is at work: some milliseconds, at most.
ALONE: Final = 20
HEADER: Final = b"decode;dur=%.3f, plan;dur=%.3f, queue;dur=%.3f, compute;dur=%.3f"
Step = Literal["decode", "plan", "queue", "compute", "encode"]


class Timings:
    """Seconds spent on each step of one request."""

    __slots__ = ("_since", "batch", "compute", "decode", "encode", "plan", "queue")

    def __init__(self) -> None:
        self.decode = self.plan = self.queue = self.compute = self.encode = 0.0
        self.batch = 1  # requests that were computed together

    def begin(self) -> None:
        """Leave out the time until now."""
        self._since = time.perf_counter()

    def step(self, name: Step) -> None:
        """Book the time since the last step under this name."""
        now = time.perf_counter()
        setattr(self, name, getattr(self, name) + now - self._since)
        self._since = now

    def begin_batch(self, size: int) -> None:
        """Book the time since the last step as waiting, of a request that is computed together with others."""
        self.step("queue")
        self.batch = size

    def header(self) -> bytes:
        """The value of a Server-Timing header (W3C Server Timing), in milliseconds, without what was not done yet."""
        done = self.decode * 1e3, self.plan * 1e3, self.queue * 1e3, self.compute * 1e3
        text = HEADER % done if self.batch == 1 else HEADER % done + b', batch;desc="%d"' % self.batch
        return text + b", encode;dur=%.3f" % (self.encode * 1e3) if self.encode else text


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


class Way(NamedTuple):
    """How a job is computed.

    memory: bytes that it takes; inline: in the event loop; alone: there, too, while nobody else is at work; gathers:
    with others like it
    """

    executor: Executor
    memory: int
    inline: bool
    alone: bool
    gathers: bool


class Engine:
    """Computes attention within the limits of the settings.

    bodies: the gate to memory for bodies and what is read from them
    work: the gate to places and memory for computing
    batches: what computes small requests together; None where that would not help
    ready: whether the first request is as quick as all others
    stopping: whether the service has been told to stop
    """

    _number = itertools.count()

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._name = f"way of engine {next(self._number)}"
        self.bodies = Gate(math.inf, settings.body_memory, settings.places_to_wait)
        self.work = Gate(settings.concurrency, settings.work_memory, settings.places_to_wait)
        self.stopping = False
        backends.use_threads(settings.compute_threads)
        self._preferred = backends.prefer(settings.backend)
        if settings.backend == "auto" and self._preferred == "numpy":
            logger.warning("ATTENTION_BACKEND=auto: torch is not there, or sees no GPU; NumPy computes")
        executor = self._executor("auto", "auto")
        window = settings.batch_window
        if window is None:
            window = BATCH_WINDOW if executor.is_apart("auto") else 0.0
        self.batches = Batches(window, self.work, settings.inline_flops, execute) if window else None
        self.ready = self._preferred == "numpy"

    def warm_up(self) -> None:
        """Let the first request find everything loaded."""
        self._executor("auto", "auto").warm_up("auto")
        self.ready = True
        logger.info("ready to compute with %s", self._preferred)

    def is_quick(self, job: Job) -> bool:
        """Whether computing takes less time than handing it to a thread would. Errors: UnknownBackend."""
        return self._way(job).inline

    def is_at_once(self, job: Job) -> bool:
        """Whether it would be computed before anything else is done, as nobody else is at work. Errors: UnknownBackend.

        In a thread it would take longer by the time that two threads need to wake each other.
        """
        way = self._way(job)
        return way.inline or (way.alone and not self.work.taken and not self.work.waiting and self.bodies.taken <= 1)

    def _way(self, job: Job) -> Way:
        """How a job is computed, worked out once for all that have the same plan. Errors: UnknownBackend."""
        way: Way | None = job.plan.prepared.get(self._name)
        if way is None:
            way = job.plan.prepared[self._name] = self._find_way(job)
        return way

    def _find_way(self, job: Job) -> Way:
        plan, spec = job.plan, job.spec
        executor = self._executor(spec.backend, spec.device)
        small = plan.flops <= self._settings.inline_flops
        gathers = small and self.batches is not None and self.batches.takes(job, executor)
        here = not gathers and not executor.is_apart(spec.device)
        alone = here and plan.flops <= ALONE * self._settings.inline_flops
        return Way(executor, executor.peak_bytes(plan, spec.device), here and small, alone, gathers)

    def _executor(self, backend: Backend, device: str) -> Executor:
        return backends.choose(backend, device, self._preferred)

    def check_ready(self) -> None:
        """Whether requests are welcome, large ones too, and as quick as ever. Errors: Busy where they are not."""
        if self.stopping:
            raise Busy(Fault("", "a server that takes requests", "one that stops"), headers={"Retry-After": "1"})
        if not self.ready:
            fault = Fault("", "a service that has loaded all that it computes with", "one that is loading it")
            raise Busy(fault, headers={"Retry-After": "1"})
        for gate in (self.work, self.bodies):
            if gate.refuses:
                raise gate.busy()

    async def attend(self, job: Job, call: Call, beside: int = 0) -> Result:
        """Compute without blocking the event loop for long.

        beside: bytes that a large answer takes beside what is computed, held until all is given back
        Errors: InvalidRequest, MemoryLimit, Busy, TimeLimit.
        """
        way = self._way(job)
        memory = way.memory + beside
        self._admit(job, memory)
        if way.inline:
            result = execute(job, way.executor)
        elif way.gathers and self.batches is not None:
            result = await self.batches.attend(job, way.executor, memory, call.stop, call.timings.begin_batch)
        else:
            at_once = self.is_at_once(job)
            permit = await self.work.enter(memory, call.stop)
            call.hold(permit)
            call.timings.step("queue")
            try:
                if at_once:
                    result = execute(job, way.executor)
                else:
                    result = await to_thread.run_sync(execute, job, way.executor, call.stop)
            finally:
                permit.leave_place()
        call.timings.step("compute")
        return result

    def compute(self, job: Job) -> Result:
        """The same without an event loop."""
        way = self._way(job)
        self._admit(job, way.memory)
        return execute(job, way.executor)

    def _admit(self, job: Job, memory: int) -> None:
        if memory > self.work.memory:
            raise memory_limit(job.plan, memory, self.work.memory)


def _advice(plan: Plan) -> str:
    """What would make a plan smaller."""
    returned = plan.selection.include & SCORE_MATRICES
    if not returned:
        return "fewer queries or keys at a time need less"
    if returned == {"attention_weights"} and plan.selection.top_k is None:
        return "top_k, select_queries, select_heads, or include without attention_weights need less"
    return f"include without {', '.join(sorted(returned))} needs less"


def memory_limit(plan: Plan, needed: int, there: int | None) -> MemoryLimit:
    """The refusal of what needs more memory than there is, known before by an estimate or seen when it failed."""
    about = f"one that needs about {ByteSize(needed).human_readable()}"
    if there is None or needed <= there:  # it failed for all that, so that only this much is known
        left = "" if there is None else f", of {ByteSize(there).human_readable()} that are free"
        return MemoryLimit.at("", "a request whose memory can be had", f"{about}{left}", _advice(plan))
    limit = f"a request that needs at most {ByteSize(there).human_readable()}"
    return MemoryLimit.at("", limit, about, _advice(plan))


def execute(job: Job, executor: Executor, stop: Stop | None = None) -> Result:
    """Do as planned, with the numbers of the request, on a backend.

    stop: looked at between tiles. Errors: InvalidRequest, MemoryLimit; Abandoned and TimeLimit by `stop`.
    """
    try:
        return run(job.plan, job.spec, job.sources, executor, stop)
    except NoRoom as error:
        needed, there = error.needed, error.there
    except MemoryError:
        needed, there = executor.peak_bytes(job.plan, job.spec.device), None
    if there is None:
        there = memory_left()
    raise memory_limit(job.plan, needed, there)


# Overflow is found by looking at the numbers, with an error that says what to do; a warning would add nothing.
@np.errstate(all="ignore")
def run(
    plan: Plan, spec: AttentionSpec, sources: Mapping[str, np.ndarray], executor: Executor, stop: Stop | None = None
) -> Result:
    """The same as `execute`, wherever it is asked from.

    sources: the fields that query, key and value come from. Errors: MemoryError and InvalidRequest; those of `stop`.
    """
    if (result := executor.quick(plan, sources, spec.device)) is not None:
        return result
    check = None if stop is None else stop.check
    return make_result(plan, executor.execute(plan, make_operands(spec, plan, sources), spec.device, check))
