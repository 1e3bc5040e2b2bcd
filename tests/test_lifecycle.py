"""Stopping a served process, and renewing its certificate, as clients see both."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.helpers.rpc import connected
from tests.helpers.waiting import TIMEOUT, until
from tests.test_rpc_server import OPERATION, SMALL

TLS = Path(__file__).parent / "tls"
HEADERS = {"Content-Type": "application/json"}
BODY = json.dumps({"input": [[1, 0], [0, 1]]})
CLIENTS = 16
PARSERS = pytest.mark.parametrize("parser", ["h11", "httptools"])
WORKERS = pytest.mark.parametrize("workers", [1, 2])
# Half of the 16 combinations: any three of the four meet in each of theirs.
OF_CLIENTS = [
    (("h11", "httptools")[(workers + kept + (number == signal.SIGTERM)) % 2], workers, kept, number)
    for workers in (1, 2)
    for kept in (True, False)
    for number in (signal.SIGTERM, signal.SIGINT)
]


class Process:
    """A served process, whose log is read while it runs."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.log: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)

    def port(self, words: str) -> int:
        """The port in the line of the log with these words."""
        return next(int(re.findall(r":(\d+)\b", line)[-1]) for line in self.log if words in line)

    def end(self, number: int) -> int:
        """Send a signal; the exit status."""
        self.process.send_signal(number)
        status = self.process.wait(TIMEOUT)
        self._reader.join()
        return status


@contextmanager
def served(
    workers: int = 1, *, complete: int | None = None, descriptors: int | None = None, **settings: object
) -> Iterator[Process]:
    """A process of the service with these settings, at a free port.

    complete: how many workers must have started before it is used; all if None
    descriptors: how many files and connections it may have open
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ATTENTION_")}
    environment |= {
        f"ATTENTION_{name.upper()}": str(value) for name, value in {"port": 0, "workers": workers, **settings}.items()
    }
    command = [sys.executable, "-m", "attention_service", "serve", "--threads", "1"]
    if descriptors is not None:
        command = ["sh", "-c", 'ulimit -n "$0"; exec "$@"', str(descriptors), *command]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        server = Process(process)
        words = {"startup complete": workers if complete is None else complete, "vicorn running on": 1}
        try:
            until(lambda: all(sum(word in line for line in server.log) >= count for word, count in words.items()))
            yield server
        finally:
            process.kill()


def request(connection: http.client.HTTPConnection) -> tuple[int, bool]:
    """The status of one request, and whether its response says that the connection closes."""
    connection.request("POST", "/attention", BODY, HEADERS)
    response = connection.getresponse()
    response.read()
    return response.status, response.getheader("connection") == "close"


def busy_client(port: int, answered: Callable[[], object], *, kept: bool) -> Counter[str]:
    """Send requests until nobody listens any longer. kept: on kept connections, else each on a new one"""
    seen: Counter[str] = Counter()
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)
        try:
            connection.connect()
        except OSError:
            return seen
        closes, is_new = False, True
        while not closes:
            try:
                status, closes = request(connection)
            except (OSError, http.client.HTTPException) as error:
                seen[f"lost on a {'new' if is_new else 'kept'} connection: {type(error).__name__}"] += 1
                break
            is_new = False
            closes |= not kept
            seen[str(status)] += 1
            answered()
        connection.close()


@pytest.mark.slow
@pytest.mark.parametrize(("parser", "workers", "kept", "number"), OF_CLIENTS)
def test_busy_clients_lose_no_request_when_it_stops(parser: str, workers: int, kept: bool, number: int) -> None:
    """Each request gets a response until connections are refused, but for kept connections that SIGINT closes."""
    started = threading.Semaphore(0)
    with served(http_parser=parser, workers=workers) as server, ThreadPoolExecutor(CLIENTS) as pool:
        port = server.port("vicorn running on")
        clients = [pool.submit(busy_client, port, started.release, kept=kept) for _ in range(CLIENTS)]
        for _ in range(10 * CLIENTS):
            assert started.acquire(timeout=TIMEOUT)
        server.end(number)
        for client in clients:
            assert set(client.result()) == {"200"}
    assert not any("Traceback" in line for line in server.log), server.log


@pytest.mark.slow
def test_workers_that_are_replaced_leave_the_port_open() -> None:
    """uvicorn replaces its workers at SIGHUP, one after the other; the new ones accept at the same socket."""
    with served(workers=2) as server:
        port = server.port("vicorn running on")
        kept = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)
        assert request(kept) == (200, False)
        server.process.send_signal(signal.SIGHUP)
        until(lambda: sum("startup complete" in line for line in server.log) >= 4)
        kept.close()
        until(lambda: sum("Finished server process" in line for line in server.log) >= 2)
        for _ in range(10):
            new = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)
            assert request(new)[0] == 200
            new.close()
        assert server.end(signal.SIGTERM) == 0


@pytest.mark.slow
def test_workers_that_take_the_place_of_killed_ones_accept_connections() -> None:
    """Both workers end by SIGTERM of their own, so that connections are refused until the first new one starts."""
    with served(workers=2) as server:
        port = server.port("vicorn running on")
        for line in [line for line in server.log if "Started server process" in line]:
            os.kill(int(re.findall(r"\[(\d+)\]", line)[-1]), signal.SIGTERM)
        until(lambda: sum("startup complete" in line for line in server.log) >= 4)
        for _ in range(10):
            new = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)
            assert request(new)[0] == 200
            new.close()
        assert server.end(signal.SIGTERM) == 0


@pytest.mark.slow
@WORKERS
def test_the_port_answers_when_the_log_says_that_it_runs(workers: int) -> None:
    """The line comes after a worker has started; with several, the port is bound long before."""
    with served(workers=workers, complete=0) as server:
        new = http.client.HTTPConnection("127.0.0.1", server.port("vicorn running on"), timeout=TIMEOUT)
        assert request(new) == (200, False)
        new.close()
        first = next(index for index, line in enumerate(server.log) if "startup complete" in line)
        assert sum("vicorn running on" in line for line in server.log[first:]) == 1
        assert sum("vicorn running on" in line for line in server.log) == 1
        server.end(signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_end_of_a_worker_is_an_error_in_the_log(number: int) -> None:
    """One line, which says how it ended. After SIGTERM uvicorn ends a worker by the same signal again."""
    with served(workers=2, log_format="json") as server:
        pids = [int(re.findall(r"\[(\d+)\]", line)[-1]) for line in server.log if "Started server process" in line]
        os.kill(pids[0], number)
        until(lambda: sum("startup complete" in line for line in server.log) == 3)
        assert server.end(signal.SIGTERM) == 0
    events = [json.loads(line) for line in server.log]
    (message,) = (event["message"] for event in events if event["level"] == "error")
    expected = rf"worker \[{pids[0]}\] ended with status -{int(number)} \(\w+\)( after .*)?; another starts"
    assert re.fullmatch(expected, message), message


@pytest.mark.slow
def test_a_worker_that_ends_while_it_is_asked_is_replaced_at_once() -> None:
    """A worker that is stopped does not answer; once it is killed, nobody waits for its answer."""
    with served(workers=2) as server:
        pids = [int(re.findall(r"\[(\d+)\]", line)[-1]) for line in server.log if "Started server process" in line]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(2)  # workers are asked twice a second
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        until(lambda: sum("startup complete" in line for line in server.log) == 4)
        assert server.end(signal.SIGTERM) == 0
    assert not [line for line in server.log if "without an answer" in line]


@pytest.mark.slow
@pytest.mark.parametrize("descriptors", [96, 256])
def test_connections_leave_descriptors_for_files(descriptors: int) -> None:
    """What is loaded when it is first asked for is there for a client while others hold all connections."""
    requests = [
        ("POST", "/attention/compare", json.dumps({"input": [[1.0]], "actual": {"output": [[1.0]]}}), HEADERS),
        ("POST", "/attention/heatmap", json.dumps({"input": [[1.0]]}), HEADERS),
        ("POST", "/attention/heatmap", json.dumps({"input": [[1.0]]}), HEADERS | {"Accept": "image/png"}),
        ("POST", "/attention", json.dumps({"input": [[1.0] * 64] * 900, "include": []}), HEADERS),
        ("GET", "/", None, {}),
    ]
    with served(descriptors=descriptors) as server, ExitStack() as connections:
        address = "127.0.0.1", server.port("vicorn running on")
        kept = connections.enter_context(closing(http.client.HTTPConnection(*address, timeout=TIMEOUT)))
        assert request(kept) == (200, False)
        for _ in range(descriptors + 20):
            other = connections.enter_context(socket.create_connection(address, TIMEOUT))
            with suppress(ConnectionError):
                other.sendall(b"GET / HTTP/1.1\r\nX: ")
        for method, path, body, headers in requests:
            kept.request(method, path, body, headers)
            answer = kept.getresponse()
            assert (path, answer.status, answer.read()[:0]) == (path, 200, b"")
        assert server.end(signal.SIGTERM) == 0


@pytest.mark.slow
def test_errors_that_nobody_is_told_are_lines_of_the_log() -> None:
    """A handshake whose server name is no text ends in an error within ssl, which Python prints by itself."""
    hello, name = ssl.MemoryBIO(), "a" * 20
    client = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), hello, server_hostname=name)
    with suppress(ssl.SSLWantReadError):
        client.do_handshake()
    sent = hello.read().replace(name.encode(), b"\xff\n" * 10)
    with served(log_format="json", tls_certificate=TLS / "localhost.pem") as server:
        with socket.create_connection(("127.0.0.1", server.port("vicorn running on")), TIMEOUT) as connection:
            connection.sendall(sent)
            with suppress(ConnectionError):
                connection.recv(100)
        assert server.end(signal.SIGTERM) == 0
    assert "UnicodeDecodeError" in str([json.loads(line) for line in server.log])


@pytest.mark.slow
def test_workers_that_cannot_start_end_the_service_with_an_error(tmp_path: Path) -> None:
    """systemd and others start a service again, or tell somebody, by its exit status."""
    (tmp_path / "broken.py").write_text(
        "async def app(scope, receive, send):\n"
        "    await receive()\n"
        "    await send({'type': 'lifespan.startup.failed', 'message': 'no disk'})\n"
    )
    program = (
        "import uvicorn; from attention_service.server.supervisor import Supervisor; "
        "Supervisor(uvicorn.Config('broken:app', host='127.0.0.1', port=0, workers=2)).run()"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path, str(tmp_path)])}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert done.returncode == 3, done.stderr
    assert "running on" not in done.stderr


@pytest.mark.slow
@WORKERS
@pytest.mark.parametrize("drain", [0, 300])
def test_idle_connections_end_when_it_stops(workers: int, drain: int) -> None:
    """They may be idle for a day at other times. They do not prolong a drain either."""
    with served(workers=workers, keep_alive=100_000, drain=drain) as server:
        port = server.port("vicorn running on")
        asked, silent = (http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT) for _ in range(2))
        assert request(asked) == (200, False)
        silent.connect()
        assert server.end(signal.SIGTERM) == 0  # raises after minutes
        for client in (asked, silent):
            assert client.sock.recv(1) == b""
            client.close()


def is_unready(port: int) -> bool:
    """True if a new connection hears that the service stops, and that this connection closes."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)
    connection.request("GET", "/health/ready")
    response = connection.getresponse()
    response.read()
    return (response.status, response.getheader("connection")) == (503, "close")


@pytest.mark.slow
@PARSERS
def test_while_it_drains_it_is_not_ready_and_ends_with_the_last_client(parser: str) -> None:
    """A drain of minutes ends at once when no client is connected any longer."""
    with served(http_parser=parser, drain=300) as server:
        port = server.port("vicorn running on")
        kept = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)
        assert request(kept) == (200, False)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: is_unready(port))
        assert request(kept) == (200, True)
        kept.close()
        assert server.process.wait(TIMEOUT) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("numbers", "client"), [([signal.SIGTERM], False), ([signal.SIGINT], True), ([signal.SIGTERM] * 2, True)]
)
def test_it_does_not_drain_without_clients_after_sigint_or_a_second_sigterm(numbers: list[int], client: bool) -> None:
    with served(drain=300, grace=1) as server:
        port = server.port("vicorn running on")
        kept = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)
        if client:
            assert request(kept) == (200, False)
        for index, number in enumerate(numbers):
            if index:  # two signals of one number could become one
                until(lambda: is_unready(port))
            server.process.send_signal(number)
        server.process.wait(TIMEOUT)  # raises before the drain would end
        kept.close()


@pytest.mark.slow
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_the_drain_of_grpc(second: int) -> None:
    with served(grpc_port=0, drain=300, grace=1) as server, connected(server.port("gRPC running on")) as channel:
        ready: Any = channel.unary_unary("/inference.GRPCInferenceService/ServerReady")
        assert ready(b"", timeout=TIMEOUT) == b"\x08\x01"  # the field `ready` is true
        server.process.send_signal(signal.SIGTERM)
        until(lambda: ready(b"", timeout=TIMEOUT) == b"")
        server.end(second)


def busy_caller(port: int, answered: Callable[[], object]) -> Counter[str]:
    """Call until nobody listens any longer; how many calls ended with each status."""
    seen: Counter[str] = Counter()
    message = SMALL.SerializeToString()
    with connected(port) as channel:
        call: Any = channel.unary_unary(OPERATION)
        while True:
            try:
                call(message, timeout=TIMEOUT)
                seen["OK"] += 1
                answered()
            except grpc.RpcError as error:
                seen[error.code().name] += 1
                if "refused" in str(error.details()):
                    return seen


@pytest.mark.slow
@WORKERS
def test_calls_over_grpc_end_as_unavailable_at_sigterm(workers: int) -> None:
    """CANCELLED would tell clients not to try again."""
    started = threading.Semaphore(0)
    with served(grpc_port=0, workers=workers) as server, ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(busy_caller, server.port("gRPC running on"), started.release) for _ in range(CLIENTS)]
        for _ in range(10 * CLIENTS):
            assert started.acquire(timeout=TIMEOUT)
        assert server.end(signal.SIGTERM) == 0
        for client in clients:
            assert set(client.result()) <= {"OK", "UNAVAILABLE"}
    assert not any("Traceback" in line for line in server.log), "".join(server.log)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parser", "workers", "tls"), [("h11", 1, False), ("httptools", 1, True), ("h11", 2, True), ("httptools", 2, False)]
)
def test_a_half_sent_body_causes_no_traceback_at_sigterm(parser: str, workers: int, tls: bool) -> None:
    settings: dict[str, Any] = {"tls_certificate": TLS / "localhost.pem"} if tls else {}
    head = "POST /attention HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99\r\n"
    with (
        served(http_parser=parser, workers=workers, grace=0, drain=0, **settings) as server,
        connection(server.port("vicorn running on"), tls=tls) as client,
    ):
        client.sendall(f"{head}Expect: 100-continue\r\n\r\n".encode())
        assert client.recv(100).startswith(b"HTTP/1.1 100 ")  # the body is waited for
        client.sendall(b"{")
        assert server.end(signal.SIGTERM) == 0
    assert not any("Traceback" in line for line in server.log), "".join(server.log)


def connection(port: int, *, tls: bool) -> socket.socket:
    """A new connection to a port of this machine. tls: over TLS, with any certificate"""
    client = socket.create_connection(("127.0.0.1", port))
    return unverified().wrap_socket(client) if tls else client


def unverified() -> ssl.SSLContext:
    """A client's context that accepts every certificate."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def presented(port: int) -> str:
    """The certificate in PEM that openssl gets at the port."""
    command = ["openssl", "s_client", "-connect", f"127.0.0.1:{port}", "-noservername"]
    text = subprocess.run(command, input="", capture_output=True, text=True, check=False).stdout
    return "".join(re.findall("-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", text, re.DOTALL))


def loaded_again(log: list[str]) -> int:
    """How many workers have the new certificate, counted for each protocol. Only a handshake makes them look."""
    return sum("has been loaded again" in line for line in log)


def renew(folder: Path, *, apart: bool) -> str:
    """Write a new key and certificate; the certificate. apart: key and certificate in two files, else in one"""
    names = (folder / "new-key.pem", folder / "new.pem")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
               "-subj", "/CN=localhost", "-keyout", str(names[0]), "-out", str(names[1])]  # fmt: skip
    subprocess.run(command, capture_output=True, check=True)
    certificate = names[1].read_text()
    if apart:
        names[0].replace(folder / "key.pem")
    else:
        names[1].write_text(certificate + names[0].read_text())
    names[1].replace(folder / "certificate.pem")
    return certificate.strip()


@pytest.mark.slow
@WORKERS
@pytest.mark.parametrize("apart", [True, False])
def test_a_renewed_certificate_is_presented_without_a_restart(tmp_path: Path, workers: int, apart: bool) -> None:
    """Over HTTP and gRPC. One that cannot be used changes nothing, but for one warning of each worker and protocol."""
    files: dict[str, Any] = {"tls_certificate": tmp_path / "certificate.pem"}
    files |= {"tls_key": tmp_path / "key.pem"} if apart else {}
    first = renew(tmp_path, apart=apart)
    with served(grpc_port=0, workers=workers, **files) as server:
        ports = server.port("vicorn running on"), server.port("gRPC running on")
        assert [presented(port) for port in ports] == [first, first]
        second = renew(tmp_path, apart=apart)
        until(lambda: [presented(port) for port in ports] and loaded_again(server.log) == 2 * workers)
        assert [presented(port) for port in ports] == [second, second]

        (tmp_path / "certificate.pem").write_text(second[: len(second) // 2])
        end = time.monotonic() + TIMEOUT
        while sum("cannot be used" in line for line in server.log) < 2 and time.monotonic() < end:
            assert [presented(port) for port in ports] == [second, second]
        third = renew(tmp_path, apart=apart)
        until(lambda: [presented(port) for port in ports] == [third, third])
        assert server.end(signal.SIGTERM) == 0
    warnings = [line for line in server.log if "cannot be used" in line]
    assert 2 <= len(warnings) <= 2 * workers, warnings
    assert not any("Traceback" in line for line in server.log), server.log
