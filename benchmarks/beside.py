"""How long small requests wait while large ones keep all processors busy."""

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
from benchmarks.table import FLOOR, OURS, SERVERS, Server
from benchmarks.workloads import workloads

CLIENTS = 4
# Between small requests, so that they are guests and no load of their own.
PAUSE = 0.005
WARM_UP = 1.0
TARGET = 20.0


@dataclass(frozen=True)
class Found:
    """Milliseconds of small requests, large ones a second, processors kept busy by the server, and with the clients."""

    small: list[float]
    rate: float
    server: float
    together: float

    def percentile(self, percent: int) -> float:
        """The least that so many percent do not exceed."""
        return sorted(self.small)[-(-len(self.small) * percent // 100) - 1]


def ask_often(port: int, request: bytes, seconds: float, clients: int, rates: multiprocessing.Queue[float]) -> None:
    """Run in a process of its own: ask by several clients, and tell how many answers came a second."""
    rates.put(throughput(port, request, seconds, clients))


def measure(running: Running, small: bytes, large: bytes, clients: int, seconds: float) -> Found:
    """Small requests one after the other, beside clients that ask for large ones."""
    context = multiprocessing.get_context("spawn")
    rates: multiprocessing.Queue[float] = context.Queue()
    arguments = (running.port, large, seconds + 2 * WARM_UP, clients, rates)
    process = context.Process(target=ask_often, args=arguments)
    process.start()
    time.sleep(WARM_UP)
    connection = Connection(running.port)
    everybody = Running(os.getpid(), running.port)  # who has started them all
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
    """Print a line for each company, and give the ratios that have a target."""
    loads = workloads()
    found = []
    with server.started() as running:
        small = server.json.encode(loads["W1"]).message()
        _print(server, "nothing", measure(running, small, small, 0, seconds))
        for name in ("W3", "W4"):
            if (form := server.form(loads[name].binary)) is None:
                continue
            request = form.encode(loads[name])
            loads[name].check(form.decode(fetch(running.port, request)))
            result = measure(running, small, request.message(), CLIENTS, seconds)
            _print(server, name, result)
            found.append(Ratio(f"p99 of W1 beside {name}, ms", result.percentile(99), TARGET))
    return found if server is OURS else []


def _print(server: Server, company: str, found: Found) -> None:
    times = f"{found.percentile(50):.2f} | {found.percentile(99):.2f} | {max(found.small):.2f}"
    busy = f"{found.server:.2f} | {found.together:.2f}"
    print(f"| {server.name} | {company} | {times} | {found.rate:.1f} | {busy} |", flush=True)


def main() -> None:
    """Measure each server by itself."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = [server.name for server in SERVERS if server is not FLOOR]
    parser.add_argument("--servers", nargs="+", metavar="NAME", choices=names, default=[OURS.name])
    parser.add_argument("--seconds", type=float, default=15.0, help="for each company")
    options = parser.parse_args()
    print(f"W1 by one client, beside {CLIENTS} clients that ask for more, on {os.cpu_count()} processors\n")
    print("| | beside | W1 p50 ms | p99 ms | most ms | of these a second | processors: server | with clients |")
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
