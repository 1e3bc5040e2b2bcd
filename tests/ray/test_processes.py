"""Several workers of a service share one cluster, which ends with the service."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import httpx
import psutil

from tests.conftest import CLIENT_TIMEOUT
from tests.helpers.waiting import until
from tests.helpers.wire import SAFETENSORS, write
from tests.ray.peak import long
from tests.test_lifecycle import Process, served

BODY = write({**long(2**12).sources, "layout": "hld", "include": []}, SAFETENSORS)


def children(server: Process, word: str = "") -> list[psutil.Process]:
    """The processes below a service whose command has a word."""
    found = []
    for process in psutil.Process(server.process.pid).children(recursive=True):
        with suppress(psutil.Error):  # it has ended
            if word in " ".join(process.cmdline()):
                found.append(process)
    return found


def workers(server: Process) -> set[int]:
    return {process.pid for process in children(server, "spawn_main")}


def ask(server: Process) -> None:
    """Have each worker, most likely, compute on the cluster."""
    url = f"http://127.0.0.1:{server.port('vicorn running on')}/attention"
    for _ in range(8):
        response = httpx.post(url, content=BODY, headers={"Content-Type": SAFETENSORS}, timeout=CLIENT_TIMEOUT)
        assert response.status_code == 200, response.text


def is_ready(server: Process) -> bool:
    """True if each of some connections, so most likely each worker, hears that the service is ready."""
    url = f"http://127.0.0.1:{server.port('vicorn running on')}/health/ready"
    return all(httpx.get(url).status_code == 200 for _ in range(8))


@contextmanager
def serving() -> Iterator[tuple[Process, list[psutil.Process]]]:
    """A service of two workers, and all its processes; none of them may be left."""
    with served(workers=2, backend="ray") as server:
        until(lambda: is_ready(server))
        ask(server)
        assert len(children(server, "gcs_server")) == len(children(server, "raylet/raylet")) == 1
        found = children(server)
        yield server, found
    until(lambda: not [one for one in found if one.is_running() and one.status() != psutil.STATUS_ZOMBIE])


def test_workers_share_a_cluster_that_ends_with_the_service() -> None:
    with serving() as (server, _):
        assert server.end(signal.SIGINT) == 0


def test_a_killed_worker_is_replaced_and_the_cluster_stays() -> None:
    with serving() as (server, found):
        (cluster,), before = children(server, "gcs_server"), workers(server)
        os.kill(min(before), signal.SIGKILL)
        until(lambda: len(workers(server) - before) == 1 and is_ready(server))
        ask(server)
        assert children(server, "gcs_server") == [cluster]
        found += children(server)
        assert server.end(signal.SIGTERM) == 0
