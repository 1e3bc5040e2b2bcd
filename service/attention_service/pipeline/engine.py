"""The engine: admission control, plans, backends and batches, which all requests of a worker share."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from attention_service.attention.cost import copied_bytes
from attention_service.attention.plan import Plan
from attention_service.attention.spec import AttentionSpec
from attention_service.backends.base import Backend
from attention_service.backends.registry import Backends
from attention_service.errors import Busy
from attention_service.layers.store import LayerStore
from attention_service.pipeline.admission import AdmissionController
from attention_service.pipeline.batching import Batcher, can_batch
from attention_service.pipeline.execution import Execution, Timings
from attention_service.pipeline.layers import Layers
from attention_service.pipeline.prepare import PlanCache, Strategy
from attention_service.settings import Settings

logger = logging.getLogger("attention")

# Seconds that a small request waits for others if a GPU computes, unless the settings give a number.
BATCH_WINDOW: Final = 0.002
# Bytes that a computation in the event loop may take: the system clears fresh memory in some milliseconds.
INLINE_MEMORY: Final = 2**23
# How many times as much is computed in the event loop while no other counted request is in progress: milliseconds.
IDLE_FACTOR: Final = 20


class Engine:
    """The objects that all requests of a worker share, made from the settings.

    admission: grants memory and slots; plans: prepares requests
    layers: the stored layers
    batcher: computes small requests in batches, None where that would not help
    chunk_lock: held while a chunk of a response is encoded
    ready: True once the first request is as quick as all others; stopping: True once the service was told to stop
    new_timings: makes the timings of a request; traces need other ones
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        queue = -(-settings.queue // settings.workers)  # rounded up
        self.admission = AdmissionController(settings.concurrency, settings.memory_limit // settings.workers, queue)
        self.plans = PlanCache(self._choose_strategy)
        self.layers = Layers(None if settings.layers is None else LayerStore(settings.layers, settings.layer_bytes))
        self.chunk_lock = asyncio.Lock()
        self.stopping = False
        self.new_timings: Callable[[], Timings] = Timings
        self._backends = Backends(settings.backend, settings.compute_threads, settings.experimental)
        if settings.backend == "auto" and self._backends.preferred == "numpy":
            logger.warning("ATTENTION_BACKEND=auto: torch is not there, or sees no GPU; NumPy computes")
        window = settings.batch_window
        if window is None:
            window = BATCH_WINDOW if self._backends.choose("auto", "auto").is_gpu("auto") else 0.0
        self.batcher: Batcher | None = None
        if window:
            padding = "padding" in settings.experimental
            self.batcher = Batcher(window, self.admission, settings.inline_flops, padding=padding)
        self.ready = self._backends.preferred == "numpy"

    @property
    def reference(self) -> Backend:
        """The backend that computes in float64 what outputs are compared with."""
        return self._backends.choose("numpy", "cpu")

    def warm_up(self) -> None:
        """Load the preferred backend, so that the first request need not wait for it."""
        self._backends.choose("auto", "auto").warm_up("auto")
        self.ready = True
        logger.info("ready to compute with %s", self._backends.preferred)

    def check_running(self) -> None:
        """Raise Busy once the service was told to stop."""
        if self.stopping:
            raise Busy.at("", "a server that takes requests", "one that stops", headers={"Retry-After": "1"})

    def check_ready(self) -> None:
        """Raise Busy while the service loads, stops, or would refuse a large request."""
        self.check_running()
        if not self.ready:
            expected = "a service that has loaded all that it computes with"
            raise Busy.at("", expected, "one that is loading it", headers={"Retry-After": "1"})
        if self.admission.full:
            raise self.admission.busy()

    def start(self, disconnected: Callable[[], Awaitable[None]] | None = None) -> Execution:
        """A new request. disconnected: returns when its client is disconnected"""
        return Execution(self.admission, self.settings.time_limit, disconnected, self.new_timings())

    def _choose_strategy(self, spec: AttentionSpec, plan: Plan, shared: bool) -> Strategy:
        """Choose the backend, and the place: event loop, worker thread or batch. Errors: UnknownBackend.

        shared: True if later requests may reuse the plan
        """
        backend, most = self._backends.choose(spec.backend, spec.device), self.settings.inline_flops
        memory = backend.peak_bytes(plan, spec.device, copied_bytes(plan, spec))
        program = backend.program(plan, spec.without_sources())
        if shared and self.batcher is not None and plan.flops <= most and can_batch(plan, backend, spec.device):
            return Strategy(backend, program, memory, "batch")
        if backend.is_gpu(spec.device) or memory > INLINE_MEMORY or plan.flops > IDLE_FACTOR * most:
            return Strategy(backend, program, memory, "thread")
        return Strategy(backend, program, memory, "inline" if plan.flops <= most else "inline if idle")
