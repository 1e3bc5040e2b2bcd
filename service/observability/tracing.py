"""OpenTelemetry traces, where they are asked for. W3C trace context that comes with a request is continued."""

from __future__ import annotations

from typing import Any

from starlette.middleware import Middleware


def tracing() -> Middleware:
    """A span for each request, sent to where OTEL_EXPORTER_OTLP_ENDPOINT says.

    A tracer provider that the process has set already is left as it is. Errors: SystemExit that names the extra,
    where OpenTelemetry is not installed.
    """
    try:
        from opentelemetry import trace
        from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware
        from opentelemetry.sdk.trace import TracerProvider
    except ImportError as error:
        raise SystemExit(f"ATTENTION_TRACING: install attention-service[otel] ({error})") from None
    if not isinstance(trace.get_tracer_provider(), TracerProvider):
        trace.set_tracer_provider(_provider())
    return Middleware(OpenTelemetryMiddleware, exclude_spans=["receive", "send"])


def _provider() -> Any:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": "attention"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider
