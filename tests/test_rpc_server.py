"""The gRPC server: API keys, limits, metrics, logs, clients that disconnect, start and shutdown."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc
import httpx
import numpy as np
import pytest

from attention_service.errors import NotFound
from attention_service.pipeline.admission import MAX_RETRY_AFTER
from attention_service.pipeline.engine import Engine
from attention_service.rpc.server import RPC
from attention_service.runtime.process import when_told_to_stop
from attention_service.server.run import grpc_port
from attention_service.settings import Settings
from benchmarks.serving import free_port
from tests.conftest import app, serving
from tests.helpers.messages import request
from tests.helpers.oip import INFER
from tests.helpers.rpc import Remote, connected, remote
from tests.helpers.waiting import TIMEOUT, until, until_async

EYE = np.eye(2, dtype=np.float32)
SMALL = request({"input": EYE}, {"scale": 0})
# Takes seconds, in many tiles.
LONG = request({"input": np.ones((40_000, 64), np.float32)}, outputs=("logsumexp",))
LONGER = request({"input": np.ones((80_000, 64), np.float32)}, outputs=("logsumexp",))
KEY = "correct horse"
CERTIFICATE = Path(__file__).parent / "tls" / "localhost.pem"
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("ATTENTION_")}
OPERATION = "/inference.GRPCInferenceService/ModelInfer"


@contextmanager
def refused(code: str, text: str | None = None) -> Iterator[pytest.ExceptionInfo[Any]]:
    with pytest.raises(grpc.RpcError, match=text) as error:
        yield error
    assert error.value.code().name == code, error.value.details()


def is_idle(engine: Engine) -> bool:
    """True if all slots and memory are released."""
    found = engine.admission
    return (found.slots_taken, found.waiting, found.free) == (0, 0, found.memory)


def start_call(server: Remote, message: Any, **more: Any) -> Any:
    return server.channel.unary_unary(OPERATION).future(message.SerializeToString(), **more)


def start_with_deadline(server: Remote, message: Any, seconds: float = 0.5) -> Any:
    """A call whose deadline passes while it is computed; on a busy machine it may pass later."""
    call = start_call(server, message, timeout=seconds)
    until(lambda: server.app.state.engine.admission.slots_taken == 1 or call.done())
    return start_with_deadline(server, message, 2 * seconds) if call.done() else call


def test_calls_need_a_valid_key() -> None:
    hashed = f"sha256:{hashlib.sha256(KEY.encode()).hexdigest()}"
    with remote(api_keys=hashed) as server:
        for metadata in ((), (("authorization", "Bearer wrong"),), (("authorization", f"Basic {KEY}"),)):
            for method in ("ServerLive", "ServerReady", "ModelReady", "ModelInfer", "Other"):
                with refused("UNAUTHENTICATED", "authorization: Bearer") as error:
                    server.send(method, metadata=metadata)
                assert "wrong" not in str(error.value.details())
        metadata = (("authorization", f"Bearer {KEY}"),)
        assert server.ask("ServerReady", metadata=metadata).ready
        assert server.infer(SMALL, metadata=metadata)["output"].tolist() == [[0.5, 0.5], [0.5, 0.5]]


def test_health_is_checked_as_grpc_has_it() -> None:
    """As probes of Kubernetes and Envoy do (grpc.health.v1), which have no key."""
    hashed = f"sha256:{hashlib.sha256(KEY.encode()).hexdigest()}"
    with remote(api_keys=hashed) as server:
        check: Any = server.channel.unary_unary("/grpc.health.v1.Health/Check")
        assert check(b"") == b"\x08\x01"  # the first field: SERVING
        assert check(b"\x0a\x09inference") == b"\x08\x01"
        server.app.state.engine.stopping = True
        assert check(b"") == b"\x08\x02"  # NOT_SERVING
        server.app.state.engine.stopping = False
        watch: Any = server.channel.unary_unary("/grpc.health.v1.Health/Watch")
        with refused("UNIMPLEMENTED"):  # clients that balance by health take this alone as healthy
            watch(b"")


def test_requests_are_counted_by_protocol() -> None:
    with remote() as server:
        for _ in range(3):
            server.infer(SMALL)
        server.http.post(INFER, json={"inputs": []})
        with refused("INVALID_ARGUMENT"):
            server.infer(request({"input": EYE}, {"scale": "x"}))
        with refused("UNIMPLEMENTED"):
            server.send("Other")
        with refused("UNIMPLEMENTED"):
            server.channel.unary_unary("ModelInfer")(SMALL.SerializeToString(), timeout=TIMEOUT)
        lines = server.http.get("/metrics").text.splitlines()
        text = "\n".join(re.sub(r"\.0$", "", line) for line in lines)
    for line in (
        f'attention_requests_total{{operation="{OPERATION}",protocol="grpc",status="200"}} 3',
        f'attention_requests_total{{operation="{OPERATION}",protocol="grpc",status="422"}} 1',
        'attention_requests_total{operation="other",protocol="grpc",status="405"} 2',
        'attention_requests_total{operation="/v2/models/{model_name}/infer",protocol="http",status="422"} 1',
        'attention_problems_total{code="invalid_value"} 1',
        'attention_computed_total{backend="numpy",kernel="dense"} 3',
        f'attention_request_seconds_count{{operation="{OPERATION}"}} 4',
        f'attention_received_bytes_total{{media_type="application/grpc"}} {3 * len(SMALL.SerializeToString())}',
        "attention_requests_in_flight 1",
    ):
        assert line in text, line


def test_calls_have_request_ids_and_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "attention")
    hashed = f"sha256:{hashlib.sha256(b'very-secret').hexdigest()} Ada"
    with remote(metrics=False, api_keys=hashed) as server:
        traced = ("traceparent", f"00-{'1' * 32}-{'2' * 16}-01")
        given = (("x-request-id", "find-me"), ("authorization", "Bearer very-secret"), traced)
        answer = server.infer(SMALL, metadata=given)
        assert answer["rest"].parameters["request_id"].string_param == "find-me"
        assert server.trailers["x-request-id"] == "find-me"
        assert re.fullmatch(r"decode;dur=[\d.]+, prepare;.*, encode;dur=[\d.]+", server.trailers["server-timing"])
        with refused("INVALID_ARGUMENT") as error:
            server.send("ModelInfer", b"31337", metadata=(("x-request-id", "a b"), given[1]))
        assert re.fullmatch("[0-9a-f]{32}", dict(error.value.trailing_metadata())["x-request-id"])
    first, second = (record for record in caplog.records if record.name == "attention.access")
    fields = first.__dict__
    assert (fields["request_id"], fields["method"], fields["path"]) == ("find-me", "gRPC", OPERATION)
    assert (fields["status"], fields["kernel"]) == (200, "numpy/dense")
    assert (fields["client"], fields["key"], fields["trace_id"]) == ("127.0.0.1", "Ada", "1" * 32)
    assert (second.__dict__["client"], second.__dict__["trace_id"]) == ("127.0.0.1", "")
    assert fields["received"] == len(SMALL.SerializeToString())
    assert (second.__dict__["status"], second.__dict__["code"]) == (400, "invalid_tensors")
    assert "secret" not in caplog.text
    assert "31337" not in caplog.text


def test_an_unexpected_exception_is_logged_and_hides_its_details(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exception keeps the connection open, and the response does not show its message."""
    monkeypatch.setattr("attention_service.pipeline.attention.answer", lambda *given: 1 / 0)
    with remote() as server:
        with refused("INTERNAL", "The service failed"):
            server.infer(SMALL)
        assert server.ask("ServerLive").live
    assert "a defect of the service" in caplog.text


def test_a_message_too_large_is_refused() -> None:
    with remote(max_body_bytes=10_000) as server:
        with refused("RESOURCE_EXHAUSTED", "larger than max"):
            server.infer(request({"input": np.ones((60, 64), np.float32)}))
        assert server.infer(request({"input": np.ones((30, 64), np.float32)}, outputs=("output",)))
        until(lambda: is_idle(server.app.state.engine))


def test_compressed_messages_are_refused() -> None:
    with remote() as server, refused("UNIMPLEMENTED", "gzip"):
        server.infer(request({"input": np.ones((60, 64), np.float32)}), compression=grpc.Compression.Gzip)


def test_a_request_beyond_the_memory_limit_is_refused() -> None:
    with remote(memory_limit=2**24) as server, refused("RESOURCE_EXHAUSTED", "top_k, select_queries"):
        server.infer(request({"input": np.ones((2000, 2), np.float32)}))


def test_a_response_larger_than_any_message_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attention_service.codecs.oip.grpc.MAX_ANSWER", 2**14)
    with remote() as server:
        with refused("RESOURCE_EXHAUSTED", "at most 16384 bytes in an answer"):
            server.infer(request({"input": np.ones((100, 2), np.float32)}))
        until(lambda: is_idle(server.app.state.engine))


@pytest.mark.slow
def test_a_computation_beyond_the_time_limit_ends() -> None:
    with remote(time_limit=0.2) as server:
        with refused("DEADLINE_EXCEEDED", "takes at most 0.2 s"):
            server.infer(LONG)
        until(lambda: is_idle(server.app.state.engine))


def test_a_slow_sender_is_refused() -> None:
    answered = threading.Event()

    def messages() -> Iterator[bytes]:
        answered.wait(TIMEOUT)
        yield b""

    with remote(read_timeout=1) as server:
        with refused("DEADLINE_EXCEEDED", "arrives within 1 s"):
            call: Any = server.channel.stream_unary(OPERATION)
            # A handshake that a busy machine takes longer for is tried again.
            call(messages(), timeout=TIMEOUT, wait_for_ready=True)
        answered.set()
        until(lambda: is_idle(server.app.state.engine))


def test_few_calls_receive_at_a_time() -> None:
    """As many as a quarter of the memory has for the largest message and its tensors: 4 of 2 · 512 KiB in 16 MiB."""
    with remote(memory_limit=2**24, max_body_bytes=2**19) as server:
        admission, ended = server.app.state.engine.admission, threading.Event()

        def messages() -> Iterator[bytes]:
            ended.wait(TIMEOUT)
            yield SMALL.SerializeToString()

        call: Any = server.channel.stream_unary(OPERATION)
        calls = [call.future(messages(), timeout=TIMEOUT) for _ in range(6)]
        until(lambda: "attention_requests_in_flight 7" in server.http.get("/metrics").text)
        until(lambda: admission.free == 2**24 - 4 * 2**20)
        ended.set()
        assert all(one.result() for one in calls)
        until(lambda: is_idle(server.app.state.engine))


def test_a_message_may_be_as_large_as_the_memory() -> None:
    with remote(memory_limit=2**24, max_body_bytes=2**30) as server:
        assert server.infer(SMALL)["output"].shape == (2, 2)


def test_connections_have_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """In milliseconds: a handshake has the time of a head, a call that of reading, computing and writing."""
    found: dict[str, int] = {}
    start = grpc.aio.server
    monkeypatch.setattr(grpc.aio, "server", lambda options: found.update(options) or start(options=options))
    with remote(read_timeout=2.5, time_limit=30, write_timeout=8, max_body_bytes=2**40) as server:
        assert server.ask("ServerLive").live
    expected = {
        "max_receive_message_length": 2**31 - 1,
        "max_concurrent_streams": 100,
        "compression_enabled_algorithms_bitset": 1,
        "so_reuseport": 0,
        "server_handshake_timeout_ms": 2500,
        "max_connection_idle_ms": 5 * 60_000,
        "max_connection_age_ms": 10 * 60_000,
        "max_connection_age_grace_ms": 40_500,
        "keepalive_time_ms": 4000,
        "keepalive_timeout_ms": 4000,
    }
    assert found == {f"grpc.{name}": number for name, number in expected.items()}


def test_long_errors_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    for length, end in ((800, ", got z"), (801, ", got …")):
        error = NotFound.at("", "x" * (length - len("expected , got z")), "z")
        monkeypatch.setattr("attention_service.rpc.inference.check_model", Mock(side_effect=error))
        with remote() as server, refused("NOT_FOUND") as found:
            server.named("ModelReady", "attention")
        assert str(found.value.details()).endswith(f"x{end}")


def ready(server: Remote) -> list[Any]:
    over_http = [server.http.get(path).status_code for path in ("/health/ready", "/v2/health/ready",
                 "/v2/models/attention/ready", "/v2/models/attention/versions/1/ready")]  # fmt: skip
    return [server.ask("ServerReady").ready, server.named("ModelReady", "attention").ready, *over_http]


def test_a_full_queue_refuses_large_requests_and_small_ones_are_answered() -> None:
    with remote(concurrency=1, queue=0) as server:
        engine = server.app.state.engine
        assert ready(server) == [True, True, 200, 200, 200, 200]
        running = start_call(server, LONG)
        until(lambda: engine.admission.slots_taken == 1)
        with refused("UNAVAILABLE", "capacity for this request") as error:
            server.infer(LONG)
        after = dict(error.value.trailing_metadata())["grpc-retry-pushback-ms"]
        assert after in {str(1000 * seconds) for seconds in range(1, MAX_RETRY_AFTER + 1)}
        assert ready(server) == [True, True, 200, 200, 200, 200]  # its answers say that they may be tried again
        assert server.ask("ServerLive").live
        server.infer(SMALL)
        running.cancel()
        until(lambda: is_idle(engine))


def test_a_server_that_shuts_down_is_not_ready() -> None:
    with remote() as server:
        server.app.state.engine.stopping = True
        assert ready(server) == [False, False, 503, 503, 503, 503]
        assert server.http.get("/health/live").headers["connection"] == "close"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["cancel", "deadline", "while queued"])
def test_a_cancelled_call_ends_its_computation(how: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "attention")
    with remote(concurrency=1) as server:
        engine = server.app.state.engine
        first = start_call(server, LONGER) if how == "while queued" else None
        if first:
            until(lambda: engine.admission.slots_taken == 1)
        call = start_with_deadline(server, LONG) if how == "deadline" else start_call(server, LONG)
        until(lambda: engine.admission.waiting == 1 if first else engine.admission.slots_taken == 1)
        if how != "deadline":
            call.cancel()
        until(lambda: engine.admission.waiting == 0 if first else is_idle(engine))
        if first:
            assert engine.admission.slots_taken == 1
            first.cancel()
        until(lambda: is_idle(engine))
        until(lambda: server.app.state.metrics.in_flight == 0)
    statuses = [record.__dict__["status"] for record in caplog.records if record.name == "attention.access"]
    assert len(statuses) == (2 if first else 1) or how == "deadline"
    assert set(statuses) == {499}


@pytest.mark.slow
def test_a_client_that_reads_nothing_is_disconnected() -> None:
    """A relay between client and server stops forwarding the response."""

    def forward(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(2**16):
                target.sendall(data)

    def relay() -> None:
        client, _ = listener.accept()
        with client, socket.create_connection(("127.0.0.1", state.rpc.port)) as upstream:
            there = threading.Thread(target=forward, args=(client, upstream))
            there.start()
            for _ in range(8):
                client.sendall(upstream.recv(2**14))
            until(lambda: state.metrics.in_flight == 0)
            cut_off.append(True)
            client.shutdown(socket.SHUT_RDWR)
            there.join()

    cut_off: list[bool] = []
    with remote(write_timeout=2) as server, socket.create_server(("127.0.0.1", 0)) as listener:
        state = server.app.state
        thread = threading.Thread(target=relay)
        thread.start()
        with connected(listener.getsockname()[1]) as channel, refused("UNAVAILABLE"):
            message = request({"input": np.ones((2000, 64), np.float32)})
            channel.unary_unary(OPERATION)(message.SerializeToString(), timeout=60)
        thread.join()
        assert cut_off == [True]
        until(lambda: is_idle(state.engine))


def test_calls_over_tls_are_answered() -> None:
    credentials = grpc.ssl_channel_credentials(CERTIFICATE.read_bytes())
    with remote(credentials, tls_certificate=CERTIFICATE) as server:
        assert server.infer(SMALL)["output"].tolist() == [[0.5, 0.5], [0.5, 0.5]]


@pytest.mark.slow
def test_grpc_is_not_imported_without_a_port() -> None:
    code = """
import sys
from attention_service import app, cli, library
sys.exit(bool({"grpc", "google"} & set(sys.modules)))
"""
    assert subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_grpc_port_without_the_extra_names_the_extra(workers: int) -> None:
    code = (
        "import sys; sys.modules['grpc'] = None; from attention_service.cli import main; "
        f"main(['serve', '--port', '0', '--grpc-port', '0', '--workers', '{workers}'])"
    )
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("ATTENTION_GRPC_PORT: install attention-service[grpc] (")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_port_in_use_is_named(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as taken:
        port = taken.getsockname()[1]
        command = [
            sys.executable,
            "-m",
            "attention_service",
            "serve",
            "--host",
            host,
            "--port",
            "0",
            "--grpc-port",
            str(port),
        ]
        done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, f"ATTENTION_GRPC_PORT: {host}:{port}: Address already in use\n")


def test_one_port_for_http_and_grpc_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        grpc_port(Settings.model_construct(host="127.0.0.1", port=8000, grpc_port=8000))
    assert caught.value.code == 2
    assert capsys.readouterr().err == "ATTENTION_GRPC_PORT: 127.0.0.1:8000: HTTP has it\n"


@contextmanager
def served(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """The process of a started service, and the lines of its log."""
    command = [sys.executable, "-m", "attention_service", "serve", *arguments]
    with subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        log: list[str] = []
        workers = int(arguments[arguments.index("--workers") + 1]) if "--workers" in arguments else 1
        try:
            while sum("startup complete" in line for line in log) < workers:
                log.append(process.stderr.readline())
                assert log[-1], log
            yield process, log
        finally:
            process.kill()
            log += process.stderr.readlines()


def port_of(log: list[str]) -> int:
    (line, *_) = (line for line in log if "gRPC running on" in line)
    return int(line.rpartition(":")[2])


def in_flight(port: int) -> int:
    """The number of requests in flight by the service's metrics, without the request for /metrics."""
    text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=TIMEOUT).text
    (line,) = (line for line in text.splitlines() if line.startswith("attention_requests_in_flight "))
    return int(float(line.split()[1])) - 1


def code_of(call: Any) -> str:
    """The name of the status with which a call ends."""
    try:
        call(SMALL.SerializeToString(), timeout=TIMEOUT)
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


@pytest.mark.slow
def test_shutdown_completes_running_calls_and_refuses_new_ones() -> None:
    port = free_port()
    with served("--port", str(port), "--grpc-port", "0") as (process, log):
        with connected(port_of(log)) as channel:
            call: Any = channel.unary_unary(OPERATION)
            running = call.future(LONG.SerializeToString(), timeout=TIMEOUT)
            until(lambda: in_flight(port) == 1)
            process.send_signal(signal.SIGTERM)
            until(lambda: code_of(call) == "UNAVAILABLE")
            assert not running.done(), "too quick to show anything"
            assert len(running.result()) > 40_000 * 4
        assert process.wait(TIMEOUT) == 0
    assert not any("Traceback" in line for line in log), log


def test_a_call_that_no_method_gets_does_not_delay_the_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC loses some of the calls that arrive while it begins to stop."""
    arrived, service = threading.Event(), RPC.service

    async def lose(requests: Any, context: Any) -> None:
        arrived.set()
        await asyncio.Event().wait()

    def service_or_lose(rpc: RPC, details: Any) -> Any:
        return grpc.stream_stream_rpc_method_handler(lose) if details.method == "/lost" else service(rpc, details)

    monkeypatch.setattr(RPC, "service", service_or_lose)
    application = app(grpc_port=0, grace=2 * TIMEOUT)
    with ExitStack() as stack:
        with serving(application):
            channel = stack.enter_context(connected(application.state.rpc.port))
            call: Any = channel.unary_unary("/lost")
            lost = call.future(b"", timeout=TIMEOUT)
            assert arrived.wait(TIMEOUT)
        assert lost.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.slow
def test_the_host_may_be_an_ipv6_address() -> None:
    arguments = ("--host", "::1", "--port", str(free_port()), "--grpc-port", "0")
    with served(*arguments) as (_, log), grpc.insecure_channel(f"[::1]:{port_of(log)}") as channel:
        assert channel.unary_unary(OPERATION)(SMALL.SerializeToString(), timeout=TIMEOUT)


@pytest.mark.slow
def test_several_workers_share_the_port() -> None:
    with served("--port", "0", "--grpc-port", "0", "--workers", "2", "--threads", "1") as (process, log):
        ports = {int(line.rpartition(":")[2]) for line in log if "gRPC running on" in line}
        assert len(ports) == 1
        for _ in range(10):  # each on a new connection
            with connected(ports.copy().pop()) as channel:
                assert channel.unary_unary(OPERATION)(SMALL.SerializeToString(), timeout=TIMEOUT)
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT) == 0


def test_port_0_is_any_free_port() -> None:
    with remote() as server, remote() as other:
        assert server.app.state.rpc.port != other.app.state.rpc.port
        assert server.infer(SMALL)["output"].tolist() == other.infer(SMALL)["output"].tolist()


def test_shutdown_callbacks_run_on_a_signal_before_other_handlers() -> None:
    """The callback runs in the main thread, with and without another handler of the signal."""
    heard: list[object] = []

    async def told(number: int) -> None:
        when_told_to_stop(lambda number: heard.append("stop"))
        os.kill(os.getpid(), number)
        await until_async(lambda: heard[-1:] == ["stop"])

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    try:
        signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
        asyncio.run(told(signal.SIGTERM))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        asyncio.run(told(signal.SIGINT))
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
    assert heard == [signal.SIGTERM, "stop", "stop"]
