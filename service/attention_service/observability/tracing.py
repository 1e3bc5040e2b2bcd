"""OpenTelemetry traces: a span for each request, over HTTP or gRPC, with a child for each step of the pipeline.

Spans are made from the record of a request when it is answered, with the times that the record has. So a request takes
no longer while tracing is off, and spans of both protocols are alike. Imports the extra otel.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from threading import Thread
from typing import Final

from anyio import to_thread
from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.propagators.textmap import TextMapPropagator
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import Scope

from attention_service.observability.requests import RequestRecord
from attention_service.pipeline.execution import Step, Timings
from attention_service.version import __version__

Attributes = dict[str, str | int | float | bool]

# Of OpenTelemetry's defaults only trace context is read: baggage would be parsed for nothing.
PROPAGATOR: Final[TextMapPropagator] = (
    propagate.get_global_textmap() if "OTEL_PROPAGATORS" in os.environ else TraceContextTextMapPropagator()
)
# Seconds that the service waits at its end for spans to be sent.
FLUSH_SECONDS: Final = 5.0
# Methods that the semantic conventions of OpenTelemetry know; a client could send any other.
METHODS: Final = frozenset(
    {"CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "QUERY", "TRACE"}
)  # fmt: skip
# What spans tell of the metadata of a result.
OF_METADATA: Final = (
    "backend", "device", "dtype", "kernel", "batch_size", "num_heads", "num_kv_heads", "query_length", "key_length",
    "head_dim", "value_dim",
)  # fmt: skip


@dataclass(slots=True)
class RecordedTimings(Timings):
    """Timings that also keep the beginning and the end of each step, in seconds of `time.perf_counter`."""

    steps: list[tuple[Step, float, float]] = field(default_factory=list)

    def step(self, name: Step) -> None:
        """Add the time since the last step to this one."""
        since = self.since
        Timings.step(self, name)
        self.steps.append((name, since, self.since))


class Tracing:
    """Makes the spans of requests, which are sent to where OTEL_EXPORTER_OTLP_ENDPOINT says.

    timings: the class of the timings that requests need for it

    A tracer provider that the process has set already is left as it is.
    """

    def __init__(self) -> None:
        provider = trace.get_tracer_provider()
        if not isinstance(provider, TracerProvider):
            provider = _provider()
            trace.set_tracer_provider(provider)
        self._provider = provider
        self._tracer = trace.get_tracer("attention", __version__)
        self.timings = RecordedTimings

    async def flush(self) -> None:
        """Send the spans that are not sent yet. A receiver that does not answer must not delay the end for long."""
        sending = Thread(target=self._provider.force_flush, daemon=True)  # its own timeout has no effect
        sending.start()
        await to_thread.run_sync(sending.join, FLUSH_SECONDS)

    def http_answered(self, record: RequestRecord, scope: Scope) -> None:
        """Make the spans of a request over HTTP."""
        method = record.method if record.method in METHODS else "_OTHER"
        attributes: Attributes = {
            "http.request.method": method,
            "http.response.status_code": record.status,
            "url.path": record.path[:100].encode(errors="backslashreplace").decode(),
            "url.scheme": scope.get("scheme", "http"),
        }
        name = "HTTP" if method == "_OTHER" else method
        if record.operation != "other":
            attributes["http.route"] = record.operation
            name = f"{name} {record.operation}"
        self._make_spans(name, record, scope["headers"], attributes)

    def grpc_answered(self, record: RequestRecord, metadata: Mapping[str, bytes], status: str) -> None:
        """Make the spans of a call over gRPC. status: of gRPC"""
        method = record.operation.removeprefix("/") if record.operation != "other" else "_OTHER"
        attributes: Attributes = {"rpc.system.name": "grpc", "rpc.method": method, "rpc.response.status_code": status}
        headers = [(name.encode(), value) for name, value in metadata.items()]
        self._make_spans("gRPC" if method == "_OTHER" else method, record, headers, attributes)

    def _make_spans(
        self, name: str, record: RequestRecord, headers: Iterable[tuple[bytes, bytes]], attributes: Attributes
    ) -> None:
        """Make the span of a request and those of its steps, and continue the trace of its headers."""
        if record.is_successful_probe:
            return
        own: Attributes = {"attention.request_id": record.request_id}
        if record.code is not None:
            own["attention.code"] = record.code
        end = record.started + record.seconds
        steps = _steps(record, end)
        for _, _, _, more in steps:
            own |= more
        to_epoch = time.time_ns() - time.perf_counter_ns()
        span = self._tracer.start_span(
            name, _trace_context(headers), SpanKind.SERVER, attributes | own, start_time=_ns(record.started, to_epoch)
        )
        record.trace_id = trace.format_trace_id(span.get_span_context().trace_id)
        if record.status >= 500:
            span.set_attribute("error.type", record.code or str(record.status))
            span.set_status(Status(StatusCode.ERROR))
        if span.is_recording():
            inside = trace.set_span_in_context(span)
            for step, begun, ended, more in steps:
                found = {"attention.request_id": record.request_id} | more
                child = self._tracer.start_span(step, inside, attributes=found, start_time=_ns(begun, to_epoch))
                child.end(_ns(ended, to_epoch))
        span.end(_ns(end, to_epoch))


def _steps(record: RequestRecord, end: float) -> list[tuple[Step, float, float, Attributes]]:
    """The steps that a request has completed: name, beginning, end, attributes. end: of the request"""
    timings, computed = record.timings, record.computed
    if not isinstance(timings, RecordedTimings):
        return []
    steps = list(timings.steps)
    known: dict[Step, Attributes] = {}
    if computed is not None:
        known["decode"] = {
            "attention.request_type": computed.request_type,
            "attention.received_bytes": computed.received,
        }
        known["compute"] = {f"attention.{name}": getattr(computed.metadata, name) for name in OF_METADATA}
        known["encode"] = {"attention.response_type": computed.response_type, "attention.sent_bytes": record.sent}
        if steps[-1][0] == "compute":  # chunks are encoded while they are sent
            steps.append(("encode", timings.since, end))
            known["encode"]["attention.streamed"] = True
    return [(name, begun, ended, known.get(name, {})) for name, begun, ended in steps]


def _trace_context(headers: Iterable[tuple[bytes, bytes]]) -> Context:
    """The trace context (W3C, unless OTEL_PROPAGATORS says otherwise) of the headers, if they have any."""
    carrier: dict[str, list[str]] = {}
    for name, value in headers:
        carrier.setdefault(name.decode("latin-1"), []).append(value.decode("latin-1"))
    return PROPAGATOR.extract(carrier)


def _ns(seconds: float, to_epoch: int) -> int:
    """Nanoseconds since the epoch. seconds: of `time.perf_counter`; to_epoch: of its zero since the epoch"""
    return int(seconds * 1e9) + to_epoch


def _provider() -> TracerProvider:
    """Sends spans over OTLP/HTTP. OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES replace the attributes given here."""
    ours = Resource.create({"service.name": "attention", "service.version": __version__})
    resource = ours.merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)  # which would wait for up to 30 seconds
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider
