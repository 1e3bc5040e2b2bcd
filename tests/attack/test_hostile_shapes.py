"""Every operation keeps its limits for arrays of unusual shapes: memory, time, and what the event loop may compute.

The application runs in the event loop of this process, where a task that wakes up all the time measures how much
processor time the thread of the loop took between two of its turns.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest
from fastapi.routing import APIRoute

from attention_service.app import create_app
from attention_service.engines.table import FUNCTIONS
from attention_service.settings import Settings
from tests.helpers.hostile import CALLS, KNOWN, OPERATIONS, Drawn, draw_request

MB: Final = 2**20
LIMIT: Final = 256 * MB
TIME_LIMIT: Final = 5.0
# Seconds of processor time that the event loop may take at once, on a machine where Python counts to a million in
# COUNTING seconds.
TURN: Final = 0.1
COUNTING: Final = 0.05
# Requests of each operation. The default; ATTACK_CASES sets more for all operations together.
CASES: Final = int(os.environ.get("ATTACK_CASES", "200")) // len(OPERATIONS)
IS_DEEP: Final = "ATTACK_CASES" in os.environ
SEED: Final = int(os.environ.get("ATTACK_SEED", "1")) * 1_000_000
STATUSES: Final = (200, 400, 406, 413, 422, 503, 504)


@dataclass
class Measured:
    """What a request took.

    turn: most processor time of the loop's thread at once; processor: of the process; wall: by the clock; in seconds
    idle, peak: memory before and at most, in MiB; body: of an answer that is an error
    """

    status: int = 0
    turn: float = 0.0
    processor: float = 0.0
    idle: float = 0.0
    peak: float = 0.0
    wall: float = 0.0
    body: list[bytes] = field(default_factory=list)


class Service:
    """The application in this process."""

    def __init__(self, memory: int = LIMIT) -> None:
        self.app = create_app(Settings(memory_limit=memory, time_limit=TIME_LIMIT, threads=1))

    async def ask(self, drawn: Drawn) -> Measured:
        """Send a request, and measure what it takes."""
        found = Measured()
        gc.collect()
        gc.disable()  # a collection looks at all objects of the tests, in whichever thread makes the next one
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        found.idle = status("VmRSS")
        watch = asyncio.create_task(self._watch(found))
        await asyncio.sleep(0)
        before, start = time.process_time(), time.monotonic()
        await self._send(drawn, found)
        await asyncio.sleep(0)
        watch.cancel()
        with suppress(asyncio.CancelledError):
            await watch
        found.processor, found.wall = time.process_time() - before, time.monotonic() - start
        found.peak = status("VmHWM")
        gc.enable()
        return found

    async def _watch(self, found: Measured) -> None:
        before = time.thread_time()
        while True:
            await asyncio.sleep(0)
            now = time.thread_time()
            found.turn, before = max(found.turn, now - before), now
            await asyncio.sleep(0.001)

    async def _send(self, drawn: Drawn, found: Measured) -> None:
        """One request over ASGI, its body in pieces as a server receives it."""
        headers = {"host": "x", "content-type": drawn.media_type, "content-length": str(len(drawn.body))}
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": drawn.path,
            "raw_path": drawn.path.encode(), "query_string": b"", "root_path": "", "scheme": "http",
            "server": ("x", 80), "client": ("127.0.0.1", 1), "state": {},
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }  # fmt: skip
        pieces = iter(range(0, len(drawn.body), 2**16))
        ended = asyncio.Event()

        async def receive() -> dict[str, Any]:
            await asyncio.sleep(0)  # each piece of a body that comes over a socket is a turn of the loop
            for start in pieces:
                more = start + 2**16 < len(drawn.body)
                return {"type": "http.request", "body": drawn.body[start : start + 2**16], "more_body": more}
            await ended.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                found.status = message["status"]
            elif found.status != 200:
                found.body.append(bytes(message.get("body", b"")))
            await asyncio.sleep(0)

        try:
            await self.app(scope, receive, send)
        finally:
            ended.set()


def status(name: str) -> float:
    """A size of this process in MiB, as the kernel counts it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


def slowness() -> float:
    """How many times as long as on the machine of COUNTING this one computes, at least 1."""
    start = time.process_time()
    for _ in range(1_000_000):
        pass
    return max(1.0, (time.process_time() - start) / COUNTING)


def waiting() -> float:
    """How many times as long as its processor time a computation takes: the control for times by the clock."""
    start, before = time.monotonic(), time.process_time()
    slowness()
    return max(1.0, (time.monotonic() - start) / (time.process_time() - before))


def faults(found: Measured, limit: int = LIMIT) -> Iterator[str]:
    """The limits that a request broke. limit: of memory, in bytes"""
    if found.status not in STATUSES:
        yield f"status {found.status}"
    if found.turn > TURN * slowness():
        yield f"{found.turn:.2f} s of the event loop"
    if found.peak > (limit / MB + found.idle) * 1.1:
        yield f"{found.peak:.0f} MiB of {limit / MB:.0f} + {found.idle:.0f}"
    if found.processor > TIME_LIMIT + 1:
        yield f"{found.processor:.1f} s of {TIME_LIMIT}"
    if IS_DEEP and found.wall > (TIME_LIMIT + 1) * waiting():
        yield f"{found.wall:.1f} s by the clock"


def test_every_operation_and_every_function_is_drawn() -> None:
    app = create_app(Settings())
    paths = {route.path for route in app.routes if isinstance(route, APIRoute) and "POST" in (route.methods or ())}
    versioned = {path for path in paths if "{model_version}" in path}  # the same operation
    assert {path.replace("{model_name}", "attention") for path in paths - versioned} == OPERATIONS.keys()
    assert CALLS.keys() == FUNCTIONS.keys()


@pytest.mark.parametrize("path", OPERATIONS)
def test_limits_hold_for_any_shapes(path: str) -> None:
    service = Service()
    statuses: Counter[int] = Counter()
    broken: list[str] = []

    async def attack() -> None:
        for n in range(CASES):
            drawn = draw_request(path, SEED + n)
            found = await service.ask(drawn)
            statuses[found.status] += 1
            broken.extend(f"{fault}: {found.status} {drawn.what}" for fault in faults(found))

    asyncio.run(attack())
    print(dict(statuses))
    assert not broken, "\n".join(broken)
    assert statuses[200] > CASES / 10, statuses


@pytest.mark.parametrize("name", KNOWN)
def test_limits_hold_for_known_shapes(name: str) -> None:
    """Shapes that broke a limit once: most of these requests have a few hundred bytes."""
    service = Service(2 * LIMIT)
    found = asyncio.run(service.ask(KNOWN[name]()))
    print(found.status, b"".join(found.body)[:400])
    assert not [*faults(found, 2 * LIMIT)]
    assert found.status in (200, 413, 422, 504)
    assert sum(map(len, found.body)) < 10_000
