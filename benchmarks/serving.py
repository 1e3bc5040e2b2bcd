"""Processes of servers: starting and ending them, their memory, their processor time. Linux only, as it reads /proc."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROC = Path("/proc")
TICKS = os.sysconf("SC_CLK_TCK")
# Processors that others may use before the numbers mean little.
OTHERS = 0.1
# Seconds to start and to end.
STARTING, ENDING = 90.0, 10.0


class NotStarted(Exception):
    """A server that did not come up."""


@dataclass(frozen=True)
class Running:
    """A server that runs, with all processes that it has started."""

    pid: int
    port: int

    def tree(self) -> list[int]:
        """The process and its descendants."""
        children: dict[int, list[int]] = {}
        for entry in PROC.iterdir():
            if entry.name.isdigit():
                with suppress(OSError):
                    children.setdefault(int(_stat(int(entry.name))[1]), []).append(int(entry.name))
        found = [self.pid]
        for pid in found:  # which grows meanwhile
            found += children.get(pid, [])
        return found

    def processor_seconds(self) -> float:
        """What all processes have used so far."""
        return sum(int(stat[11]) + int(stat[12]) for stat in map(_stat, self.tree())) / TICKS

    def resident(self) -> float:
        """Megabytes in memory now; what processes share counts for each."""
        return sum(_status(pid, "VmRSS") for pid in self.tree()) / 1024

    def peak(self) -> float:
        """Megabytes at the peak of each process since `forget_peak`."""
        return sum(_status(pid, "VmHWM") for pid in self.tree()) / 1024

    def forget_peak(self) -> None:
        """Let the peak start from what is resident now."""
        for pid in self.tree():
            (PROC / str(pid) / "clear_refs").write_text("5")


class Others:
    """How busy everybody else is while this process and its children measure: they take what is measured from it."""

    def __init__(self) -> None:
        self._start, self._before = time.monotonic(), self._seconds()

    @staticmethod
    def _seconds() -> float:
        user, nice, system, _idle, _waiting, *rest = map(int, (PROC / "stat").read_text().split()[1:9])
        ended = os.times().children_user + os.times().children_system
        return (user + nice + system + sum(rest)) / TICKS - Running(os.getpid(), 0).processor_seconds() - ended

    def line(self) -> str:
        """For below a table."""
        busy = (self._seconds() - self._before) / (time.monotonic() - self._start)
        verdict = ": measure again when they rest" if busy > OTHERS else ""
        return f"Others kept {busy:.2f} of {os.cpu_count()} processors busy meanwhile{verdict}."


def _stat(pid: int) -> list[str]:
    """The fields of proc(5)'s stat after the name, which may hold anything."""
    return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()


def _status(pid: int, name: str) -> int:
    lines = (PROC / str(pid) / "status").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith(name)), 0)


@contextmanager
def serving(command: list[str], ask: Callable[[int], object], **variables: str) -> Iterator[Running]:
    """Start a server, `ask` its port for something until there is an answer, and end it in the end.

    variables: more of its environment

    Errors: NotStarted.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryFile() as log:
        environment = os.environ | {"ATTENTION_LOG_LEVEL": "warning"} | variables
        process = subprocess.Popen(
            [*command, "--port", str(port)], cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
        )
        running = Running(process.pid, port)
        try:
            try:
                _wait(process, lambda: ask(port))
            except NotStarted as error:
                log.seek(0)
                raise NotStarted(f"{error}\n{log.read()[-2000:].decode(errors='replace')}") from error
            yield running
        finally:
            _end(process, running.tree())


def _wait(process: subprocess.Popen[bytes], ask: Callable[[], object]) -> None:
    """Ask until there is an answer. Errors: NotStarted."""
    give_up = time.monotonic() + STARTING
    while process.poll() is None:
        try:
            ask()
        except (OSError, http.client.HTTPException) as error:
            if time.monotonic() > give_up:
                raise NotStarted(str(error)) from error
            time.sleep(0.1)
        else:
            return
    raise NotStarted(f"it ended with status {process.returncode}")


def _end(process: subprocess.Popen[bytes], tree: list[int]) -> None:
    """Ask the server to end, then make sure of every process of its tree: not all see to their children."""
    process.terminate()
    try:
        process.wait(ENDING)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pid in tree[1:]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
