"""The service is stopped and killed while it computes requests."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import threading
import time
from contextlib import suppress

import numpy as np
import pytest
from safetensors.numpy import save

from attention_service.server.run import SILENCE
from attention_service.settings import Settings
from benchmarks.serving import free_port
from tests.attack.server import TIMEOUT, IncompleteResponse, Live, ResponseReader, live, post, within
from tests.helpers.wire import SAFETENSORS

SMALL = post(json.dumps({"input": [[1, 0], [0, 1]]}).encode())
LARGE = post(save({"input": np.ones((6000, 64), np.float32)}, {"request": '{"include": []}'}), SAFETENSORS)
# Numbers of connections with large and with small requests.
LARGE_CONNECTIONS, SMALL_CONNECTIONS = 8, 4
GRACE: float = Settings.model_fields["grace"].default  # seconds in which a worker may still answer


class LoadClient(threading.Thread):
    """Sends small requests in a loop, and records statuses and incomplete responses."""

    def __init__(self, server: Live) -> None:
        super().__init__()
        self._server = server
        self.statuses: list[int] = []
        self.incomplete: list[str] = []

    def run(self) -> None:
        with suppress(OSError):  # the server no longer listens
            while True:
                with self._server.connect() as connection:
                    self._ask(connection)

    def _ask(self, connection: socket.socket) -> None:
        answers = ResponseReader(connection)
        for _ in range(10):
            connection.sendall(SMALL)
            try:
                status, _ = answers.next()
            except IncompleteResponse as error:
                self.incomplete.append(str(error))
                return
            if status == 0:  # the connection ended before this request was accepted
                return
            self.statuses.append(status)


@pytest.mark.parametrize("workers", [1, 2])
def test_shutdown_under_load_completes_all_accepted_requests(workers: int) -> None:
    with live(workers=workers) as server:
        assert server.ask(LARGE)[0] == 200
        connections = [server.connect() for _ in range(LARGE_CONNECTIONS)]
        for connection in connections:
            connection.sendall(LARGE)
        assert within(TIMEOUT, lambda: _accepted(server, connections) == LARGE_CONNECTIONS)
        clients = [LoadClient(server) for _ in range(SMALL_CONNECTIONS)]
        for client in clients:
            client.start()
        assert within(TIMEOUT, lambda: any(client.statuses for client in clients))
        assert server.stop() == 0, server.logged()
        answers = [ResponseReader(connection).next() for connection in connections]
        for client in clients:
            client.join()
    for connection in connections:
        connection.close()
    assert [status for status, _ in answers] == [200] * LARGE_CONNECTIONS
    assert len({len(body) for _, body in answers}) == 1
    assert [message for client in clients for message in client.incomplete] == []
    assert {status for client in clients for status in client.statuses} == {200}


def _accepted(server: Live, connections: list[socket.socket]) -> int:
    """The number of connections whose requests are in flight or answered; the scrape itself is in flight, too."""
    answered = len(select.select(connections, [], [], 0)[0])
    return answered + int(server.gauge("attention_requests_in_flight")) - 1


@pytest.mark.parametrize("workers", [1, 2])
def test_a_server_killed_under_load_leaves_no_workers_and_starts_again(workers: int) -> None:
    """The main process is killed, as a supervisor might do; its workers must end without it."""
    port = free_port()
    with live(port, workers=workers) as server:
        connections = [server.connect() for _ in range(LARGE_CONNECTIONS)]
        for connection in connections:
            connection.sendall(LARGE)
        time.sleep(0.3)
        tree = server.running.tree()
        server.process.kill()
        server.process.wait()
        gone = within(GRACE + TIMEOUT, lambda: not any(map(_is_alive, tree)))
        for pid in tree[1:]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for connection in connections:
            connection.close()
        assert gone, "workers without their parent go on"
    with live(port, workers=workers) as server:
        assert server.ask(SMALL)[0] == 200


def _is_alive(pid: int) -> bool:
    with suppress(FileNotFoundError), open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] != "Z"
    return False


def test_a_killed_worker_is_replaced() -> None:
    with live(workers=2) as server:
        workers = _workers(server)
        assert len(workers) == 2
        os.kill(workers[0], signal.SIGKILL)
        # uvicorn, which may have asked the worker just before, waits that long for its answer.
        assert within(SILENCE + TIMEOUT, lambda: len(_workers(server)) == 2)
        assert server.ask(SMALL)[0] == 200
        assert server.stop() == 0


def _workers(server: Live) -> list[int]:
    return [pid for pid in server.running.tree()[1:] if "spawn_main" in _command(pid)]


def _command(pid: int) -> str:
    with suppress(OSError), open(f"/proc/{pid}/cmdline") as line:
        return line.read()
    return ""
