"""The service in a separate process, started as its users start it, and raw connections to it."""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import IO, Any, Final

from benchmarks.serving import Running, free_port

START_TIMEOUT: Final = 240.0
# Seconds to wait for a result that is expected at once, long because the machine may be busy.
TIMEOUT: Final = 240.0
HEALTH: Final = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"


@dataclass
class Live:
    """A running service: its process, port and log."""

    process: subprocess.Popen[bytes]
    port: int
    log: IO[bytes]
    tls: bool = False

    @property
    def running(self) -> Running:
        return Running(self.process.pid, self.port)

    def connect(self, timeout: float = TIMEOUT) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return unverified().wrap_socket(connection) if self.tls else connection

    def ask(self, request: bytes, timeout: float = TIMEOUT) -> tuple[int, bytes]:
        """Status and body of the response to a request on a new connection."""
        with self.connect(timeout) as connection:
            with suppress(ConnectionError):  # the server may refuse the request before it is sent completely
                connection.sendall(request)
            return read_response(connection)

    def healthy(self) -> float:
        """Seconds that the server took to answer a liveness check. Errors: AssertionError."""
        start = time.monotonic()
        assert self.ask(HEALTH) == (200, b'{"status":"ok"}')
        return time.monotonic() - start

    def gauge(self, name: str) -> float:
        """The value of a metric without labels."""
        status, text = self.ask(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        assert status == 200
        return next(float(line.split()[1]) for line in text.decode().splitlines() if line.startswith(name + " "))

    def descriptors_fall_to(self, descriptors: int) -> bool:
        """True if the number of open file descriptors falls to `descriptors` in time."""
        return self.running.descriptors_left(descriptors) <= descriptors

    def logged(self) -> str:
        self.log.seek(0)
        return self.log.read().decode(errors="replace")

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal to the server and wait until it ends; returns its exit status."""
        self.process.send_signal(number)
        return self.process.wait(TIMEOUT)


@cache
def unverified() -> ssl.SSLContext:
    """A TLS context of a client that accepts any certificate."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def within(seconds: float, condition: Any) -> bool:
    """True if the condition becomes true within so many seconds."""
    end = time.monotonic() + seconds
    while not (met := bool(condition())) and time.monotonic() < end:
        time.sleep(0.02)
    return met


@contextmanager
def live(
    port: int = 0, address_space: int | None = None, descriptors: int | None = None, **settings: object
) -> Iterator[Live]:
    """A server with these settings; it is killed on exit, and must not have logged a traceback.

    address_space: limit of its address space in bytes, as by `ulimit -v`
    descriptors: limit of its open files and connections, as by `ulimit -n`
    """
    port = port or free_port()
    values = {"port": port, "log_level": "warning", "allowed_hosts": "x"} | settings
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")
    }  # a killed process saves no coverage
    environment |= {f"ATTENTION_{name.upper()}": str(value) for name, value in values.items()}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "attention_service", "serve"],
            cwd=Path(__file__).resolve().parents[2],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=partial(_limit, {resource.RLIMIT_AS: address_space, resource.RLIMIT_NOFILE: descriptors}),
        )
        server = Live(process, port, log, tls="tls_certificate" in settings)
        try:
            assert within(START_TIMEOUT, lambda: _is_live(server)), server.logged()
            yield server
        finally:
            tree = server.running.tree() if process.poll() is None else []
            process.kill()
            process.wait()
            for pid in tree[1:]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        assert "Traceback" not in server.logged(), server.logged()


def _limit(limits: dict[int, int | None]) -> None:
    for kind, limit in limits.items():
        if limit is not None:
            resource.setrlimit(kind, (limit, limit))


def _is_live(server: Live) -> bool:
    with suppress(OSError):
        return server.ask(HEALTH)[0] == 200
    return False


def post(body: bytes, media_type: str = "application/json", path: str = "/attention", more: str = "") -> bytes:
    """The bytes of a complete POST request."""
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: {media_type}\r\nContent-Length: {len(body)}\r\n{more}\r\n"
    return head.encode() + body


class IncompleteResponse(Exception):
    """Raised when a connection ends before a response is complete."""


def read_response(connection: socket.socket) -> tuple[int, bytes]:
    """Status and body of one response; (0, b"") if the connection ends without one. Errors: IncompleteResponse."""
    return ResponseReader(connection).next()


class ResponseReader:
    """Reads consecutive HTTP responses from a connection, strictly."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = b""

    def next(self) -> tuple[int, bytes]:
        if not self._buffer and not self._receive():
            return 0, b""
        while b"\r\n\r\n" not in self._buffer:
            self._receive_or_raise()
        head, _, self._buffer = self._buffer.partition(b"\r\n\r\n")
        found = re.match(rb"HTTP/1\.1 (\d{3}) ", head)
        if found is None:
            raise IncompleteResponse(f"no answer begins with {head[:80]!r}")
        if length := re.search(rb"(?im)^content-length: (\d+)\r?$", head):
            return int(found[1]), self._take(int(length[1]))
        if not re.search(rb"(?i)transfer-encoding: chunked", head):  # the body ends with the connection
            assert re.search(rb"(?i)connection: close", head), head
            while self._receive():
                pass
            body, self._buffer = self._buffer, b""
            return int(found[1]), body
        parts = []
        while size := int(self._line(), 16):
            parts.append(self._take(size))
            assert self._take(2) == b"\r\n"
        assert self._take(2) == b"\r\n"
        return int(found[1]), b"".join(parts)

    def _line(self) -> bytes:
        while b"\r\n" not in self._buffer:
            self._receive_or_raise()
        line, _, self._buffer = self._buffer.partition(b"\r\n")
        return line

    def _take(self, size: int) -> bytes:
        parts, missing = [], size
        while missing:
            if not self._buffer:
                self._receive_or_raise()
            part, self._buffer = self._buffer[:missing], self._buffer[missing:]
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

    def _receive_or_raise(self) -> None:
        if not self._receive():
            raise IncompleteResponse(f"the connection ended after {self._buffer[-80:]!r}")

    def _receive(self) -> bool:
        try:
            part = self._connection.recv(2**20)
        except ConnectionResetError:
            part = b""
        self._buffer += part
        return bool(part)
