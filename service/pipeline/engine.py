"""Runs requests within the limits of the settings: decode and prepare, admit, compute."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from anyio import to_thread
from pydantic import ByteSize

from service.attention.outputs import OUTPUTS
from service.attention.plan import Plan
from service.attention.result import Result
from service.backends.base import Backend, OutOfMemory
from service.backends.registry import Backends
from service.codecs.chunks import ENCODE_BYTES
from service.codecs.decoded import Body
from service.errors import Busy, Fault, MemoryLimit
from service.pipeline.admission import AdmissionController
from service.pipeline.batching import Batcher
from service.pipeline.deadline import Deadline
from service.pipeline.estimate import estimate
from service.pipeline.execution import UNCOUNTED, Execution
from service.pipeline.preparation import Decoder, PreparedRequest, decode, plan
from service.runtime.machine import memory_left
from service.schemas.request import AttentionRequest
from service.settings import Settings

logger = logging.getLogger("attention")

T = TypeVar("T")

# Seconds that a small request waits for others where a GPU computes, unless the settings say.
BATCH_WINDOW: Final = 0.002
# Bytes that a computation in the event loop may take: the system clears fresh memory in some milliseconds.
INLINE_MEMORY: Final = 2**23
# How many times as much is computed in the event loop while no other request is at work: some milliseconds, at most.
ALONE: Final = 20


class Strategy(NamedTuple):
    """How requests of one plan are computed.

    memory: bytes that computing takes beyond the arrays of the request; inline: in the event loop; inline_if_idle:
    there while no other request is at work, else in a worker thread; batched: together with others like it
    """

    executor: Backend
    memory: int
    inline: bool
    inline_if_idle: bool
    batched: bool


class Engine:
    """Computes attention within the limits of the settings.

    admission: grants memory and slots; batcher: computes small requests in batches, None where that would not help
    encoding: held while a chunk of a response is encoded
    ready: True once the first request is as quick as all others; stopping: True once the service was told to stop
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._strategies: WeakKeyDictionary[Plan, Strategy] = WeakKeyDictionary()
        self.admission = AdmissionController(
            settings.concurrency, settings.memory_per_worker, settings.queue_per_worker
        )
        self.stopping = False
        self.backends = Backends(settings.backend, settings.compute_threads, settings.experimental)
        if settings.backend == "auto" and self.backends.preferred == "numpy":
            logger.warning("ATTENTION_BACKEND=auto: torch is not there, or sees no GPU; NumPy computes")
        executor = self.backends.choose("auto", "auto")
        window = settings.batch_window
        if window is None:
            window = BATCH_WINDOW if executor.is_gpu("auto") else 0.0
        self.batcher = (
            Batcher(window, self.admission, settings.inline_flops, execute, padding="padding" in settings.experimental)
            if window
            else None
        )
        self.encoding = asyncio.Lock()
        self.ready = self.backends.preferred == "numpy"

    def warm_up(self) -> None:
        """Load what the first request would have to wait for."""
        self.backends.choose("auto", "auto").warm_up("auto")
        self.ready = True
        logger.info("ready to compute with %s", self.backends.preferred)

    def check_ready(self) -> None:
        """Raise Busy while the service loads, stops, or would refuse a large request."""
        if self.stopping:
            raise Busy(Fault("", "a server that takes requests", "one that stops"), headers={"Retry-After": "1"})
        if not self.ready:
            fault = Fault("", "a service that has loaded all that it computes with", "one that is loading it")
            raise Busy(fault, headers={"Retry-After": "1"})
        if self.admission.full:
            raise self.admission.busy()

    def start(self) -> Execution:
        """A new request."""
        return Execution(self.admission, self._settings.time_limit)

    async def prepare(
        self, model: type[AttentionRequest], decoder: Decoder, body: Body, execution: Execution
    ) -> PreparedRequest:
        """Decode and prepare a body: in the event loop where that is quick, else in a worker thread.

        Errors: ServiceError of every kind; Cancelled.
        """
        limit, timings = self._settings.max_body_bytes, execution.timings
        if execution.lease is None and not decoder.packed:
            return plan(model, decoder.decode(body, limit), timings)
        needed = decoder.decode_bytes(body, limit)
        if needed > self.admission.memory:
            raise _too_large_to_decode(needed, self.admission.memory)
        await execution.grow(needed)
        decoded = decoder.decode(body, limit) if len(body) <= decoder.inline else decoder.quick(body)
        if decoded is not None:
            prepared = plan(model, decoded, timings)
        else:
            await execution.grow(needed, slot=True)
            timings.step("queue")
            prepared = await in_thread(execution.deadline, decode, model, decoder, body, limit, timings)
            execution.release_slot()
        execution.shrink(prepared.nbytes)
        return prepared

    def is_inline(self, request: PreparedRequest) -> bool:
        """True if a request will be computed in the event loop, before anything else. Errors: UnknownBackend.

        While no other request is at work that is quicker for larger ones too: threads need time to wake each other.
        """
        strategy = self._strategy(request)
        return strategy.inline or (strategy.inline_if_idle and self.admission.at_work <= 1)

    async def attend(self, request: PreparedRequest, execution: Execution, encoding: int = ENCODE_BYTES) -> Result:
        """Compute without blocking the event loop for long.

        encoding: bytes that it takes to encode the result, beside the result

        Errors: InvalidRequest, MemoryLimit, Busy, TimeLimit, Cancelled.
        """
        strategy = self._strategy(request)
        held = memory = 0
        if execution.lease is not None or strategy.memory > UNCOUNTED:
            held = request.nbytes
            memory = self._memory(request, held, strategy.executor, encoding)
        if strategy.batched and self.batcher is not None:
            if memory:  # of its own; the batch has a lease for computing
                await execution.grow(held + request.plan.returned_bytes + encoding, compute=True)
            result = await self.batcher.attend(request, strategy.executor, strategy.memory, execution)
        elif self.is_inline(request):
            await execution.grow(memory, compute=True)
            result = execute(request, strategy.executor)
        else:
            await execution.grow(memory, slot=True, compute=True)
            execution.timings.step("queue")
            result = await in_thread(execution.deadline, execute, request, strategy.executor, execution.deadline)
            execution.release_slot()
        execution.timings.step("compute")
        if execution.lease is not None:
            execution.lease.shrink(held + result.nbytes + encoding)
        return result

    def compute(self, request: PreparedRequest) -> Result:
        """The same without an event loop. Errors: InvalidRequest, MemoryLimit."""
        strategy = self._strategy(request)
        self._memory(request, request.nbytes, strategy.executor, ENCODE_BYTES)
        return execute(request, strategy.executor)

    def _strategy(self, request: PreparedRequest) -> Strategy:
        """Worked out once for all requests of one plan. Errors: UnknownBackend."""
        strategy = self._strategies.get(request.plan)
        if strategy is None:
            strategy = self._strategies[request.plan] = self._choose_strategy(request)
        return strategy

    def _choose_strategy(self, request: PreparedRequest) -> Strategy:
        plan, spec = request.plan, request.spec
        executor = self.backends.choose(spec.backend, spec.device)
        small = plan.flops <= self._settings.inline_flops
        batched = small and self.batcher is not None and self.batcher.takes(request, executor)
        local = not batched and not executor.is_gpu(spec.device)
        memory = executor.peak_bytes(plan, spec.device)
        inline = local and memory <= INLINE_MEMORY
        idle = inline and plan.flops <= ALONE * self._settings.inline_flops
        return Strategy(executor, memory, inline and small, idle, batched)

    def _memory(self, request: PreparedRequest, held: int, executor: Backend, encoding: int) -> int:
        """Bytes that a request takes from now on. held: by its arrays

        Errors: MemoryLimit if that is more than there is.
        """
        plan, spec, sources = request.plan, request.spec, request.sources
        memory = estimate(plan, spec, sources, executor, held, decode=0, encode=encoding).peak
        if memory > self.admission.memory:
            raise memory_limit(plan, memory, self.admission.memory)
        return memory


async def in_thread(deadline: Deadline, function: Callable[..., T], *arguments: Any) -> T:
    """Call a function in a worker thread. If this task is cancelled, the deadline ends, and with it the function."""
    try:
        return await to_thread.run_sync(function, *arguments)
    except asyncio.CancelledError:
        deadline.cancel()
        raise


def _too_large_to_decode(needed: int, budget: int) -> MemoryLimit:
    expected = f"a body that takes at most {ByteSize(budget).human_readable()} while it is decoded"
    return MemoryLimit.at("", expected, f"one that takes about {ByteSize(needed).human_readable()}")


def _advice(plan: Plan) -> str:
    """What would make a plan smaller."""
    returned = {name for name in plan.selection.include if OUTPUTS[name].is_score_matrix}
    if not returned:
        return "fewer queries or keys at a time need less"
    if returned == {"attention_weights"} and plan.selection.top_k is None:
        return "top_k, select_queries, select_heads, or include without attention_weights need less"
    return f"include without {', '.join(sorted(returned))} needs less"


def memory_limit(plan: Plan, needed: int, available: int | None) -> MemoryLimit:
    """The error for a request that needs more memory than there is, by its estimate or because allocation failed."""
    about = f"one that needs about {ByteSize(needed).human_readable()}"
    if available is None or needed <= available:  # it failed all the same, so that only this much is known
        left = "" if available is None else f", of {ByteSize(available).human_readable()} that are free"
        return MemoryLimit.at("", "a request whose memory can be had", f"{about}{left}", _advice(plan))
    limit = f"a request that needs at most {ByteSize(available).human_readable()}"
    return MemoryLimit.at("", limit, about, _advice(plan))


def execute(request: PreparedRequest, executor: Backend, deadline: Deadline | None = None) -> Result:
    """Compute a prepared request on a backend.

    deadline: checked between tiles. Errors: InvalidRequest, MemoryLimit; Cancelled and TimeLimit by the deadline.
    """
    try:
        check = None if deadline is None else deadline.check
        return executor.run(request.plan, request.spec, request.sources, check)
    except OutOfMemory as error:
        needed, available = error.needed, error.available
    except MemoryError:
        needed, available = executor.peak_bytes(request.plan, request.spec.device), None
    if available is None:
        available = memory_left()
    raise memory_limit(request.plan, needed, available)
