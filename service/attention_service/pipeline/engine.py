"""The engine: admission control, stored layers and backends, which all requests of a worker share."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from attention_service.backends.base import Backend
from attention_service.backends.registry import Backends
from attention_service.errors import Busy
from attention_service.layers.store import LayerStore
from attention_service.pipeline.admission import AdmissionController
from attention_service.pipeline.attention import AttentionOperation
from attention_service.pipeline.calls import CallOperation
from attention_service.pipeline.execution import Execution, Timings
from attention_service.pipeline.layers import Layers
from attention_service.runtime.memory import FreeMemory
from attention_service.settings import Settings

logger = logging.getLogger("attention")

# Bytes of free memory that a process keeps at most, beside large limits.
MOST_FREE: Final = 64 * 2**20


class Engine:
    """The objects that all requests of a worker share, made from the settings.

    admission: grants memory and slots; layers: the stored layers
    attention: the operation, with the plans that it keeps; call: of other libraries
    chunk_lock: held while a chunk of a response is encoded
    ready: True once the first request is as quick as all others; stopping: True once the service was told to stop
    new_timings: makes the timings of a request; traces need other ones
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        queue = -(-settings.queue // settings.workers)  # rounded up
        self.admission = AdmissionController(settings.concurrency, settings.memory_limit // settings.workers, queue)
        allowed = min(MOST_FREE, self.admission.memory // 16)
        self.admission.on_release = FreeMemory(allowed, lambda: self.admission.memory - self.admission.free).check_soon
        self.layers = Layers(None if settings.layers is None else LayerStore(settings.layers, settings.layer_bytes))
        self.chunk_lock = asyncio.Lock()
        self.stopping = False
        self.new_timings: Callable[[], Timings] = Timings
        self._backends = Backends(settings.backend, settings.compute_threads, settings.cluster)
        if settings.backend == "auto" and self._backends.preferred == "numpy":
            logger.warning("ATTENTION_BACKEND=auto: torch is not there, or sees no GPU; NumPy computes")
        self.attention = AttentionOperation(self._backends)
        self.call = CallOperation(self._backends)
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

    def check_alive(self) -> None:
        """Raise Busy once this process can no longer use its GPU, and must be started anew."""
        if self._backends.lost:
            raise Busy.at("", "a process that can use its GPU", "one that CUDA refuses", headers={"Retry-After": "1"})

    def check_ready(self) -> None:
        """Raise Busy while the service loads or stops, and once it must be started anew.

        Load is no reason: a full queue refuses requests by itself.
        """
        self.check_alive()
        self.check_running()
        if not self.ready:
            expected = "a service that has loaded all that it computes with"
            raise Busy.at("", expected, "one that is loading it", headers={"Retry-After": "1"})

    def start(self, disconnected: Callable[[], Awaitable[None]] | None = None) -> Execution:
        """A new request. disconnected: returns when its client is disconnected"""
        return Execution(self.admission, self.settings.time_limit, disconnected, self.new_timings())
