"""The record of one request, over HTTP or gRPC, for the metrics and the log; and its id."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from secrets import token_hex
from typing import Final, NamedTuple

from starlette.types import Scope

from attention_service.attention.result import Metadata
from attention_service.pipeline.execution import Execution, Timings

REQUEST_ID: Final = b"x-request-id"
# The trace of a request (W3C Trace Context).
TRACEPARENT: Final = b"traceparent"
TRACE_ID: Final = re.compile(rb"[0-9a-f]{2}-((?!0{32})[0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")
# Ids of clients that are harmless in logs and headers.
ACCEPTABLE = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
# Ids of this process begin with this, and then count.
PROCESS = token_hex(10)
_number = count()
# Operations that orchestrators and Prometheus call every few seconds.
PROBES: Final = frozenset(
    {
        "/health/live",
        "/health/ready",
        "/metrics",
        "/v2/health/live",
        "/v2/health/ready",
        "/v2/models/{model_name}/ready",
        "/v2/models/{model_name}/versions/{model_version}/ready",
        "/inference.GRPCInferenceService/ServerLive",
        "/inference.GRPCInferenceService/ServerReady",
        "/inference.GRPCInferenceService/ModelReady",
    }
)
# Status of a request without a response, as its client disconnected or the server stops; as nginx has it.
DISCONNECTED: Final = 499

access = logging.getLogger("attention.access")


class ComputedRequest(NamedTuple):
    """A request whose attention was computed, as metrics and log need it.

    To count another property of a request, set it on `Execution` in `pipeline.run.compute`, add a field here, and
    add it up in `_Totals` of `observability/metrics.py`, and count it in `Metrics.update`.

    request_type, response_type: media types; metadata: of the result; received: bytes of the body of the request
    """

    request_type: str
    response_type: str
    metadata: Metadata
    received: int

    @classmethod
    def of(cls, execution: Execution, request_type: str, response_type: str) -> ComputedRequest:
        """The record of an execution that is done. It does not keep the execution alive, nor its memory."""
        assert execution.metadata is not None
        return cls(request_type, response_type, execution.metadata, execution.received)


@dataclass(slots=True)
class RequestRecord:
    """One request as the metrics and the log show it, filled in while it is answered.

    protocol: http or grpc; operation: path template of the route or name of the gRPC method, else other
    client: address that the request came from; key: name of its API key; trace_id: of its trace, if it has one
    status: over HTTP, whatever the protocol; code: of the problem; sent: bytes of the body of the response
    timings: of the steps of the pipeline; also of a request that failed in one of them
    started, ended: seconds; ended is 0 until the last byte of the response is sent
    """

    protocol: str
    method: str
    path: str
    request_id: str
    client: str = ""
    key: str = ""
    trace_id: str = ""
    operation: str = "other"
    status: int = DISCONNECTED
    code: str | None = None
    timings: Timings | None = None
    computed: ComputedRequest | None = None
    sent: int = 0
    started: float = field(default_factory=time.perf_counter)
    ended: float = 0.0

    @property
    def seconds(self) -> float:
        """Time from the request head to the end of the response, or until now."""
        return (self.ended or time.perf_counter()) - self.started

    @property
    def is_successful_probe(self) -> bool:
        """True for a health check or a scrape that succeeded. They come all the time and say nothing."""
        return self.status == 200 and self.operation in PROBES

    def log(self) -> None:
        """Write the line about the request into the log."""
        level = logging.DEBUG if self.is_successful_probe else logging.INFO
        if not access.isEnabledFor(level):
            return
        fields: dict[str, object] = {
            "request_id": self.request_id,
            "trace_id": self.trace_id,
            "client": self.client[:64],
            "key": self.key,
            "method": self.method[:20],
            "path": self.path[:100],
            "status": self.status,
            "milliseconds": round(self.seconds * 1e3, 2),
            "code": self.code,
        }
        if self.computed is not None:
            kernel = f"{self.computed.metadata.backend}/{self.computed.metadata.kernel}"
            fields |= {"received": self.computed.received, "sent": self.sent, "kernel": kernel}
        access.log(level, "request", extra=fields)


def record_of(scope: Scope) -> RequestRecord:
    """The record that `Entry` keeps of a request over HTTP."""
    record: RequestRecord = scope["state"]["record"]
    return record


def headers_of(scope: Scope) -> Mapping[bytes, bytes]:
    """The headers that `Entry` read of a request, by their names in lower case."""
    headers: Mapping[bytes, bytes] = scope["state"]["headers"]
    return headers


def find_trace_id(given: bytes | None) -> str:
    """The id of the trace that the header traceparent names; "" if there is none, or it is invalid."""
    found = None if given is None else TRACE_ID.match(given)
    return "" if found is None else str(found[1], "ascii")


def choose_request_id(given: bytes | None) -> str:
    """The id given by the client if it is harmless in logs and headers, else one that no other request has."""
    if given is not None and ACCEPTABLE.fullmatch(given):
        return str(given, "ascii")
    return f"{PROCESS}{next(_number):012x}"
