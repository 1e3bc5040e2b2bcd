"""Being told to stop, and being killed, with requests at work."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from contextlib import suppress

import numpy as np
import pytest
from safetensors.numpy import save

from tests.attack.server import Answers, Half, Live, free_port, live, post, within
from tests.helpers.wire import SAFETENSORS

SMALL = post(json.dumps({"input": [[1, 0], [0, 1]]}).encode())
LARGE = post(save({"input": np.ones((6000, 64), np.float32)}, {"request": '{"include": []}'}), SAFETENSORS)
# Connections with large requests, and with small ones.
AT_WORK, BUSY = 8, 4


class Busy(threading.Thread):
    """Asks again and again; an answer is whole, or there is none at all."""

    def __init__(self, server: Live) -> None:
        super().__init__()
        self._server = server
        self.statuses: list[int] = []
        self.halves: list[str] = []

    def run(self) -> None:
        with suppress(OSError):  # nobody listens any more
            while True:
                with self._server.connect() as connection:
                    self._ask(connection)

    def _ask(self, connection: socket.socket) -> None:
        answers = Answers(connection)
        for _ in range(10):
            connection.sendall(SMALL)
            try:
                status, _ = answers.next()
            except Half as error:
                self.halves.append(str(error))
                return
            if status == 0:  # the connection ended before this request was taken
                return
            self.statuses.append(status)


@pytest.mark.parametrize("workers", [1, 2])
def test_stopping_under_load_answers_all_that_was_accepted(workers: int) -> None:
    with live(workers=workers) as server:
        assert server.ask(LARGE)[0] == 200
        clients = [Busy(server) for _ in range(BUSY)]
        for client in clients:
            client.start()
        connections = [server.connect(90) for _ in range(AT_WORK)]
        for connection in connections:
            connection.sendall(LARGE)
        time.sleep(0.5)  # for all of them to be taken in
        assert server.stop() == 0, server.logged()
        answers = [Answers(connection).next() for connection in connections]
        for client in clients:
            client.join()
    for connection in connections:
        connection.close()
    assert [status for status, _ in answers] == [200] * AT_WORK
    assert len({len(body) for _, body in answers}) == 1
    assert [half for client in clients for half in client.halves] == []
    assert {status for client in clients for status in client.statuses} == {200}


@pytest.mark.parametrize("workers", [1, 2])
def test_after_being_killed_under_load_the_next_start_is_clean(workers: int) -> None:
    """The process that was started is killed, as a supervisor would do it; its workers are left to themselves."""
    port = free_port()
    with live(port, workers=workers) as server:
        connections = [server.connect() for _ in range(AT_WORK)]
        for connection in connections:
            connection.sendall(LARGE)
        time.sleep(0.3)
        tree = server.running.tree()
        server.process.kill()
        server.process.wait()
        gone = within(20, lambda: not any(map(_lives, tree)))
        for pid in tree[1:]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for connection in connections:
            connection.close()
        assert gone, "workers without their parent go on"
    with live(port, workers=workers) as server:
        assert server.ask(SMALL)[0] == 200


def _lives(pid: int) -> bool:
    with suppress(FileNotFoundError), open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] != "Z"
    return False


def test_a_worker_that_is_killed_is_replaced() -> None:
    with live(workers=2) as server:
        workers = [pid for pid in server.running.tree()[1:] if "spawn_main" in _command(pid)]
        assert len(workers) == 2
        os.kill(workers[0], signal.SIGKILL)
        assert within(30, lambda: len([pid for pid in server.running.tree()[1:] if "spawn_main" in _command(pid)]) == 2)
        assert server.ask(SMALL)[0] == 200
        assert server.stop() == 0


def _command(pid: int) -> str:
    with suppress(OSError), open(f"/proc/{pid}/cmdline") as line:
        return line.read()
    return ""
