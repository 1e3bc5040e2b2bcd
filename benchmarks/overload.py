"""Overload: throughput, latency of accepted and refused requests, and memory, with more clients than can be answered.

The clients share one processor, the server has another. Half of the requests are small, half are large; refused clients
retry after a pause. Throughput is in seconds of work per second: a request counts as the seconds that it takes on an
idle server, as the mix of accepted requests changes under load. Exit status 1 if an answer, the memory or the
descriptors are wrong; latencies count with --times only, as other processes on a shared machine distort them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import selectors
import socket
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Final

import numpy as np
from safetensors.numpy import save

from benchmarks.client import Body, body_of
from benchmarks.forms import JSON, SAFETENSORS, Request
from benchmarks.ratios import Ratio, rows
from benchmarks.serving import Others, Running, serving

CLIENTS: Final = 200
FEW: Final = 6
# Seconds until a refused client retries, and between health checks.
RETRY_AFTER: Final = 0.25
HEALTH_INTERVAL: Final = 0.05
MEMORY: Final = 512 * 2**20
QUEUE: Final = 64
# Megabytes besides the requests: threads, buffers of 200 connections, arenas of the allocator.
SLACK: Final = 128.0
KINDS: Final = ("small", "large")
HEALTH: Final = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"


def requests() -> dict[str, bytes]:
    """Return the bytes of each kind of request."""
    generator = np.random.default_rng(0)
    small = {name: generator.normal(size=(6, 4)).tolist() for name in ("query", "key", "value")}
    large = {name: generator.normal(size=(512, 64)).astype(np.float32) for name in ("query", "key", "value")}
    return {
        "small": Request("/attention", {"Content-Type": JSON}, json.dumps(small).encode()).message(),
        "large": Request("/attention", {"Content-Type": SAFETENSORS}, save(large)).message(),
        "health": HEALTH,
    }


class Client:
    """A keep-alive connection with one request at a time.

    rest: bytes of the request that are not sent yet; seconds: from request to answer, None before its end;
    closing: True if the server closes the connection after the answer
    """

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), 60)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self.kind, self.start, self.status, self.closing = "", 0.0, 0, False
        self.seconds: float | None = None
        self.rest = memoryview(b"")
        self._head = b""
        self._body: Body | None = None

    def ask(self, kind: str, request: bytes) -> None:
        """Start a request."""
        self.kind, self.start, self.rest = kind, time.perf_counter(), memoryview(request)
        self.seconds, self._head, self._body = None, b"", None

    def send(self) -> None:
        """Send as much as the socket's buffer takes."""
        self.rest = self.rest[self.socket.send(self.rest) :]

    def receive(self, buffer: bytearray) -> bool:
        """Receive once; return True once the answer is complete. Errors: ConnectionError."""
        got = self.socket.recv_into(buffer)
        if not got:
            raise ConnectionError("the server closed the connection")
        data = memoryview(buffer)[:got]
        if self._body is None:
            self._head += bytes(data)
            head, separator, rest = self._head.partition(b"\r\n\r\n")
            if not separator:
                return False
            self.status = int(head[9:12])
            self.closing = b"connection: close" in head.lower()
            self._body, data = body_of(head), memoryview(rest)
        if self._body.feed(data):
            self.seconds = time.perf_counter() - self.start
        return self.seconds is not None


@dataclass
class Found:
    """Latencies in seconds by kind and status, the number of broken connections, and the duration."""

    times: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    broken: int = 0
    seconds: float = 0.0

    def add(self, client: Client) -> None:
        assert client.seconds is not None
        self.times.setdefault((client.kind, client.status), []).append(client.seconds)

    def work(self, costs: dict[str, float]) -> float:
        """Return the throughput in seconds of work per second."""
        return sum(costs[kind] * len(self.times.get((kind, 200), [])) for kind in KINDS) / self.seconds

    def milliseconds(self, kinds: tuple[str, ...], status: int, percent: int) -> float:
        """Return a percentile of the latencies in milliseconds, NaN if there are none."""
        found = sorted(second for kind in kinds for second in self.times.get((kind, status), []))
        return found[-(-len(found) * percent // 100) - 1] * 1e3 if found else math.nan


class LoadGenerator:
    """Clients that send the next request as soon as they may, and one that checks the health."""

    def __init__(self, port: int, clients: int, asked: dict[str, bytes]) -> None:
        self._port, self._asked = port, asked
        self._random = random.Random(0)
        self._selector = selectors.DefaultSelector()
        self._later: list[tuple[float, int, Client]] = []
        self._buffer = bytearray(2**20)
        self.found = Found()
        for number in range(clients + 1):
            self._ask(Client(port), "health" if number == clients else "")

    def run(self, seconds: float) -> Found:
        """Send requests for some seconds, then wait for the last answers."""
        start = time.perf_counter()
        end = start + seconds
        while (now := time.perf_counter()) < end:
            self._retry(now)
            self._step(end)
        self.found.seconds = now - start
        counted, self.found = self.found, Found()  # later answers do not count
        while self._selector.get_map():
            self._step(0)
        for _, _, client in self._later:
            client.socket.close()
        return counted

    def _retry(self, now: float) -> None:
        while self._later and self._later[0][0] <= now:
            _, _, client = heappop(self._later)
            self._ask(client, "health" if client.kind == "health" else "")

    def _ask(self, client: Client, kind: str) -> None:
        kind = kind or self._random.choice(KINDS)
        client.ask(kind, self._asked[kind])
        self._selector.register(client.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, client)

    def _step(self, end: float) -> None:
        for key, events in self._selector.select(0.01):
            client: Client = key.data
            try:
                if events & selectors.EVENT_WRITE and client.rest:
                    client.send()
                    if not client.rest:
                        self._selector.modify(client.socket, selectors.EVENT_READ, client)
                if events & selectors.EVENT_READ and client.seconds is None:
                    client.receive(self._buffer)
            except ConnectionError:
                self.found.broken += 1
                self._selector.unregister(client.socket)
                self._later_again(self._reconnected(client), RETRY_AFTER)
                continue
            # A refusal can come before the whole body is sent; the rest of it belongs to this request.
            if client.seconds is not None and (client.closing or not client.rest):
                self._answered(client, time.perf_counter() < end)

    def _answered(self, client: Client, goes_on: bool) -> None:
        self.found.add(client)
        self._selector.unregister(client.socket)
        if not goes_on:
            client.socket.close()
            return
        kind, status = client.kind, client.status
        if client.closing:
            client = self._reconnected(client)
        if kind == "health" or status != 200:
            self._later_again(client, HEALTH_INTERVAL if kind == "health" else RETRY_AFTER)
        else:
            self._ask(client, "")

    def _reconnected(self, client: Client) -> Client:
        """Return a client on a new connection."""
        client.socket.close()
        found = Client(self._port)
        found.kind = client.kind
        return found

    def _later_again(self, client: Client, pause: float) -> None:
        heappush(self._later, (time.perf_counter() + pause, id(client), client))


def costs(port: int, asked: dict[str, bytes]) -> dict[str, float]:
    """Return the latency of each kind in seconds, from one client."""
    found = {}
    for kind in KINDS:
        client, times = Client(port), []
        client.socket.setblocking(True)
        for _ in range(50):
            client.ask(kind, asked[kind])
            while client.rest:
                client.send()
            while not client.receive(bytearray(2**20)):
                pass
            times.append(time.perf_counter() - client.start)
        client.socket.close()
        found[kind] = statistics.median(times)
    return found


@contextmanager
def pinned_server() -> Iterator[Running]:
    """Run the server on the last processor, and this process on the first, if there are two."""
    processors = sorted(os.sched_getaffinity(0))
    os.environ |= {"ATTENTION_MEMORY_LIMIT": str(MEMORY), "ATTENTION_QUEUE": str(QUEUE)}

    def answers(port: int) -> None:
        socket.create_connection(("127.0.0.1", port), 1).close()

    os.sched_setaffinity(0, processors[-1:])  # inherited by the server
    with serving([sys.executable, "-m", "attention_service", "serve"], answers) as running:
        os.sched_setaffinity(0, processors[:1])
        yield running
    os.sched_setaffinity(0, processors)


def main() -> None:
    """Measure few clients, many, and few again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument(
        "--times", action="store_true", help="exit status 1 if a bound on latency or throughput is missed, too"
    )
    options = parser.parse_args()
    asked, others = requests(), Others()
    few_seconds = max(options.seconds / 8, 3)
    with pinned_server() as running:
        alone = costs(running.port, asked)
        time.sleep(1)
        before, idle = running.descriptors(), running.resident()
        running.forget_peak()
        # Few clients before and after many, as the speed of a shared machine changes.
        some = [LoadGenerator(running.port, FEW, asked).run(few_seconds)]
        many = LoadGenerator(running.port, CLIENTS, asked).run(options.seconds)
        some.append(LoadGenerator(running.port, FEW, asked).run(few_seconds))
        best = statistics.mean(found.work(alone) for found in some)
        grown = running.peak() - idle
        after = running.descriptors_left(before)
    # The queue moves once per large request, while small requests and refusals are answered, too.
    bound = QUEUE * many.seconds / max(1, len(many.times.get(("large", 200), []))) * 1e3
    statuses = Counter({key: len(times) for key, times in many.times.items()})
    print(f"alone: small {alone['small'] * 1e3:.2f} ms, large {alone['large'] * 1e3:.2f} ms")
    print(f"{FEW} clients: {best:.3f}; {CLIENTS} clients: {many.work(alone):.3f} seconds of work per second")
    print(f"answers: {dict(sorted(statuses.items()))}, {many.broken} broken connections")
    for kind in KINDS:
        p50, p99 = (many.milliseconds((kind,), 200, percent) for percent in (50, 99))
        print(f"{kind}, accepted: p50 {p50:.1f} ms, p99 {p99:.1f} ms")
    print(f"descriptors: {before} before, {after} after; {others.line()}\n")
    timed = [
        Ratio("work of many / of few", many.work(alone) / best, 0.9, at_least=True),
        Ratio("p99 of large / (queue × seconds for each)", many.milliseconds(("large",), 200, 99) / bound, 2),
        Ratio("p99 of 503, ms", many.milliseconds(KINDS, 503, 99), 50),
        Ratio("p99 of health, ms", many.milliseconds(("health",), 200, 99), 100),
    ]
    peak = Ratio("peak memory over idle, MB", grown, MEMORY / 2**20 + SLACK)
    print(rows([*timed, peak]))
    known = all(status in (200, 413, 503, 504) for _, status in statuses) and many.broken == 0
    good = known and after <= before and peak.met and many.work(alone) > 0
    sys.exit(not good or (options.times and not all(ratio.met for ratio in timed)))


if __name__ == "__main__":
    main()
