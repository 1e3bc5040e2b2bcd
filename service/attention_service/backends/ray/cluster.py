"""The cluster that the Ray backend computes on: one at an address, or one that is started on this machine."""

from __future__ import annotations

import logging
import socket
import threading
from concurrent.futures import Future
from typing import Any, Final, NamedTuple

import ray
from ray.exceptions import RayError

from attention_service.errors import Busy
from attention_service.runtime.machine import cpu_count

NAMESPACE: Final = "attention-service"
# Seconds for a connection to the address of a cluster. Ray itself would wait for minutes.
PATIENCE: Final = 3.0
# Seconds that a request waits for the connection to a cluster, or its start.
WAIT: Final = 20.0
_connecting: Final = threading.Lock()
_attempt: Future[None] = Future()
_attempt.set_result(None)


class Processors(NamedTuple):
    """Numbers of processors that compute tasks: of the whole cluster, and of its nodes on this machine."""

    all: int
    here: int


def processors(address: str, threads: int | None = None) -> Processors:
    """The processors of the cluster that `connect` finds. One on this machine need not be started to know them.

    Errors: Busy.
    """
    if not address and not ray.is_initialized():
        count = threads or cpu_count()
        return Processors(count, count)
    return connect(address, threads)


def connect(address: str, threads: int | None = None) -> Processors:
    """The processors of the cluster that this process is connected to, or connects to now.

    address: of the cluster; "" for one on this machine, which is started with a processor for each of the threads, and
    ends with this process

    Errors: Busy if the cluster cannot be reached, or has no processors.
    """
    try:
        _attempted(address, threads).result(WAIT)
        found = _processors()
    except TimeoutError:
        raise unavailable(f"a connection to {address or 'a new cluster'} that takes long") from None
    except (OSError, RuntimeError, ValueError, RayError) as error:  # an address that is none, or where nobody answers
        raise unavailable(str(error)) from None
    if found.all < 1:
        raise unavailable("a cluster without processors")
    return found


def _attempted(address: str, threads: int | None) -> Future[None]:
    """The attempt to connect: the last one if it succeeded or still lasts, else a new one."""
    global _attempt
    with _connecting:
        if not _attempt.done() or ray.is_initialized():
            return _attempt
        attempt = _attempt = Future()
    # The processes of a cluster on this machine end with the thread that starts them, which must live on.
    if threading.current_thread() is threading.main_thread():
        _begin(address, threads, attempt)
    else:
        threading.Thread(target=_hold, args=(address, threads, attempt), daemon=True, name="ray").start()
    return attempt


def _hold(address: str, threads: int | None, attempt: Future[None]) -> None:
    """Connect, and live on if that succeeds."""
    _begin(address, threads, attempt)
    if attempt.exception() is None:
        threading.Event().wait()


def _begin(address: str, threads: int | None, attempt: Future[None]) -> None:
    """Connect, and set the outcome of the attempt."""
    own: dict[str, Any] = {"address": address}
    if not address:
        own = {"address": "local", "include_dashboard": False, "num_cpus": threads or cpu_count()}
    try:
        _check_answers(address)
        ray.init(namespace=NAMESPACE, log_to_driver=False, logging_level=logging.WARNING, **own)
    except BaseException as error:
        attempt.set_exception(error)
    else:
        attempt.set_result(None)


def start(threads: int) -> str:
    """Start a cluster on this machine, which ends with this process, and return its address for other processes.

    threads: its processors. Errors: Busy.
    """
    connect("", threads)
    return str(ray.get_runtime_context().gcs_address)


def unavailable(got: str) -> Busy:
    """The error for a cluster that does not compute."""
    return Busy.at("/backend", "workers of Ray that compute", got[:300], headers={"Retry-After": "1"})


def _check_answers(address: str) -> None:
    """Check that a process listens at an address of a host and a port. Errors: OSError."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), PATIENCE).close()


def _processors() -> Processors:
    here, counts = ray.util.get_node_ip_address(), [0, 0]
    for node in ray.nodes():
        if node["Alive"]:
            count = int(node["Resources"].get("CPU", 0))
            counts[0] += count
            counts[1] += count * (node["NodeManagerAddress"] == here)
    return Processors(*counts)
