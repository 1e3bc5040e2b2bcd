"""Servers of attention over HTTP in one run: latency of one client, processor time, throughput, memory."""

from __future__ import annotations

import argparse
import math
import os
import platform
import signal
import statistics
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import NamedTuple

from benchmarks import nginx
from benchmarks.bare import Bare
from benchmarks.client import Connection, latencies, latency, throughput
from benchmarks.forms import Form, Request, fetch
from benchmarks.ratios import BARE, Results, of_base64, rows, to_by_hand, to_peers
from benchmarks.serving import NotStarted, Others, Running, blas_variables
from benchmarks.table import (
    CORE,
    FLOOR,
    FLOORS,
    ONE_THREAD,
    ONE_WORKER,
    OURS,
    OURS_BASE64,
    OURS_OIP,
    PEERS,
    SERVERS,
    Server,
)
from benchmarks.workloads import BEHIND_NGINX, Workload, workloads
from benchmarks.wrk import MISSING, WRK, WrkError, wrk_throughput

PEAK = "W3 peak MB"
ROUNDS, QUICK_ROUNDS = 5, 3
# Seconds of one measurement of throughput, and the servers that it is measured with, per workload.
SECONDS = 1
BUSY = {"W1": SERVERS, "W1 httpx": CORE, BEHIND_NGINX: CORE, "W2": (*FLOORS.values(), *ONE_WORKER)}
QUICK_BUSY = {"W1 httpx": CORE}
# Workloads that our own client measures the throughput of even where wrk does.
SERVED_TO_OWN_CLIENT = ("W1", "W2")


class Asked(NamedTuple):
    """What a server is asked for a workload, and where: its own port, or that of nginx."""

    running: Running
    request: Request


# By the name of the workload.
Requests = dict[tuple[Server, str], Asked]


def start_all(servers: Sequence[Server], stack: ExitStack, variables: Mapping[str, str]) -> dict[Server, Running]:
    """Start the servers that are installed, and return those that answer. variables: of their processes"""
    found = {}
    for server in servers:
        if not server.installed:
            continue
        try:
            found[server] = stack.enter_context(server.started(**variables))
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
    request = replace(request, headers={**load.headers, **request.headers})
    reply = fetch(running.port, request)
    try:
        load.check(form.decode(reply))
    except (ValueError, KeyError) as error:
        raise SystemExit(f"{server.name}: {error!r}") from error
    return request, len(reply.body)


def prepare(
    running: Mapping[Server, Running],
    proxied: Mapping[Server, Running],
    loads: Mapping[str, Workload],
    results: Results,
) -> Requests:
    """Return all requests, after checking the answers and measuring the peak memory of the fresh servers."""
    requests: Requests = {}
    for server, process in running.items():
        if server in FLOORS.values():
            continue
        if not server.loads:
            results.add(server.name, PEAK, peak_growth(process, server.json.encode(loads["W3"]).message()))
        for name, load in loads.items():
            place = proxied.get(server) if name == BEHIND_NGINX else process
            form = server.form(load.binary)
            if place is None or form is None or (server.loads and name not in server.loads):
                continue
            request, size = checked_request(server, form, place, load)
            requests[server, name] = Asked(place, request)
            if server is OURS and place is process:  # the floors get the same request, and send as many bytes back
                for floor in FLOORS.values():
                    if floor in running:
                        same = Request(f"/{size}", request.headers, request.body)
                        requests[floor, name] = Asked(running[floor], same)
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


def measure_latency(server: Server, asked: Asked, load: Workload, results: Results) -> None:
    """Measure latency, and the processor time of the server's processes for each request. Errors: OSError."""
    begun = asked.running.processor_seconds()
    seconds = latencies(asked.running.port, asked.request.message(), load.times)
    used = asked.running.processor_seconds() - begun
    results.add(server.name, f"{load.name} p50 ms", statistics.median(seconds) * 1e3)
    results.add(server.name, f"{load.name} CPU ms", used / (len(seconds) + 1) * 1e3)


def measure_throughput(server: Server, asked: Asked, load: str, results: Results) -> None:
    """Measure throughput with our own client, and with wrk where it is installed. Errors: OSError, WrkError."""
    port, request = asked.running.port, asked.request
    message = request.message()
    if WRK is None or load in SERVED_TO_OWN_CLIENT:
        results.add(server.name, f"{load} rps", throughput(port, message, SECONDS))
    if WRK is not None:
        results.add(server.name, f"{load} wrk rps", wrk_throughput(port, request, SECONDS))
        latency(port, message, times=1)  # wait for the server to finish the requests that wrk abandoned at its end


def measure(
    running: Mapping[Server, Running],
    proxied: Mapping[Server, Running],
    rounds: int,
    busy: Mapping[str, Sequence[Server]],
) -> Results:
    """Measure all servers in rounds, in another order each round.

    proxied: those that are behind nginx, with its ports
    busy: for each workload, the servers whose throughput is measured, too
    """
    results, loads = Results(), {}
    for name, load in workloads().items():
        loads[name] = load
        if load.headers:
            loads[BEHIND_NGINX] = replace(load, name=BEHIND_NGINX)
    requests = prepare(running, proxied, loads, results)
    bare = Bare(loads["W3"], OURS.json.encode(loads["W3"]).body)
    servers = deque(running)
    for turn in range(rounds):
        servers.rotate(max(1, len(servers) // rounds))
        for name, load in loads.items():
            asked = [(server, requests[server, name]) for server in servers if (server, name) in requests]
            for server, place in asked * load.bursts:
                with failures_named(server, name):
                    measure_latency(server, place, load, results)
            for server, place in asked:
                if server in busy.get(name, ()):
                    with failures_named(server, name):
                        measure_throughput(server, place, name, results)
            if name == "W3":
                for part, value in bare.milliseconds(load.times).items():
                    results.add(BARE, part, value)
        print(f"round {turn + 1} of {rounds}", file=sys.stderr)
    return results


def tables(results: Results, servers: Sequence[Server]) -> str:
    """Return a Markdown table of medians for each workload, with multiples of the floor in brackets if it runs."""
    names = sorted((BEHIND_NGINX, *workloads()), key=len, reverse=True)
    columns: dict[str, list[str]] = {}
    for column in results.columns():
        load = next(name for name in names if column.startswith(f"{name} "))
        columns.setdefault(load, []).append(column)
    return "\n\n".join(table(results, servers, columns[load]) for load in sorted(columns, key=lambda load: load[:2]))


def table(results: Results, servers: Sequence[Server], columns: Sequence[str]) -> str:
    """Return a Markdown table of medians, without the servers that were not measured."""
    lines = ["| | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    for server in servers:
        cells = []
        for column in columns:
            value, floor = results.median(server.name, column), results.median(FLOOR.name, column)
            times = "" if math.isnan(floor) else f" ({value / floor:.2f})"
            cells.append("" if math.isnan(value) else f"{value:,.2f}{times}")
        if any(cells):
            lines.append(f"| {server.title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def notes(results: Results) -> str:
    """Return the lines below the tables: bare calls, size of W3, and why columns are missing."""
    bare = results.bare()
    text = ", ".join(f"{part} {value:.2f}" for part, value in bare.items())
    lines = [
        f"Bare calls of W3 in process, ms: {text}; together {sum(bare.values()):.2f}.",
        f"A request of W3 in JSON and its answer have {results.megabytes:.2f} MB together.",
    ]
    if WRK is None:
        lines.append(f"No wrk columns: {MISSING}.")
    if nginx.NGINX is None:
        lines.append(f"No {BEHIND_NGINX}: {nginx.MISSING}.")
    return "\n".join(lines)


def chosen(names: Sequence[str] | None, quick: bool) -> list[Server]:
    """Return the servers to run: the core always, all others by default or by name."""
    if quick:
        return list(CORE)
    always = (*FLOORS.values(), *CORE, OURS_OIP, *OURS_BASE64)
    return [server for server in SERVERS if not names or server in always or server.name in names]


def main() -> None:
    """Start the servers, measure them in rounds, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the service and FastAPI by hand only, in two minutes")
    parser.add_argument("--rounds", type=int, help=f"default: {ROUNDS}, with --quick {QUICK_ROUNDS}")
    names = [server.name for server in SERVERS]
    parser.add_argument("--servers", nargs="+", metavar="NAME", choices=names, help=f"of {', '.join(names)}")
    parser.add_argument(
        "--own-threads", action="store_true", help="each server with its own number of BLAS threads, not one"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # so that the servers are stopped
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    servers = chosen(options.servers, options.quick)
    with ExitStack() as stack:
        running = start_all(servers, stack, {} if options.own_threads else ONE_THREAD)
        proxied = stack.enter_context(nginx.proxied({server: running[server] for server in CORE}))
        others = Others()
        results = measure(running, proxied, rounds, QUICK_BUSY if options.quick else BUSY)
        load = others.line()
    machine = f"{platform.machine()}, {os.cpu_count()} processors, Python {platform.python_version()}"
    threads = "BLAS with its own threads" if options.own_threads else "one BLAS thread for each server"
    brackets = f"; in brackets multiples of {FLOOR.name}" if FLOOR in running else ""
    print(f"\n{machine}, {threads}, {blas_variables()}\n{rounds} rounds, medians{brackets}\n")
    print(tables(results, servers))
    if absent := [server.title for server in servers if server not in running]:
        print(f"\nAbsent: {', '.join(absent)}")
    print(f"\n{notes(results)}\n{load}\n")
    print(rows(to_by_hand(results, own_threads=options.own_threads), "beside FastAPI by hand"))
    if not options.quick:
        print(f"\n{rows(of_base64(results), 'JSON with arrays in base64, beside FastAPI by hand with lists')}")
        print(f"\n{rows(to_peers(results))}")


if __name__ == "__main__":
    main()
