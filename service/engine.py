"""One way to compute, whoever asks: check the cost, run on a backend."""

from __future__ import annotations

import time

import numpy as np
from anyio import to_thread

from service import backends
from service.attention.operands import make_operands
from service.attention.plan import Plan
from service.attention.result import Result, make_result
from service.attention.spec import AttentionSpec
from service.errors import MemoryLimit
from service.jobs import Job
from service.settings import Settings


class Timings:
    """Seconds spent on each step of one request, in order."""

    __slots__ = ("_since", "seconds")

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    def step(self, name: str) -> None:
        """Book the time since the last step under this name."""
        now = time.perf_counter()
        self.seconds[name] = now - self._since
        self._since = now

    def header(self) -> str:
        """The value of a Server-Timing header (W3C Server Timing), in milliseconds."""
        return ", ".join([f"{name};dur={seconds * 1e3:.3f}" for name, seconds in self.seconds.items()])


class Engine:
    """Computes attention within the limits of the settings."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        backends.use_threads(settings.compute_threads)

    async def attend(self, job: Job, timings: Timings) -> Result:
        """Compute without blocking the event loop for long. Errors: InvalidRequest, MemoryLimit."""
        self._admit(job.plan)
        if job.plan.flops <= self._settings.inline_flops:
            return self._run(job, timings)
        return await to_thread.run_sync(self._run, job, timings)

    def compute(self, job: Job) -> Result:
        """The same without an event loop."""
        self._admit(job.plan)
        return self._run(job, Timings())

    def _admit(self, plan: Plan) -> None:
        limit = self._settings.memory_limit
        if plan.peak_bytes > limit:
            raise MemoryLimit.at(
                "",
                f"a request that needs at most {limit.human_readable()}",
                f"one that needs about {type(limit)(plan.peak_bytes).human_readable()}",
                "fewer stages in include need less",
            )

    def _run(self, job: Job, timings: Timings) -> Result:
        timings.step("queue")
        result = execute(job.plan, job.spec)
        timings.step("compute")
        return result


# Overflow is found by looking at the numbers, with an error that says what to do; a warning would add nothing.
@np.errstate(all="ignore")
def execute(plan: Plan, spec: AttentionSpec) -> Result:
    """Do as planned, with the numbers of the request, on the backend that it asks for. Errors: InvalidRequest."""
    executor = backends.choose(spec.backend, spec.device)
    return make_result(plan, executor.execute(plan, make_operands(spec, plan), spec.device))
