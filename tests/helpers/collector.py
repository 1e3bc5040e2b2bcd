"""A receiver of traces over OTLP/HTTP on loopback, which reads them with the messages of the protocol itself."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1 import trace_pb2

from tests.helpers.waiting import until


@dataclass
class Received:
    """A span. span: its message; attributes, resource: by names"""

    span: Any
    attributes: dict[str, Any]
    resource: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.span.name)

    @property
    def kind(self) -> str:
        return trace_pb2.Span.SpanKind.Name(self.span.kind)

    @property
    def status(self) -> str:
        return trace_pb2.Status.StatusCode.Name(self.span.status.code)

    @property
    def interval(self) -> tuple[int, int]:
        return self.span.start_time_unix_nano, self.span.end_time_unix_nano


class Collector:
    """The spans that have arrived. url: for OTEL_EXPORTER_OTLP_ENDPOINT"""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.spans: list[Received] = []

    def add(self, message: ExportTraceServiceRequest) -> None:
        for group in message.resource_spans:
            resource = values(group.resource.attributes)
            for scope in group.scope_spans:
                self.spans += [Received(span, values(span.attributes), resource) for span in scope.spans]

    def request(self, request_id: str) -> tuple[Received, list[Received]]:
        """The span of a request, once it has arrived, and those of its steps in the order of their beginnings."""

        def own() -> list[Received]:
            return [found for found in self.spans if found.attributes.get("attention.request_id") == request_id]

        until(lambda: [found for found in own() if found.kind == "SPAN_KIND_SERVER"])
        (root,) = (found for found in own() if found.kind == "SPAN_KIND_SERVER")
        # The processor exports spans in the order of their ends: those of the steps come first.
        steps = [found for found in own() if found is not root]
        return root, sorted(steps, key=lambda found: found.interval)


@contextmanager
def collector() -> Iterator[Collector]:
    """A collector on a free port."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            assert self.headers["Content-Type"] == "application/x-protobuf"
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers["Content-Encoding"] == "gzip":
                body = gzip.decompress(body)
            found.add(ExportTraceServiceRequest.FromString(body))
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *given: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        found = Collector(server.server_address[1])
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield found
        finally:
            server.shutdown()
            thread.join()


def values(attributes: Any) -> dict[str, Any]:
    """Attributes as a dict."""
    return {found.key: getattr(found.value, found.value.WhichOneof("value")) for found in attributes}
