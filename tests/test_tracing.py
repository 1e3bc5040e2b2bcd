"""Traces, as a receiver of OTLP gets them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import httpx
import numpy as np
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from attention_service.version import __version__
from benchmarks.serving import free_port
from tests.conftest import app, serving
from tests.helpers.collector import Collector, Received, collector
from tests.helpers.messages import request
from tests.helpers.oip import INFER, request_of
from tests.helpers.rpc import Remote, remote
from tests.helpers.waiting import TIMEOUT, until
from tests.helpers.wire import JSON, NPZ, SAFETENSORS, write

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
# Two heads: query (2, 4), key (3, 4), value (3, 6).
ARRAYS = {name: np.ones(shape, np.float32) for name, shape in {"query": (2, 4), "key": (3, 4), "value": (3, 6)}.items()}
STARTED = time.time_ns()
GRPC = "inference.GRPCInferenceService/ModelInfer"
OF_RESULT = {
    "attention.backend": "numpy", "attention.device": "cpu", "attention.dtype": "float32", "attention.batch_size": 1,
    "attention.num_heads": 2, "attention.num_kv_heads": 2, "attention.query_length": 2, "attention.key_length": 3,
    "attention.head_dim": 2, "attention.value_dim": 3,
}  # fmt: skip


@pytest.fixture(scope="module")
def spans() -> Iterator[Collector]:
    """The receiver that the tracer provider of this process sends to: a process has one."""
    with collector() as found, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", found.url)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
        app(tracing=True)
        yield found
        provider = trace.get_tracer_provider()
        assert isinstance(provider, TracerProvider)
        provider.shutdown()


@pytest.fixture(scope="module")
def server(spans: Collector) -> Iterator[Remote]:
    with remote(tracing=True) as found:
        yield found


def check(root: Received, steps: list[Received], names: list[str]) -> None:
    """The steps are children of the request, follow each other, and are done before it ends."""
    assert [step.name for step in steps] == names
    for step in steps:
        assert step.span.trace_id == root.span.trace_id
        assert step.span.parent_span_id == root.span.span_id
        assert step.kind == "SPAN_KIND_INTERNAL"
        assert step.resource == root.resource
    times = [root.interval[0], *(time for step in steps for time in step.interval), root.interval[1]]
    assert times == sorted(times)
    assert all(first.interval[1] == second.interval[0] for first, second in pairwise(steps)), "no gap between steps"
    assert STARTED < root.interval[0] < root.interval[1] < time.time_ns(), "nanoseconds since the epoch"


# A small request waits for nothing. Formats that may be compressed wait for memory, and gRPC does, for its messages.
STEPS = ["decode", "prepare", "compute", "encode"]
COUNTED = ["queue", "decode", "prepare", "queue", "compute", "encode"]


def http_request(name: str) -> tuple[str, bytes, dict[str, str], str]:
    """Path, body and headers of a request in a format, and the media type of body and response."""
    fields = {**ARRAYS, "num_heads": 2}
    if name in (JSON, NPZ, SAFETENSORS):
        return "/attention", write(fields | {"dtype": "float32"}, name), {"content-type": name}, name
    body, headers = request_of(fields, binary=name == "binary inference")
    return INFER, body, headers, "application/octet-stream" if headers else JSON


@pytest.mark.parametrize(
    ("name", "names"),
    [(JSON, STEPS), (NPZ, COUNTED), (SAFETENSORS, STEPS), ("inference", STEPS), ("binary inference", STEPS)],
)
def test_a_request_has_a_span_with_a_child_for_each_step(
    name: str, names: list[str], server: Remote, spans: Collector
) -> None:
    path, body, headers, media_type = http_request(name)
    request_id = re.sub("[^a-z]", "-", name)
    response = server.http.post(path, content=body, headers=SAMPLED | headers | {"x-request-id": request_id})
    assert response.status_code == 200, response.text
    root, steps = spans.request(request_id)
    check(root, steps, names)
    route = "/v2/models/{model_name}/infer" if path == INFER else path
    kernel = root.attributes["attention.kernel"]
    assert kernel.encode() in response.content.replace(b"\0", b""), "as in the metadata"
    own = {"attention.request_id": request_id}
    received = {"attention.request_type": media_type, "attention.received_bytes": len(body)}
    sent = {"attention.response_type": media_type, "attention.sent_bytes": len(response.content)}
    computed = OF_RESULT | {"attention.kernel": kernel}
    assert (root.name, root.status) == (f"POST {route}", "STATUS_CODE_UNSET")
    assert root.attributes == own | received | computed | sent | {
        "http.request.method": "POST", "http.route": route, "http.response.status_code": 200, "url.path": path,
        "url.scheme": "http",
    }  # fmt: skip
    found = {step.name: step.attributes for step in steps}
    assert found["decode"] == own | received
    assert found["prepare"] == own
    assert found["compute"] == own | computed
    assert found["encode"] == own | sent


def test_a_call_over_grpc_has_the_same_spans(server: Remote, spans: Collector) -> None:
    message = request(ARRAYS, {"num_heads": 2})
    metadata = [*SAMPLED.items(), ("x-request-id", "call")]
    answer = server.infer(message, metadata=metadata)
    root, steps = spans.request("call")
    check(root, steps, COUNTED)
    assert (root.name, root.span.trace_id.hex(), root.span.parent_span_id.hex()) == (GRPC, TRACE, PARENT)
    assert root.attributes == OF_RESULT | {
        "attention.request_id": "call", "attention.kernel": answer["rest"].parameters["kernel"].string_param,
        "attention.received_bytes": message.ByteSize(), "attention.sent_bytes": answer["rest"].ByteSize(),
        "attention.request_type": "application/grpc", "attention.response_type": "application/grpc",
        "rpc.system.name": "grpc", "rpc.method": GRPC, "rpc.response.status_code": "OK",
    }  # fmt: skip


def test_the_trace_of_the_client_is_continued(server: Remote, spans: Collector) -> None:
    server.http.post("/attention", json={}, headers=SAMPLED | {"x-request-id": "continued"})
    root, _ = spans.request("continued")
    assert (root.span.trace_id.hex(), root.span.parent_span_id.hex()) == (TRACE, PARENT)
    assert root.span.trace_state == "vendor=1"


@pytest.mark.parametrize(
    ("name", "headers"),
    [
        ("none", {}),
        ("garbage", {"traceparent": "garbage", "tracestate": "=,=;~", "baggage": "=;,%zz"}),
        ("zeros", {"traceparent": f"00-{'0' * 32}-{PARENT}-01"}),
        ("bytes", {"traceparent": b"\xff\xfe"}),
    ],
)
def test_a_request_without_a_valid_trace_context_begins_a_trace(
    name: str, headers: dict[str, Any], server: Remote, spans: Collector
) -> None:
    assert server.http.get("/problems/busy", headers=headers | {"x-request-id": name}).status_code == 200
    root, steps = spans.request(name)
    assert (root.name, root.span.parent_span_id, steps) == ("GET /problems/{code}", b"", [])
    assert root.span.trace_id.hex() != TRACE


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("given", [{}, SAMPLED], ids=["new", "continued"])
def test_the_log_has_the_id_of_the_trace(
    protocol: str, given: dict[str, str], server: Remote, spans: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "attention.access")
    request_id = f"logged-{protocol}-{len(given)}"
    headers = given | {"x-request-id": request_id}
    if protocol == "http":
        server.http.get("/problems/busy", headers=headers)
    else:
        server.infer(request(ARRAYS, {"num_heads": 2}), metadata=[*headers.items()])
    root, _ = spans.request(request_id)
    until(lambda: caplog.records)
    (record,) = caplog.records
    assert record.__dict__["trace_id"] == root.span.trace_id.hex()
    assert (record.__dict__["trace_id"] == TRACE) == bool(given)


def test_a_trace_that_the_client_does_not_record_is_not_recorded(server: Remote, spans: Collector) -> None:
    unsampled = {"traceparent": f"00-{'1' * 32}-{PARENT}-00", "x-request-id": "unsampled"}
    assert server.http.post("/attention", json={"input": [[1]]}, headers=unsampled).status_code == 200
    server.http.get("/docs", headers={"x-request-id": "after-unsampled"})
    spans.request("after-unsampled")
    assert "unsampled" not in {found.attributes.get("attention.request_id") for found in spans.spans}


def test_a_request_that_waits_has_a_span_for_the_queue(spans: Collector) -> None:
    with serving(app(tracing=True, inline_flops=0)) as client:
        client.post("/attention", json={"input": [[1.0, 2.0]]}, headers={"x-request-id": "queued"})
    check(*spans.request("queued"), ["decode", "prepare", "queue", "compute", "encode"])


def test_a_response_that_is_encoded_while_it_is_sent_has_a_span_until_its_end(server: Remote, spans: Collector) -> None:
    """300 × 300 weights in JSON are more than are encoded at once."""
    body = {"input": np.eye(300).tolist()}
    response = server.http.post("/attention", json=body, headers={"x-request-id": "streamed"})
    assert "content-length" not in response.headers
    root, steps = spans.request("streamed")
    encoded = steps[-1]
    assert (encoded.name, encoded.interval[1]) == ("encode", root.interval[1])
    assert encoded.attributes["attention.streamed"] is True
    assert encoded.attributes["attention.sent_bytes"] == len(response.content)


def test_a_problem_is_in_the_span_with_the_steps_before_it(server: Remote, spans: Collector) -> None:
    """Errors of clients are no errors of the service."""
    wrong = {"query": [[1, 2]], "key": [[1]], "value": [[1]]}
    assert server.http.post("/attention", json=wrong, headers={"x-request-id": "wrong"}).status_code == 422
    root, steps = spans.request("wrong")
    check(root, steps, ["decode"])
    assert (root.attributes["attention.code"], root.status) == ("shape_mismatch", "STATUS_CODE_UNSET")
    assert root.attributes["http.response.status_code"] == 422
    assert "error.type" not in root.attributes


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_defect_is_an_error(
    protocol: str, server: Remote, spans: Collector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("attention_service.pipeline.attention.answer", lambda *given: 1 / 0)
    headers = {"x-request-id": f"defect-{protocol}"}
    if protocol == "http":
        assert server.http.post("/attention", json={"input": [[1]]}, headers=headers).status_code == 500
    else:
        with pytest.raises(Exception, match="INTERNAL"):
            server.infer(request(ARRAYS), metadata=list(headers.items()))
    root, steps = spans.request(f"defect-{protocol}")
    assert [step.name for step in steps if step.name != "queue"] == ["decode", "prepare", "compute"]
    assert (root.status, root.attributes["error.type"]) == ("STATUS_CODE_ERROR", "internal_error")


def test_only_failed_probes_have_spans(server: Remote, spans: Collector) -> None:
    assert server.http.get("/health/ready", headers={"x-request-id": "ready"}).status_code == 200
    server.ask("ServerReady", metadata=[("x-request-id", "ready")])
    server.app.state.engine.stopping = True
    try:
        assert server.http.get("/health/ready", headers={"x-request-id": "stopping"}).status_code == 503
    finally:
        server.app.state.engine.stopping = False
    root, _ = spans.request("stopping")
    assert (root.name, root.status, root.attributes["error.type"]) == (
        "GET /health/ready", "STATUS_CODE_ERROR", "busy")  # fmt: skip
    assert "ready" not in {found.attributes.get("attention.request_id") for found in spans.spans}


def test_names_of_spans_hold_nothing_that_the_client_made_up(server: Remote, spans: Collector) -> None:
    server.http.request("BREW", "/a%0Ab%FF", headers={"x-request-id": "made-up"})
    root, _ = spans.request("made-up")
    assert (root.name, root.attributes["http.request.method"]) == ("HTTP", "_OTHER")
    with pytest.raises(Exception, match="UNIMPLEMENTED"):
        server.send("Other", metadata=[("x-request-id", "other-call")])
    root, _ = spans.request("other-call")
    assert (root.name, root.attributes["rpc.response.status_code"]) == ("gRPC", "UNIMPLEMENTED")


def test_resources_have_name_and_version(server: Remote, spans: Collector) -> None:
    server.http.get("/docs", headers={"x-request-id": "resource"})
    root, _ = spans.request("resource")
    assert root.resource["service.name"] == "attention"
    assert root.resource["service.version"] == __version__


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_spans_are_sent_before_the_service_ends(workers: int) -> None:
    """Of every worker, and with the settings of OpenTelemetry's own variables."""
    port = free_port()
    command = [sys.executable, "-m", "attention_service", "serve", "--port", str(port), "--workers", str(workers)]
    with collector() as spans:
        environment = {
            "ATTENTION_TRACING": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": spans.url, "OTEL_SERVICE_NAME": "mine",
            "OTEL_BSP_SCHEDULE_DELAY": "3600000",
        }  # fmt: skip
        process = subprocess.Popen(command, env=os.environ | environment)
        try:
            until(lambda: is_ready(port) or process.poll() is not None)
            url = f"http://127.0.0.1:{port}/attention"
            for number in range(10):
                httpx.post(url, json={"input": [[1.0]]}, headers={"x-request-id": f"last-{number}"}, timeout=TIMEOUT)
            assert spans.spans == []
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(TIMEOUT) == 0
        for number in range(10):
            root, steps = spans.request(f"last-{number}")
            assert [step.name for step in steps] == ["decode", "prepare", "compute", "encode"]
            assert root.resource["service.name"] == "mine"


def is_ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health/ready", timeout=TIMEOUT).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_service_without_opentelemetry_says_which_extra_it_needs(workers: str) -> None:
    """And does not start workers that fail, again and again."""
    code = (
        "import sys; sys.modules['opentelemetry.sdk'] = None; from attention_service.cli import main; "
        f"sys.exit(main(['serve', '--port', '0', '--workers', '{workers}']))"
    )
    environment = os.environ | {"ATTENTION_TRACING": "true"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("ATTENTION_TRACING: install attention-service[otel] (")


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_wrong_variable_of_opentelemetry_ends_serve_with_one_line(workers: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "attention_service", "serve", "--port", "0", "--workers", workers],
        env=os.environ | {"ATTENTION_TRACING": "true", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "100000"},
        capture_output=True, text=True, timeout=TIMEOUT, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("ATTENTION_TRACING: a variable OTEL_* is wrong: ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_headers_that_opentelemetry_refuses_are_not_logged() -> None:
    port = free_port()
    with collector() as spans:
        variables = {"ATTENTION_TRACING": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": spans.url}
        command = [sys.executable, "-m", "attention_service", "serve", "--port", str(port)]
        process = subprocess.Popen(command, env=os.environ | variables, stderr=subprocess.PIPE, text=True)
        until(lambda: is_ready(port) or process.poll() is not None)
        headers = {"baggage": "@," * 2000, "tracestate": "hostile" * 100, "traceparent": "hostile" * 100}
        url = f"http://127.0.0.1:{port}/attention"
        answer = httpx.post(url, json={"input": [[1.0]]}, headers=headers, timeout=TIMEOUT)
        assert answer.status_code == 200
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=TIMEOUT)
    assert "hostile" not in log
    assert "@" not in log
