"""Latency of small requests while large requests keep all processors busy."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from dataclasses import dataclass

from benchmarks.client import Connection, throughput
from benchmarks.forms import fetch
from benchmarks.ratios import Ratio, rows
from benchmarks.serving import Others, Running
from benchmarks.table import FLOORS, OURS, SERVERS, Server
from benchmarks.workloads import workloads

CLIENTS = 4
# Seconds between small requests, so that they add little load.
PAUSE = 0.005
WARM_UP = 1.0
TARGET = 20.0


@dataclass(frozen=True)
class Found:
    """Results of one measurement.

    small: latencies of the small requests in milliseconds; rate: large requests answered per second; server, together:
    processors that the server used, and server and clients together
    """

    small: list[float]
    rate: float
    server: float
    together: float

    def percentile(self, percent: int) -> float:
        """Return a percentile of the latencies."""
        return sorted(self.small)[-(-len(self.small) * percent // 100) - 1]


def ask_often(port: int, request: bytes, seconds: float, clients: int, rates: multiprocessing.Queue[float]) -> None:
    """Run in a process: send large requests from several clients, and put the answers per second into a queue."""
    rates.put(throughput(port, request, seconds, clients))


def measure(running: Running, small: bytes, large: bytes, clients: int, seconds: float) -> Found:
    """Measure small requests, one after the other, while other clients send large ones."""
    context = multiprocessing.get_context("spawn")
    rates: multiprocessing.Queue[float] = context.Queue()
    arguments = (running.port, large, seconds + 2 * WARM_UP, clients, rates)
    process = context.Process(target=ask_often, args=arguments)
    process.start()
    time.sleep(WARM_UP)
    connection = Connection(running.port)
    everybody = Running(os.getpid(), running.port)  # the parent of server and clients
    server, together = running.processor_seconds(), everybody.processor_seconds()
    start, found = time.monotonic(), []
    while time.monotonic() - start < seconds:
        found.append(connection.ask(small) * 1e3)
        time.sleep(PAUSE)
    took = time.monotonic() - start
    server, together = running.processor_seconds() - server, everybody.processor_seconds() - together
    connection.close()
    rate = rates.get()
    process.join()
    return Found(found, rate, server / took, together / took)


def report(server: Server, seconds: float) -> list[Ratio]:
    """Print a line for each kind of large request, and return the ratios that have a bound."""
    loads = workloads()
    found = []
    with server.started() as running:
        small = server.json.encode(loads["W1"]).message()
        _print(server, "none", measure(running, small, small, 0, seconds))
        for name in ("W3", "W4"):
            if (form := server.form(loads[name].binary)) is None:
                continue
            request = form.encode(loads[name])
            loads[name].check(form.decode(fetch(running.port, request)))
            result = measure(running, small, request.message(), CLIENTS, seconds)
            _print(server, name, result)
            found.append(Ratio(f"p99 of W1 beside {name}, ms", result.percentile(99), TARGET))
    return found if server is OURS else []


def _print(server: Server, large: str, found: Found) -> None:
    times = f"{found.percentile(50):.2f} | {found.percentile(99):.2f} | {max(found.small):.2f}"
    busy = f"{found.server:.2f} | {found.together:.2f}"
    print(f"| {server.name} | {large} | {times} | {found.rate:.1f} | {busy} |", flush=True)


def main() -> None:
    """Measure the servers one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = [server.name for server in SERVERS if server not in FLOORS.values()]
    parser.add_argument("--servers", nargs="+", metavar="NAME", choices=names, default=[OURS.name])
    parser.add_argument("--seconds", type=float, default=15.0, help="per measurement")
    options = parser.parse_args()
    print(f"W1 from one client, beside {CLIENTS} clients with large requests, on {os.cpu_count()} processors\n")
    print("| | large requests | W1 p50 ms | p99 ms | max ms | large rps | processors: server | with clients |")
    print("|---|---|---|---|---|---|---|---|")
    found: list[Ratio] = []
    others = Others()
    for server in SERVERS:
        if server.name in options.servers and server.installed:
            found += report(server, options.seconds)
    print(f"\n{others.line()}")
    if found:
        print(f"\n{rows(found)}")


if __name__ == "__main__":
    main()
