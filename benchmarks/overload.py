"""Far more clients than the service can answer: what it still does, how long the accepted wait, how soon others know.

The clients share one processor, the server has another. Of the requests half are small, half large; who is refused asks
again a little later. Throughput is in seconds of work a second: each kind counts as much as it takes when nobody else
asks, as the mix of what is answered changes under load. Exit status 1 where an answer, the memory or the descriptors
are not as they should be; times count only with --times, as a shared machine has others.
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
from pathlib import Path
from typing import Final

import numpy as np
from safetensors.numpy import save

from benchmarks.client import Body, body_of
from benchmarks.forms import JSON, SAFETENSORS, Request
from benchmarks.ratios import Ratio, rows
from benchmarks.serving import Others, Running, serving

CLIENTS: Final = 200
FEW: Final = 6
# Seconds until a client that was refused asks again, and between looks at the health.
AGAIN: Final = 0.25
LOOK: Final = 0.05
MEMORY: Final = 512 * 2**20
QUEUE: Final = 64
# Megabytes for what is no request: threads, buffers of 200 connections, arenas of the allocator.
SLACK: Final = 128.0
KINDS: Final = ("small", "large")
HEALTH: Final = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"


def requests() -> dict[str, bytes]:
    """All bytes of each kind."""
    generator = np.random.default_rng(0)
    small = {name: generator.normal(size=(6, 4)).tolist() for name in ("query", "key", "value")}
    large = {name: generator.normal(size=(512, 64)).astype(np.float32) for name in ("query", "key", "value")}
    return {
        "small": Request("/attention", {"Content-Type": JSON}, json.dumps(small).encode()).message(),
        "large": Request("/attention", {"Content-Type": SAFETENSORS}, save(large)).message(),
        "health": HEALTH,
    }


class Client:
    """A connection, and what it waits for."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), 60)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self.kind, self.start, self.status = "", 0.0, 0
        self.rest = memoryview(b"")  # of the request
        self._head = b""
        self._body: Body | None = None

    def ask(self, kind: str, request: bytes) -> None:
        """Begin to send."""
        self.kind, self.start, self.rest = kind, time.perf_counter(), memoryview(request)
        self._head, self._body = b"", None

    def send(self) -> None:
        """As much as there is room for."""
        self.rest = self.rest[self.socket.send(self.rest) :]

    def receive(self, buffer: bytearray) -> bool:
        """Take what has come. Whether the answer is complete. Errors: ConnectionError."""
        got = self.socket.recv_into(buffer)
        if not got:
            raise ConnectionError("the server hung up")
        data = memoryview(buffer)[:got]
        if self._body is not None:
            return self._body.feed(data)
        self._head += bytes(data)
        head, separator, rest = self._head.partition(b"\r\n\r\n")
        if not separator:
            return False
        self.status = int(head[9:12])
        self._body = body_of(head)
        return self._body.feed(rest)


@dataclass
class Found:
    """Seconds of answers by kind and status, how often clients were cut off, and how long it all took."""

    times: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    broken: int = 0
    seconds: float = 0.0

    def add(self, client: Client) -> None:
        self.times.setdefault((client.kind, client.status), []).append(time.perf_counter() - client.start)

    def work(self, costs: dict[str, float]) -> float:
        """Seconds of work a second."""
        return sum(costs[kind] * len(self.times.get((kind, 200), [])) for kind in KINDS) / self.seconds

    def milliseconds(self, kinds: tuple[str, ...], status: int, percent: int) -> float:
        """What so many percent do not exceed; NaN where there is none."""
        found = sorted(second for kind in kinds for second in self.times.get((kind, status), []))
        return found[-(-len(found) * percent // 100) - 1] * 1e3 if found else math.nan


class Crowd:
    """Clients that each ask again as soon as they may, and one that looks at the health."""

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
        """Ask for so long, then wait for what is under way."""
        start = time.perf_counter()
        end = start + seconds
        while (now := time.perf_counter()) < end:
            self._due(now)
            self._step(end)
        self.found.seconds = now - start
        counted, self.found = self.found, Found()  # what comes later does not count
        while self._selector.get_map():
            self._step(0)
        for _, _, client in self._later:
            client.socket.close()
        return counted

    def _due(self, now: float) -> None:
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
                if events & selectors.EVENT_READ and client.receive(self._buffer):
                    self._answered(client, time.perf_counter() < end)
            except ConnectionError:
                self.found.broken += 1
                self._selector.unregister(client.socket)
                client.socket.close()
                heappush(self._later, (time.perf_counter() + AGAIN, id(client), Client(self._port)))

    def _answered(self, client: Client, goes_on: bool) -> None:
        self.found.add(client)
        self._selector.unregister(client.socket)
        if not goes_on:
            client.socket.close()
        elif client.kind == "health" or client.status != 200:
            pause = LOOK if client.kind == "health" else AGAIN
            heappush(self._later, (time.perf_counter() + pause, id(client), client))
        else:
            self._ask(client, "")


def costs(port: int, asked: dict[str, bytes]) -> dict[str, float]:
    """Seconds that each kind takes when nobody else asks."""
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
    """The server on the last processor, this process on the first, if there are two."""
    processors = sorted(os.sched_getaffinity(0))
    os.environ |= {"ATTENTION_MEMORY_LIMIT": str(MEMORY), "ATTENTION_QUEUE": str(QUEUE)}

    def answers(port: int) -> None:
        socket.create_connection(("127.0.0.1", port), 1).close()

    os.sched_setaffinity(0, processors[-1:])  # which the server inherits
    with serving([sys.executable, "-m", "service", "serve"], answers) as running:
        os.sched_setaffinity(0, processors[:1])
        yield running
    os.sched_setaffinity(0, processors)


def descriptors(running: Running) -> int:
    return sum(len(os.listdir(Path("/proc") / str(pid) / "fd")) for pid in running.tree())


def main() -> None:
    """Few clients, many, and few again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--times", action="store_true", help="exit status 1 where a target of time is missed, too")
    options = parser.parse_args()
    asked, others = requests(), Others()
    few_seconds = max(options.seconds / 8, 3)
    with pinned_server() as running:
        alone = costs(running.port, asked)
        time.sleep(1)
        before, idle = descriptors(running), running.resident()
        running.forget_peak()
        # Few before many and after them, as a shared machine does not stay equally fast.
        some = [Crowd(running.port, FEW, asked).run(few_seconds)]
        many = Crowd(running.port, CLIENTS, asked).run(options.seconds)
        some.append(Crowd(running.port, FEW, asked).run(few_seconds))
        best = statistics.mean(found.work(alone) for found in some)
        grown = running.peak() - idle
        time.sleep(1)
        after = descriptors(running)
    # A place in line moves on as often as a large request is done, while small ones and refusals are served, too.
    bound = QUEUE * many.seconds / max(1, len(many.times.get(("large", 200), []))) * 1e3
    statuses = Counter({key: len(times) for key, times in many.times.items()})
    print(f"alone: small {alone['small'] * 1e3:.2f} ms, large {alone['large'] * 1e3:.2f} ms")
    print(f"{FEW} clients: {best:.3f}; {CLIENTS} clients: {many.work(alone):.3f} seconds of work a second")
    print(f"answers: {dict(sorted(statuses.items()))}, {many.broken} cut off")
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
    good = known and after <= before and peak.value <= peak.bound and many.work(alone) > 0
    late = any(ratio.value < ratio.bound if ratio.at_least else ratio.value > ratio.bound for ratio in timed)
    sys.exit(not good or (options.times and late))


if __name__ == "__main__":
    main()
