"""The profile `scale` of docker-compose.yml: three replicas behind a proxy."""

from __future__ import annotations

import os
import re
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

import httpx
import numpy as np
import pytest

from service.errors import BodyTooLarge
from service.http.problems import MEDIA_TYPE
from service.schemas.problem import Problem
from tests.conftest import free_port
from tests.helpers.wire import NPZ, read, write
from tests.image.engine import COMPOSE, ROOT, await_answer, await_success, engine

PROJECT = "attention-test"
CLIENTS = 12
# Of an answer that ended before its length.
CUT = 0
REQUESTS = 1000


@pytest.fixture(scope="module")
def proxy() -> Iterator[str]:
    """The URL of the proxy."""
    port = free_port()

    def compose(*arguments: str) -> None:
        command = [*COMPOSE, "--project-name", PROJECT, "--profile", "scale", *arguments]
        environment = os.environ | {"PROXY_PORT": str(port)}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    try:
        compose("up", "--detach", "replica")
        for name in containers("replica"):  # podman-compose may not wait for them by itself
            await_success("exec", name, "attention-service", "health")
        compose("up", "--detach", "proxy")
        await_answer(f"http://127.0.0.1:{port}")
        yield f"http://127.0.0.1:{port}"
    finally:
        compose("down", "--volumes")


def containers(service: str) -> list[str]:
    """Their names."""
    names = engine("ps", "--format", "{{.Names}}").splitlines()
    return sorted(name for name in names if re.fullmatch(rf"{PROJECT}[-_]{service}[-_]\d+", name))


@dataclass(frozen=True)
class Entry:
    """A line of the proxy's log."""

    begun: float
    status: int
    asked: tuple[str, ...]


def log() -> list[Entry]:
    """What the proxy logged of POST /attention."""
    lines = (re.fullmatch(r'([\d.]+) (\d+) ([\d.]+) (.+) "POST /attention .*"', line) for line in logged())
    found = (line.groups() for line in lines if line)
    return [
        Entry(float(end) - float(took), int(status), tuple(asked.split(", "))) for end, status, took, asked in found
    ]


def logged() -> list[str]:
    (name,) = containers("proxy")
    return engine("logs", name).splitlines()


def ask(url: str, during: Callable[[int], None] = lambda _: None) -> Counter[int]:
    """Statuses of 1,000 requests from 12 clients, CUT for an answer that broke off. Calls `during` with the number of
    each, before it is sent."""
    random = np.random.default_rng(0)
    body = write({"input": random.normal(size=(128, 64)).astype(np.float32)}, NPZ)
    numbers, statuses = count(), list[int]()

    def client() -> None:
        with httpx.Client(base_url=url, timeout=30) as own:
            while (number := next(numbers)) < REQUESTS:
                during(number)
                try:
                    answer = own.post("/attention", content=body, headers={"Content-Type": NPZ})
                except httpx.RemoteProtocolError:
                    statuses.append(CUT)
                    continue
                statuses.append(answer.status_code)
                assert answer.status_code != 200 or read(answer.content, NPZ)["output"].shape == (128, 64)

    threads = [threading.Thread(target=client) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(statuses) == REQUESTS
    return Counter(statuses)


def test_requests_are_spread_over_all_replicas(proxy: str, report: Callable[[str], None]) -> None:
    before = len(log())
    statuses = ask(proxy)
    shares = Counter(entry.asked for entry in log()[before:])
    report(f"{REQUESTS} requests over {len(shares)} replicas: {sorted(shares.values())}")
    assert statuses == {200: REQUESTS}
    assert len(shares) == 3
    assert min(shares.values()) > REQUESTS / 6


def test_bodies_pass_through(proxy: str) -> None:
    """Large ones too, though the proxy has 4 MB to write to; too large ones are refused in the service's words."""
    tokens = np.ones((100_000, 64), np.float32)
    large = {"query": tokens[:1], "key": tokens, "value": tokens, "include": []}
    answer = httpx.post(f"{proxy}/attention", content=write(large, NPZ), headers={"Content-Type": NPZ}, timeout=60)
    assert answer.status_code == 200, answer.text
    refused = httpx.post(f"{proxy}/attention", content=b"0" * (65 * 2**20), headers={"Content-Type": NPZ}, timeout=60)
    assert refused.headers["Content-Type"] == MEDIA_TYPE
    problem = Problem.model_validate(refused.json())
    assert (refused.status_code, problem.status, problem.code) == (413, BodyTooLarge.status, BodyTooLarge.code)
    assert (problem.title, problem.request_id) == (BodyTooLarge.title, refused.headers["X-Request-ID"])


def test_a_replica_killed_at_work_takes_nothing_with_it_but_that(proxy: str, report: Callable[[str], None]) -> None:
    before = len(log())
    killed: list[float] = []

    def kill(number: int) -> None:
        if number == REQUESTS // 3:
            engine("kill", "--signal=KILL", containers("replica")[0])
            killed.append(time.time())

    statuses = ask(proxy, kill)
    lost = [entry for entry in log()[before:] if entry.status != 200]
    report(
        f"one replica killed at work: {statuses[200]} of {REQUESTS} answered, {len(lost)} lost that it was working on, "
        f"{statuses[CUT]} answers broken off"
    )
    assert len(lost) + statuses[CUT] == REQUESTS - statuses[200] < CLIENTS
    assert all(entry.begun < killed[0] for entry in lost)
    assert len({entry.asked for entry in lost}) <= 1


def test_a_replica_killed_at_rest_takes_nothing_with_it(proxy: str, report: Callable[[str], None]) -> None:
    """The proxy learns of it by a connection that fails, and asks another."""
    before = len(log())
    engine("kill", "--signal=KILL", containers("replica")[-1])
    statuses = ask(proxy)
    elsewhere = sum(len(entry.asked) > 1 for entry in log()[before:])
    report(
        f"another killed at rest: {statuses[200]} of {REQUESTS} answered, {elsewhere} of them by the second one asked"
    )
    assert statuses == {200: REQUESTS}
    assert elsewhere
