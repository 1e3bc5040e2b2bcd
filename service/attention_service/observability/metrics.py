"""The metrics of the service, which prometheus_client counts.

A single worker keeps their values in memory. Several workers write them to files in one folder, and a scrape of any
worker adds up the files of all: the multiprocess mode of prometheus_client.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from typing import Final

# prometheus_client chooses its mode by PROMETHEUS_MULTIPROC_DIR when it is imported.
if folder := os.environ.get("ATTENTION_METRICS_FOLDER"):
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.multiprocess import MultiProcessCollector

from attention_service.errors import error_classes
from attention_service.observability.requests import RequestRecord
from attention_service.pipeline.admission import AdmissionController
from attention_service.version import __version__

# Upper bounds of the buckets of a histogram, in seconds.
BUCKETS: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
# Seconds between two updates for scrapes of other workers.
UPDATE_INTERVAL: Final = 1.0
# Requests with the same labels that are handed over at once, in about a millisecond.
MAX_UNCOUNTED: Final = 1000


# What the counters of a request are labelled by: protocol, operation, status and code; and if it was computed the media
# types of request and response, backend and kernel.
_Key = tuple[str, str, int, str | None, tuple[str, str, str, str] | None]


class _Totals:
    """Sums over requests whose counters have the same labels, since they were last handed over.

    seconds: that each took
    """

    __slots__ = ("compute", "decode", "encode", "queue", "received", "seconds", "sent")

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.received = self.sent = 0
        self.decode = self.queue = self.compute = self.encode = 0.0

    def add(self, request: RequestRecord) -> None:
        """Add a request."""
        self.seconds.append(request.seconds)
        if (computed := request.computed) is not None and (timings := request.timings) is not None:
            self.received += computed.received
            self.sent += request.sent
            self.decode += timings.decode
            self.queue += timings.queue
            self.compute += timings.compute
            self.encode += timings.encode


class Metrics:
    """The metrics of one application, in a registry of its own, as one process may have several applications.

    in_flight: requests that are not answered yet
    shared: True in multiprocess mode, where a scrape of any worker shows the metrics of all

    All methods but `exposition` run in the event loop.
    """

    def __init__(self, admission: AdmissionController) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # they would double the number of series
        self.registry = registry = CollectorRegistry()
        self.in_flight = 0
        self._totals: dict[_Key, _Totals] = {}

        def counters(name: str, text: str, *labels: str) -> Callable[..., Counter]:
            """The counter of each combination of labels, cached, as finding it takes longer than counting."""
            return cache(Counter(name, text, labels, registry=registry).labels)

        self._requests = counters(
            "attention_requests", "Requests, by protocol, operation and HTTP status.", "protocol", "operation", "status"
        )
        self._problems = counters(
            "attention_problems", "Requests that were answered with a problem, by its code.", "code"
        )
        for code in error_classes():  # from 0 on, as increase() does not see the first sample of a series
            self._problems(code)
        seconds = "Time from the request head to the end of the response."
        self._seconds = cache(
            Histogram("attention_request_seconds", seconds, ("operation",), registry=registry, buckets=BUCKETS).labels
        )
        self._received = counters("attention_received_bytes", "Bytes of request bodies with tensors.", "media_type")
        self._sent = counters("attention_sent_bytes", "Bytes of responses with tensors.", "media_type")
        self._computed = counters("attention_computed", "Requests that were computed.", "backend", "kernel")
        self._compute = counters("attention_compute_seconds", "Time spent computing.", "backend", "kernel")
        self._decode = counters("attention_decode_seconds", "Time spent decoding bodies.", "media_type")
        encode = "Time spent encoding responses before they are sent."
        self._encode = counters("attention_encode_seconds", encode, "media_type")
        queue = "Time spent waiting for a slot or memory."
        self._queue = Counter("attention_queue_seconds", queue, registry=registry)
        self._gauges = _gauges(self, admission)
        self._folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
        self.shared = self._folder is not None
        if self.shared:
            self._exposed = CollectorRegistry()
            MultiProcessCollector(self._exposed, self._folder)  # type: ignore[no-untyped-call]
            name, text = "process_start_time_seconds", "When the worker that is youngest started, since the Unix epoch."
            Gauge(name, text, registry=registry, multiprocess_mode="livemax").set(time.time())
        else:
            self._exposed = self.registry
            for collector in (ProcessCollector, PlatformCollector, GCCollector):
                collector(registry=self.registry)

    def start_at_0(self, protocol: str, operation: str, statuses: Iterable[int]) -> None:
        """Expose the metrics of an operation with 0 before its first request.

        Prometheus sees no increase in the first sample of a series: an alert would miss the first 503.
        """
        for status in statuses:
            self._requests(protocol, operation, status)
        self._seconds(operation)

    def request_answered(self, request: RequestRecord) -> None:
        """Count the answer to a request in flight."""
        self.in_flight -= 1
        computed = request.computed
        labels = None
        if computed is not None:
            metadata = computed.metadata
            labels = computed.request_type, computed.response_type, metadata.backend, metadata.kernel
        key = request.protocol, request.operation, request.status, request.code, labels
        totals = self._totals.get(key)
        if totals is None:
            totals = self._totals[key] = _Totals()
        totals.add(request)
        if len(totals.seconds) >= MAX_UNCOUNTED:
            self.update()

    def update(self) -> None:
        """Hand all numbers over to prometheus_client, whose counters take longer than a small product of matrices."""
        while self._totals:
            key, totals = self._totals.popitem()
            protocol, operation, status, code, labels = key
            count = len(totals.seconds)
            self._requests(protocol, operation, status).inc(count)
            observe = self._seconds(operation).observe
            for seconds in totals.seconds:
                observe(seconds)
            if code is not None:
                self._problems(code).inc(count)
            if labels is not None:
                request_type, response_type, *kernel = labels
                self._received(request_type).inc(totals.received)
                self._decode(request_type).inc(totals.decode)
                self._queue.inc(totals.queue)
                self._computed(*kernel).inc(count)
                self._compute(*kernel).inc(totals.compute)
                self._encode(response_type).inc(totals.encode)
                self._sent(response_type).inc(totals.sent)
        for gauge, read in self._gauges:
            gauge.set(read())

    async def keep_updated(self) -> None:
        """Update every second: prometheus_client calls no function for a scrape of another worker."""
        while True:
            self.update()
            await asyncio.sleep(UPDATE_INTERVAL)

    def exposition(self) -> bytes:
        """All metrics in the text format of Prometheus; those of all workers if they are shared."""
        if self._folder is not None:
            _remove_gauges_of_ended_workers(self._folder)
        return generate_latest(self._exposed)


def _gauges(metrics: Metrics, admission: AdmissionController) -> list[tuple[Gauge, Callable[[], float]]]:
    """Each gauge with the function that reads its value."""
    gauge = partial(Gauge, registry=metrics.registry, multiprocess_mode="livesum")
    slots = "Slots: large requests that are decoded or computed at the same time."
    waiting = "Large requests in the queue, for a slot or memory."
    limit = "Memory that requests may hold together."
    return [
        (
            gauge("attention_requests_in_flight", "Requests in progress, this scrape included."),
            lambda: metrics.in_flight,
        ),
        (gauge("attention_slots_in_use", "Slots in use."), lambda: admission.slots_taken),
        (gauge("attention_slots", slots), lambda: admission.slots),
        (gauge("attention_requests_waiting", waiting), lambda: admission.waiting),
        (gauge("attention_memory_bytes", "Memory that requests hold."), lambda: admission.memory - admission.free),
        (gauge("attention_memory_limit_bytes", limit), lambda: admission.memory),
        (gauge("attention_workers", "Worker processes."), lambda: 1),
        (_build_info(metrics.registry), lambda: 1),
    ]


def _build_info(registry: CollectorRegistry) -> Gauge:
    name, text = "attention_build_info", "The version that runs."
    return Gauge(name, text, ("version",), registry=registry, multiprocess_mode="livemax").labels(__version__)


def remove_stale_files(folder: Path) -> None:
    """Remove the files that the workers of an earlier run left in the folder."""
    for kind in ("counter", "gauge_*", "histogram"):
        for file in folder.glob(f"{kind}_[0-9]*.db"):
            file.unlink()


def _remove_gauges_of_ended_workers(folder: str) -> None:
    """Delete the gauges of ended workers, as mark_process_dead does, which fails if two workers call it at once."""
    for file in Path(folder).glob("gauge_live*_[0-9]*.db"):
        try:
            if sys.platform != "win32":  # where this would end the process
                os.kill(int(file.stem.rpartition("_")[2]), 0)
        except ProcessLookupError:
            file.unlink(missing_ok=True)
