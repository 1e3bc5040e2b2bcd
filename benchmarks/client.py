"""A cheap HTTP client, since it shares the processors with the server: it counts the bytes of bodies, unparsed."""

from __future__ import annotations

import selectors
import socket
import statistics
import time
from typing import Protocol

CLIENTS = 32
TIMEOUT = 60.0
# How long a client asks for its answer again and again before it sleeps. In a virtual machine the processor of a client
# that sleeps is woken up late: the same request took 0.5 ms, and 1.2 ms with a client that slept. Longer than W3 takes
# in binary, as servers on both sides of this time would not be comparable; not longer, because the client of a long
# request would take a processor away from the server.
POLLING = 5e-3
# Limits on the repetitions of one request, so that slow servers do not prolong the run.
MAX_SECONDS = 0.75
MIN_TIMES = 3


class Body(Protocol):
    """The body of an answer, which knows its end."""

    def feed(self, data: bytes | memoryview) -> bool:
        """Count these bytes; return True once the body is complete."""
        ...


class Counted:
    """A body with Content-Length."""

    def __init__(self, length: int) -> None:
        self._missing = length

    def feed(self, data: bytes | memoryview) -> bool:
        self._missing -= len(data)
        return self._missing <= 0


class Chunked:
    """A body in chunks (RFC 9112, section 7.1), without trailers."""

    def __init__(self) -> None:
        self._line = b""
        self._skip = 0  # bytes of a chunk and of the end of its line
        self._last = False

    def feed(self, data: bytes | memoryview) -> bool:
        at = 0
        while at < len(data):
            if self._skip:
                step = min(self._skip, len(data) - at)
                self._skip -= step
                at += step
                continue
            line, newline, _ = bytes(data[at : at + 32]).partition(b"\n")
            at += len(line) + len(newline)
            self._line += line
            if newline:
                size = int(self._line.partition(b";")[0], 16)
                self._line, self._last, self._skip = b"", size == 0, size + 2
        return self._last and not self._skip


def read_head(head: bytes) -> Body:
    """Return the body of an answer with status 200, given its head. Errors: ConnectionError for any other status."""
    if not head.startswith(b"HTTP/1.1 200"):
        raise ConnectionError(head[:500].decode())
    return body_of(head)


def body_of(head: bytes) -> Body:
    """Return the body of an answer, given its head. Errors: ConnectionError without a length."""
    for line in head.lower().split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name == b"content-length":
            return Counted(int(value))
        if name == b"transfer-encoding" and value.strip() == b"chunked":
            return Chunked()
    raise ConnectionError("an answer without a length")


class Connection:
    """One keep-alive connection that sends a request after the answer to the previous one."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), TIMEOUT)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = bytearray(2**20)
        self.head = b""  # of the last answer
        self._head = b""
        self._body: Body | None = None

    def send(self, request: bytes) -> None:
        """Send a request without waiting for the answer."""
        self._head, self._body = b"", None
        self.socket.sendall(request)

    def receive(self, flags: int = 0) -> bool:
        """Receive once; return True once the answer is complete. Errors: ConnectionError; those of `recv_into`."""
        got = self.socket.recv_into(self._buffer, 0, flags)
        if not got:
            raise ConnectionError("the server closed the connection")
        if self._body is not None:
            return self._body.feed(memoryview(self._buffer)[:got])
        self._head += bytes(self._buffer[:got])
        head, separator, rest = self._head.partition(b"\r\n\r\n")
        if not separator:
            return False
        self.head = head
        self._body = read_head(head)
        return self._body.feed(rest)

    def ask(self, request: bytes) -> float:
        """Send a request, wait for its answer, and return the seconds in between."""
        start = time.perf_counter()
        self.send(request)
        complete = False
        while not complete:
            try:
                complete = self.receive(socket.MSG_DONTWAIT if time.perf_counter() - start < POLLING else 0)
            except BlockingIOError:
                continue
        return time.perf_counter() - start

    def close(self) -> None:
        self.socket.close()


def latency(port: int, request: bytes, times: int) -> float:
    """Return the median latency of one client in milliseconds."""
    return statistics.median(latencies(port, request, times)) * 1e3


def latencies(port: int, request: bytes, times: int) -> list[float]:
    """Return the seconds of each request of one client, on a connection of its own, after a first request."""
    connection = Connection(port)
    connection.ask(request)
    found: list[float] = []
    while len(found) < MIN_TIMES or (len(found) < times and sum(found) < MAX_SECONDS):
        found.append(connection.ask(request))
    connection.close()
    return found


def throughput(port: int, request: bytes, seconds: float, clients: int = CLIENTS) -> float:
    """Return the answers per second to clients that send the next request at once."""
    selector = selectors.DefaultSelector()
    for _ in range(clients):
        connection = Connection(port)
        selector.register(connection.socket, selectors.EVENT_READ, connection)
        connection.send(request)
    count, start = 0, time.perf_counter()
    while (now := time.perf_counter()) - start < seconds:
        for key, _ in selector.select(1):
            if key.data.receive():
                count += 1
                key.data.send(request)
    _drain(selector)
    return count / (now - start)


def _drain(selector: selectors.BaseSelector) -> None:
    """Wait for the answers to all requests that were sent, which would slow down the next measurement."""
    while selector.get_map():
        for key, _ in selector.select():
            if key.data.receive():
                selector.unregister(key.fileobj)
                key.data.close()
