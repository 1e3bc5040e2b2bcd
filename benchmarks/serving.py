"""Server processes: start, stop, memory and processor time. Linux only, as it reads /proc."""

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
from random import SystemRandom

ROOT = Path(__file__).resolve().parent.parent
PROC = Path("/proc")
TICKS = os.sysconf("SC_CLK_TCK")
# Processors that other processes may use before a run counts as disturbed.
OTHERS = 0.1
# What clock_getcpuclockid returns for the processor time of process 0, from which that of another one follows.
PROCESS_CLOCK = 2
START_TIMEOUT, STOP_TIMEOUT, CLOSE_TIMEOUT = 90.0, 10.0, 120.0


class NotStarted(Exception):
    """A server did not answer in time, or ended."""


@dataclass(frozen=True)
class Running:
    """A running server with its child processes."""

    pid: int
    port: int

    def tree(self) -> list[int]:
        """Return the ids of the process and its descendants."""
        children: dict[int, list[int]] = {}
        for entry in PROC.iterdir():
            if entry.name.isdigit():
                with suppress(OSError):
                    children.setdefault(int(_stat(int(entry.name))[1]), []).append(int(entry.name))
        found = [self.pid]
        for pid in found:  # grows during the loop
            found += children.get(pid, [])
        return found

    def processor_seconds(self) -> float:
        """Return the processor time of all its processes so far, in nanoseconds where /proc counts hundredths."""
        return sum(time.clock_gettime(~pid << 3 | PROCESS_CLOCK) for pid in self.tree())

    def page_faults(self) -> int:
        """Return how often all its processes were given a page of memory so far, each of which the system cleared."""
        return sum(int(_stat(pid)[7]) for pid in self.tree())

    def resident(self) -> float:
        """Return the resident memory in MB; pages that processes share count for each."""
        return sum(_status(pid, "VmRSS") for pid in self.tree()) / 1024

    def peak(self) -> float:
        """Return the peak resident memory in MB since `forget_peak`, summed over the processes."""
        return sum(_status(pid, "VmHWM") for pid in self.tree()) / 1024

    def forget_peak(self) -> None:
        """Reset the peak to the present resident memory."""
        for pid in self.tree():
            (PROC / str(pid) / "clear_refs").write_text("5")

    def descriptors(self) -> int:
        """Return the number of open file descriptors of all its processes."""
        return sum(len(os.listdir(PROC / str(pid) / "fd")) for pid in self.tree())

    def descriptors_left(self, most: int) -> int:
        """Return the number of open descriptors once it is at most `most`, or after CLOSE_TIMEOUT."""
        end = time.monotonic() + CLOSE_TIMEOUT
        while (found := self.descriptors()) > most and time.monotonic() < end:
            time.sleep(0.1)
        return found


def blas_variables() -> dict[str, str]:
    """Return the environment variables that say how BLAS computes: some make NumPy slower, and torch not."""
    return {name: value for name, value in os.environ.items() if "BLAS" in name}


class Others:
    """The load that other processes put on the machine during a run, which distorts its numbers."""

    def __init__(self) -> None:
        self._start, self._before = time.monotonic(), self._seconds()

    @staticmethod
    def _seconds() -> float:
        user, nice, system, _idle, _waiting, *rest = map(int, (PROC / "stat").read_text().split()[1:9])
        ended = os.times().children_user + os.times().children_system
        return (user + nice + system + sum(rest)) / TICKS - Running(os.getpid(), 0).processor_seconds() - ended

    def line(self) -> str:
        """Return the load in processors, and whether it is too high."""
        busy = (self._seconds() - self._before) / (time.monotonic() - self._start)
        verdict = ": too much, measure again" if busy > OTHERS else ""
        return f"Other processes used {busy:.2f} of {os.cpu_count()} processors during the run{verdict}."


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name, which can contain spaces."""
    return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()


def _status(pid: int, name: str) -> int:
    lines = (PROC / str(pid) / "status").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith(name)), 0)


def free_port() -> int:
    """A free port of this machine, below those that Linux gives to clients: one of these may be taken any moment."""
    while True:
        port = SystemRandom().randrange(10_000, 32_768)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


@contextmanager
def serving(command: list[str], ask: Callable[[int], object], **variables: str) -> Iterator[Running]:
    """Run a server: yield once `ask(port)` succeeds, and stop the server at the end.

    variables: additional environment variables

    Errors: NotStarted.
    """
    port = free_port()
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
    """Call `ask` until it succeeds. Errors: NotStarted."""
    deadline = time.monotonic() + START_TIMEOUT
    while process.poll() is None:
        try:
            ask()
        except (OSError, http.client.HTTPException) as error:
            if time.monotonic() > deadline:
                raise NotStarted(str(error)) from error
            time.sleep(0.1)
        else:
            return
    raise NotStarted(f"it ended with status {process.returncode}")


def _end(process: subprocess.Popen[bytes], tree: list[int]) -> None:
    """Terminate the server, then kill the rest of its process tree, as some servers leave children behind."""
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pid in tree[1:]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
