"""Servers of attention over HTTP in one run: latency of one client, throughput to 32 clients, memory."""

from __future__ import annotations

import argparse
import math
import os
import platform
import signal
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from benchmarks.bare import Bare
from benchmarks.client import Connection, latency, throughput
from benchmarks.forms import Form, Request, fetch
from benchmarks.ratios import BARE, Results, rows, to_by_hand, to_peers
from benchmarks.serving import NotStarted, Others, Running
from benchmarks.table import CORE, FLOOR, FLOORS, OURS, OURS_OIP, PEERS, SERVERS, Server
from benchmarks.workloads import Workload, workloads
from benchmarks.wrk import MISSING, WRK, WrkError, wrk_throughput

PEAK = "W3 peak MB"
ROUNDS, QUICK_ROUNDS = 5, 3
# Seconds of one measurement of throughput, and the servers that it is measured with, per workload.
SECONDS = 1
BUSY = {"W1": SERVERS, "W2": (*FLOORS.values(), *CORE)}
QUICK_BUSY = {"W1": CORE}
# The request of each server for each workload, by the workload's name.
Requests = dict[tuple[Server, str], Request]


def start_all(servers: Sequence[Server], stack: ExitStack) -> dict[Server, Running]:
    """Start the servers that are installed, and return those that answer."""
    found = {}
    for server in servers:
        if not server.installed:
            continue
        try:
            found[server] = stack.enter_context(server.started())
        except NotStarted as error:
            if server not in PEERS:
                raise
            print(f"{server.name} did not start: {error}", file=sys.stderr)
    return found


def peak_growth(running: Running, message: bytes) -> float:
    """Return the peak memory of one request in MB, over the memory before it."""
    running.forget_peak()
    idle = running.resident()
    connection = Connection(running.port)
    connection.ask(message)
    connection.close()
    return running.peak() - idle


def checked_request(server: Server, form: Form, running: Running, load: Workload) -> tuple[Request, int]:
    """Return the server's request for a workload, and the size of its answer.

    Errors: SystemExit if the answer is wrong.
    """
    request = form.encode(load)
    reply = fetch(running.port, request)
    try:
        load.check(form.decode(reply))
    except (ValueError, KeyError) as error:
        raise SystemExit(f"{server.name}: {error!r}") from error
    return request, len(reply.body)


def prepare(running: Mapping[Server, Running], loads: Mapping[str, Workload], results: Results) -> Requests:
    """Return all requests, after checking the answers and measuring the peak memory of the fresh servers."""
    requests: Requests = {}
    for server, process in running.items():
        if server in FLOORS.values():
            continue
        results.add(server.name, PEAK, peak_growth(process, server.json.encode(loads["W3"]).message()))
        for name, load in loads.items():
            if (form := server.form(load.binary)) is None:
                continue
            request, size = checked_request(server, form, process, load)
            requests[server, name] = request
            if server is OURS:  # the floors get the same request, and send as many bytes back
                for floor in FLOORS.values():
                    requests[floor, name] = Request(f"/{size}", request.headers, request.body)
                if name == "W3":
                    results.megabytes = (len(request.body) + size) / 2**20
    return requests


@contextmanager
def failures_named(server: Server, load: str) -> Iterator[None]:
    """Name the server and the workload in failures. Errors: SystemExit."""
    try:
        yield
    except (OSError, WrkError) as error:
        raise SystemExit(f"{server.name}, {load}: {error!r}") from error


def measure_throughput(server: Server, port: int, request: Request, load: str, results: Results) -> None:
    """Measure throughput with our own client, and with wrk where it is installed. Errors: OSError, WrkError."""
    message = request.message()
    results.add(server.name, f"{load} rps", throughput(port, message, SECONDS))
    if WRK is not None:
        results.add(server.name, f"{load} wrk rps", wrk_throughput(port, request, SECONDS))
        latency(port, message, times=1)  # wait for the server to finish the requests that wrk abandoned at its end


def measure(running: Mapping[Server, Running], rounds: int, busy: Mapping[str, Sequence[Server]]) -> Results:
    """Measure all servers in rounds, in another order each round.

    busy: for each workload, the servers whose throughput is measured, too
    """
    results, loads = Results(), workloads()
    requests = prepare(running, loads, results)
    messages = {key: request.message() for key, request in requests.items()}
    bare = Bare(loads["W3"], OURS.json.encode(loads["W3"]).body)
    servers = deque(running.items())
    for turn in range(rounds):
        servers.rotate(max(1, len(servers) // rounds))
        for name, load in loads.items():
            asked = [(server, process.port) for server, process in servers if (server, name) in requests]
            for server, port in asked * load.bursts:
                with failures_named(server, name):
                    results.add(server.name, f"{name} p50 ms", latency(port, messages[server, name], load.times))
            for server, port in asked:
                if server in busy.get(name, ()):
                    with failures_named(server, name):
                        measure_throughput(server, port, requests[server, name], name, results)
            if name == "W3":
                for part, value in bare.milliseconds(load.times).items():
                    results.add(BARE, part, value)
        print(f"round {turn + 1} of {rounds}", file=sys.stderr)
    return results


def table(results: Results, servers: Sequence[Server]) -> str:
    """Return a Markdown table of medians, with multiples of the floor in brackets if the floor was measured."""
    columns = sorted(results.columns(), key=lambda column: (column == PEAK, column[:2]))
    lines = ["| | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    for server in servers:
        cells = []
        for column in columns:
            value, floor = results.median(server.name, column), results.median(FLOOR.name, column)
            times = "" if math.isnan(floor) else f" ({value / floor:.2f})"
            cells.append("" if math.isnan(value) else f"{value:,.2f}{times}")
        if not any(cells):
            cells[0] = "absent"
        lines.append(f"| {server.title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def notes(results: Results) -> str:
    """Return the lines below the table: bare calls, size of W3, and why wrk columns are missing."""
    bare = results.bare()
    text = ", ".join(f"{part} {value:.2f}" for part, value in bare.items())
    lines = [
        f"Bare calls of W3 in process, ms: {text}; together {sum(bare.values()):.2f}.",
        f"A request of W3 in JSON and its answer have {results.megabytes:.2f} MB together.",
    ]
    if WRK is None:
        lines.append(f"No wrk columns: {MISSING}.")
    return "\n".join(lines)


def chosen(names: Sequence[str] | None, quick: bool) -> list[Server]:
    """Return the servers to run: the core always, all others by default or by name."""
    if quick:
        return list(CORE)
    always = (*FLOORS.values(), *CORE, OURS_OIP)
    return [server for server in SERVERS if not names or server in always or server.name in names]


def main() -> None:
    """Start the servers, measure them in rounds, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the service and FastAPI by hand only, in under a minute")
    parser.add_argument("--rounds", type=int, help=f"default: {ROUNDS}, with --quick {QUICK_ROUNDS}")
    names = [server.name for server in SERVERS]
    parser.add_argument("--servers", nargs="+", metavar="NAME", choices=names, help=f"of {', '.join(names)}")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # so that the servers are stopped
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    servers = chosen(options.servers, options.quick)
    with ExitStack() as stack:
        running = start_all(servers, stack)
        others = Others()
        results = measure(running, rounds, QUICK_BUSY if options.quick else BUSY)
        load = others.line()
    machine = f"{platform.machine()}, {os.cpu_count()} processors, Python {platform.python_version()}"
    brackets = f"; in brackets multiples of {FLOOR.name}" if FLOOR in running else ""
    print(f"\n{machine}, {rounds} rounds, medians{brackets}\n")
    print(table(results, servers))
    print(f"\n{notes(results)}\n{load}\n")
    found = to_by_hand(results, "absent" if WRK else MISSING)
    print(rows(found if options.quick else found + to_peers(results)))


if __name__ == "__main__":
    main()
