"""The profile `scale` of docker-compose.yml: three replicas behind a proxy."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest

from attention_service.errors import BodyTooLarge
from attention_service.http.problems import MEDIA_TYPE
from attention_service.schemas.problem import Problem
from benchmarks.serving import free_port
from tests.helpers.wire import NPZ, read, write
from tests.image.engine import ROOT, await_response, await_success, compose, containers, engine

PROJECT = "attention-test"
CLIENTS = 12
# Counts as the status of a response that ends before its Content-Length.
INCOMPLETE = 0
REQUESTS = 1000


@pytest.fixture(scope="module")
def proxy() -> Iterator[str]:
    """The URL of the proxy."""
    port = free_port()
    scale = partial(compose, PROJECT, "--profile", "scale", PROXY_PORT=str(port))
    try:
        scale("up", "--detach", "replica")
        for name in containers(PROJECT, "replica"):  # podman-compose may not wait until they are healthy
            await_success("exec", name, "attention-service", "health")
        scale("up", "--detach", "proxy")
        await_response(f"http://127.0.0.1:{port}")
        yield f"http://127.0.0.1:{port}"
    finally:
        scale("down", "--volumes")


@dataclass(frozen=True)
class Entry:
    """A line of the proxy's log. begun: Unix time; asked: addresses of the replicas that got the request"""

    begun: float
    status: int
    asked: tuple[str, ...]


def log() -> list[Entry]:
    """The entries of POST /attention in the proxy's log."""
    lines = (re.fullmatch(r'([\d.]+) (\d+) ([\d.]+) (.+) "POST /attention .*"', line) for line in logged())
    found = (line.groups() for line in lines if line)
    return [
        Entry(float(end) - float(took), int(status), tuple(asked.split(", "))) for end, status, took, asked in found
    ]


def logged() -> list[str]:
    (name,) = containers(PROJECT, "proxy")
    return engine("logs", name).splitlines()


def ask(url: str, during: Callable[[int], None] = lambda _: None) -> Counter[int]:
    """Statuses of 1,000 requests from 12 clients, INCOMPLETE for one that is cut off. Calls `during` with the number of
    each request before it is sent."""
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
                    statuses.append(INCOMPLETE)
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


def test_the_proxy_passes_large_bodies_and_problems(proxy: str) -> None:
    """Large bodies pass, though the proxy has a buffer of 4 MB; larger bodies get a problem of the service's format."""
    tokens = np.ones((100_000, 64), np.float32)
    large = {"query": tokens[:1], "key": tokens, "value": tokens, "include": []}
    answer = httpx.post(f"{proxy}/attention", content=write(large, NPZ), headers={"Content-Type": NPZ}, timeout=60)
    assert answer.status_code == 200, answer.text
    refused = httpx.post(f"{proxy}/attention", content=b"0" * (65 * 2**20), headers={"Content-Type": NPZ}, timeout=60)
    assert refused.headers["Content-Type"] == MEDIA_TYPE
    problem = Problem.model_validate(refused.json())
    assert (refused.status_code, problem.status, problem.code) == (413, BodyTooLarge.status, BodyTooLarge.code)
    assert (problem.title, problem.request_id) == (BodyTooLarge.title, refused.headers["X-Request-ID"])


def test_the_proxy_passes_no_metrics(proxy: str) -> None:
    assert {httpx.get(f"{proxy}{path}").status_code for path in ("/metrics", "/%6detrics", "/metrics?x")} == {404}


def test_the_proxy_serves_after_the_restart_that_the_page_shows(proxy: str) -> None:
    (restart,) = re.findall(r"`docker compose (restart proxy)`", (ROOT / "docs" / "deployment.md").read_text())
    compose(PROJECT, "--profile", "scale", *restart.split(), PROXY_PORT=str(urlsplit(proxy).port))
    await_response(proxy)


def test_killing_a_busy_replica_loses_only_its_running_requests(proxy: str, report: Callable[[str], None]) -> None:
    before = len(log())
    killed: list[float] = []

    def kill(number: int) -> None:
        if number == REQUESTS // 3:
            engine("kill", "--signal=KILL", containers(PROJECT, "replica")[0])
            killed.append(time.time())

    statuses = ask(proxy, kill)
    lost = [entry for entry in log()[before:] if entry.status != 200]
    report(
        f"one replica killed under load: {statuses[200]} of {REQUESTS} answered, {len(lost)} lost with it, "
        f"{statuses[INCOMPLETE]} incomplete responses"
    )
    assert len(lost) + statuses[INCOMPLETE] == REQUESTS - statuses[200] < CLIENTS
    assert all(entry.begun < killed[0] for entry in lost)
    assert len({entry.asked for entry in lost}) <= 1


def test_killing_an_idle_replica_loses_no_request(proxy: str, report: Callable[[str], None]) -> None:
    """The proxy's connection fails, and it sends the request to another replica."""
    before = len(log())
    engine("kill", "--signal=KILL", containers(PROJECT, "replica")[-1])
    statuses = ask(proxy)
    retried = sum(len(entry.asked) > 1 for entry in log()[before:])
    report(f"an idle replica killed: {statuses[200]} of {REQUESTS} answered, {retried} by a second replica")
    assert statuses == {200: REQUESTS}
    assert retried
