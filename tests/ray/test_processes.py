"""A cluster that the settings ask for: one for all workers, on loopback addresses, which ends with the service."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from typing import Any

import httpx
import psutil
import ray
from ray.cluster_utils import Cluster

from tests.conftest import CLIENT_TIMEOUT
from tests.helpers.waiting import until
from tests.helpers.wire import SAFETENSORS, write
from tests.ray.peak import long
from tests.test_lifecycle import WORKERS, Process, served

FIELDS = {**long(2**12).sources, "layout": "hld", "include": []}
BODY = write(FIELDS, SAFETENSORS)
# Seconds of a drain. Ray's own handler of SIGTERM would abort the process after three.
DRAIN = 5


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


def open_ports(server: Process) -> set[tuple[str, int]]:
    """The addresses and ports at which the processes of a service listen, without those of its clients."""
    found = set()
    for process in [psutil.Process(server.process.pid), *children(server)]:
        with suppress(psutil.NoSuchProcess):  # it has ended
            for port in process.net_connections("inet"):
                if port.status in (psutil.CONN_LISTEN, psutil.CONN_NONE):  # of TCP, and of UDP
                    found.add((port.laddr.ip.removeprefix("::ffff:"), port.laddr.port))
    return found


def post(server: Process, body: bytes) -> httpx.Response:
    url = f"http://127.0.0.1:{server.port('vicorn running on')}/attention"
    return httpx.post(url, content=body, headers={"Content-Type": SAFETENSORS}, timeout=CLIENT_TIMEOUT)


def ask(server: Process) -> None:
    """Have each worker, most likely, compute on the cluster."""
    for _ in range(8):
        response = post(server, BODY)
        assert response.status_code == 200, response.text


def is_ready(server: Process) -> bool:
    """True if each of some connections, so most likely each worker, hears that the service is ready."""
    url = f"http://127.0.0.1:{server.port('vicorn running on')}/health/ready"
    return all(httpx.get(url).status_code == 200 for _ in range(8))


def end_while_a_client_is_connected(server: Process) -> None:
    """Send SIGTERM, and assert that each worker drains to the end, without a word of Ray."""
    count = sum("startup complete" in line for line in server.log)
    with httpx.Client() as kept:
        kept.get(f"http://127.0.0.1:{server.port('vicorn running on')}/health/live")
        assert server.end(signal.SIGTERM) == 0
    assert sum("Finished server process" in line for line in server.log) == count
    assert not any("SIGTERM received at" in line or "Traceback" in line for line in server.log), "".join(server.log)


@contextmanager
def serving(workers: int = 2, **settings: Any) -> Iterator[tuple[Process, list[psutil.Process]]]:
    """A service that starts a cluster, and all its processes; none of them may be left."""
    with served(workers=workers, backend="ray", **settings) as server:
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


def test_a_request_starts_no_cluster_that_the_settings_do_not_name() -> None:
    with served() as server:
        before = open_ports(server)
        answer = post(server, write(FIELDS | {"backend": "ray"}, SAFETENSORS))
        assert (answer.status_code, answer.json()["code"]) == (422, "unknown_backend")
        assert "ATTENTION_RAY_ADDRESS or ATTENTION_BACKEND=ray must be set" in answer.json()["detail"]
        assert (open_ports(server), children(server)) == (before, [])
        assert server.end(signal.SIGTERM) == 0


@WORKERS
def test_all_ports_of_a_cluster_that_the_service_starts_are_on_loopback_addresses(workers: int) -> None:
    with serving(workers, drain=DRAIN) as (server, _):
        ports = open_ports(server)
        assert len(ports) > workers
        assert {address for address, _ in ports if not ip_address(address).is_loopback} == set()
        end_while_a_client_is_connected(server)


@WORKERS
def test_a_service_that_joined_a_cluster_ends_without_it(cluster: Cluster, workers: int) -> None:
    with served(workers=workers, backend="ray", ray_address=cluster.address, drain=DRAIN) as server:
        until(lambda: is_ready(server))
        ask(server)
        end_while_a_client_is_connected(server)
    assert ray.cluster_resources()["CPU"] == 2


def test_sigterm_while_a_cluster_starts_ends_the_service_and_the_cluster() -> None:
    with served(backend="ray") as server:
        until(lambda: children(server, "gcs_server"))
        found = children(server)
        assert server.end(signal.SIGTERM) == 0
    until(lambda: not [one for one in found if one.is_running() and one.status() != psutil.STATUS_ZOMBIE])
