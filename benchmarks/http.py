"""Servers of attention over HTTP, measured in turns: latency of one client, throughput of 32, memory."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import selectors
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save

ROOT = Path(__file__).resolve().parent.parent
JSON, SAFETENSORS = "application/json", "application/vnd.safetensors"
CLIENTS = 32


@dataclass(frozen=True)
class Workload:
    """A request: its name, media type and body, and how often it is sent to measure its latency."""

    name: str
    media_type: str
    body: bytes
    times: int

    def request(self, path: str) -> bytes:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {self.media_type}\r\n"
        return f"{head}Content-Length: {len(self.body)}\r\n\r\n".encode() + self.body


def workloads() -> list[Workload]:
    """W1 to W4, the same numbers for every server."""
    random = np.random.default_rng(0)

    def tensors(*shape: int) -> dict[str, np.ndarray]:
        return {name: random.normal(size=shape).astype(np.float32) for name in ("query", "key", "value")}

    found = []
    for name, shape, times in (("W1", (6, 4), 400), ("W2", (128, 64), 100), ("W3", (512, 64), 25)):
        arrays = tensors(*shape)
        text = json.dumps({key: array.tolist() for key, array in arrays.items()} | {"dtype": "float32"})
        found.append(Workload(name, JSON, text.encode(), times))
        if name == "W3":
            found.append(Workload("W3 binary", SAFETENSORS, save(arrays), times))
    request = json.dumps({"layout": "hld", "include": []})
    found.append(Workload("W4", SAFETENSORS, save(tensors(8, 1024, 64), {"request": request}), 15))
    return found


class Connection:
    """A client that sends bytes and waits for as many as Content-Length says."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = bytearray(2**20)
        self.reset()

    def reset(self) -> None:
        self._head = b""
        self._missing = -1
        self.size = 0

    def receive(self) -> bool:
        """Whether an answer is complete now."""
        got = self.socket.recv_into(self._buffer)
        if not got:
            raise ConnectionError("the server hung up")
        if self._missing < 0:
            self._head += bytes(self._buffer[:got])
            head, separator, rest = self._head.partition(b"\r\n\r\n")
            if not separator:
                return False
            if not head.startswith(b"HTTP/1.1 200"):
                raise ConnectionError(self._head[:500].decode())
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            self.size = int(length[15:])
            self._missing = self.size - len(rest)
        else:
            self._missing -= got
        return self._missing <= 0

    def ask(self, request: bytes) -> int:
        """Send, wait, and return the size of the answer."""
        self.reset()
        self.socket.sendall(request)
        while not self.receive():
            pass
        return self.size


def latency(port: int, request: bytes, times: int) -> float:
    """Median milliseconds of one client."""
    connection = Connection(port)
    connection.ask(request)
    found = []
    for _ in range(times):
        start = time.perf_counter()
        connection.ask(request)
        found.append(time.perf_counter() - start)
    connection.socket.close()
    return statistics.median(found) * 1e3


def throughput(port: int, request: bytes, seconds: float) -> float:
    """Answers a second to 32 clients that each send again at once."""
    selector = selectors.DefaultSelector()
    connections = [Connection(port) for _ in range(CLIENTS)]
    for connection in connections:
        selector.register(connection.socket, selectors.EVENT_READ, connection)
        connection.socket.sendall(request)
    count, start = 0, time.perf_counter()
    while (now := time.perf_counter()) - start < seconds:
        for key, _ in selector.select(1):
            if key.data.receive():
                count += 1
                key.data.reset()
                key.data.socket.sendall(request)
    for connection in connections:
        connection.socket.close()
    return count / (now - start)


def peak_growth(pid: int, port: int, request: bytes) -> float:
    """Megabytes by which a process that was idle so far grows, at its peak, for one request."""
    status = Path(f"/proc/{pid}/status")

    def read(name: str) -> int:
        return int(next(line for line in status.read_text().splitlines() if line.startswith(name)).split()[1])

    idle = read("VmRSS")
    Connection(port).ask(request)
    return (read("VmHWM") - idle) / 1024


@contextmanager
def serving(command: list[str]) -> Iterator[tuple[int, int]]:
    """A server's process id and port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen([*command, "--port", str(port)], cwd=ROOT, stderr=subprocess.DEVNULL,
                               env=os.environ | {"ATTENTION_LOG_LEVEL": "warning"})  # fmt: skip
    try:
        for _ in range(300):
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                time.sleep(0.1)
        yield process.pid, port
    finally:
        process.terminate()
        process.wait()


UVICORN = [sys.executable, "-m", "uvicorn", "--no-access-log", "--log-level", "warning"]
SERVERS = {
    "bare uvicorn, canned answer": [*UVICORN, "benchmarks.servers.floor:app"],
    "FastAPI, lists of lists": [*UVICORN, "benchmarks.servers.naive:app"],
    "FastAPI by hand": [*UVICORN, "benchmarks.servers.by_hand:app"],
    "this service": [sys.executable, "-m", "service", "serve"],
}
PEAK = "W3 peak MB"
FLOOR, OURS = "bare uvicorn, canned answer", "this service"
BINARY = {FLOOR, OURS}


def measure(running: dict[str, tuple[int, int]], rounds: int) -> dict[tuple[str, str], list[float]]:
    """All measurements, in turns: (server, column) -> values."""
    loads = workloads()
    large = next(load for load in loads if load.name == "W3").request("/attention")
    results: dict[tuple[str, str], list[float]] = {}
    for server, (pid, port) in running.items():
        if server != FLOOR:  # which does not compute; its memory is that of the canned answers
            results[server, PEAK] = [peak_growth(pid, port, large)]
    sizes = {load.name: Connection(running[OURS][1]).ask(load.request("/attention")) for load in loads}
    for turn in range(rounds):
        for load in loads:
            for server, (_, port) in running.items():
                if load.media_type != JSON and server not in BINARY:
                    continue
                request = load.request(f"/{sizes[load.name]}" if server == FLOOR else "/attention")
                found = {f"{load.name} p50 ms": latency(port, request, load.times)}
                if load.name in ("W1", "W2"):
                    found[f"{load.name} rps"] = throughput(port, request, 1.0)
                for column, value in found.items():
                    results.setdefault((server, column), []).append(value)
        print(f"round {turn + 1} of {rounds}", file=sys.stderr)
    return results


def table(results: dict[tuple[str, str], list[float]]) -> str:
    """Medians, and in brackets multiples of the floor."""
    columns = [*dict.fromkeys(column for _, column in results if column != PEAK), PEAK]
    lines = ["| | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    for server in SERVERS:
        cells = []
        for column in columns:
            value = statistics.median(results.get((server, column), [math.nan]))
            floor = statistics.median(results.get((FLOOR, column), [math.nan]))
            times = "" if math.isnan(floor) else f" ({value / floor:.2f})"
            cells.append("" if math.isnan(value) else f"{value:,.2f}{times}")
        lines.append(f"| {server} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Start all, measure in rounds, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with ExitStack() as stack:
        running = {name: stack.enter_context(serving(command)) for name, command in SERVERS.items()}
        results = measure(running, rounds)
    print(f"\n{platform.machine()}, {os.cpu_count()} processors, Python {platform.python_version()}, {rounds} rounds")
    print()
    print(table(results))
    print("\nIn brackets: as a multiple of the floor.")


if __name__ == "__main__":
    main()
