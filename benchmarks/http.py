"""Servers of attention over HTTP, measured in turns: latency of one client, throughput of 32, memory."""

from __future__ import annotations

import argparse
import math
import os
import platform
import sys
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack

from benchmarks.bare import PARTS, Bare
from benchmarks.client import Connection, latency, throughput
from benchmarks.forms import Form, Request, fetch
from benchmarks.ratios import BARE, Results, ratios, rows
from benchmarks.serving import NotStarted, Others, Running
from benchmarks.table import FLOOR, OURS, OURS_OIP, PEERS, SERVERS, Server
from benchmarks.workloads import Workload, workloads

PEAK = "W3 peak MB"
# What each server is asked for a workload of a name.
Requests = dict[tuple[Server, str], bytes]


def start_all(servers: list[Server], stack: ExitStack) -> dict[Server, Running]:
    """Those that are installed and come up."""
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


def peak_growth(running: Running, request: bytes) -> float:
    """Megabytes by which a server that has had small requests only grows, at its peak, for a large one."""
    running.forget_peak()
    idle = running.resident()
    connection = Connection(running.port)
    connection.ask(request)
    connection.close()
    return running.peak() - idle


def answered(server: Server, form: Form, running: Running, load: Workload) -> tuple[Request, int]:
    """The request, and the bytes of its answer.

    Errors: SystemExit for a wrong answer, as it is worth nothing that it came quickly.
    """
    request = form.encode(load)
    reply = fetch(running.port, request)
    try:
        load.check(form.decode(reply))
    except (ValueError, KeyError) as error:
        raise SystemExit(f"{server.name}: {error!r}") from error
    return request, len(reply.body)


def prepare(running: Mapping[Server, Running], loads: Mapping[str, Workload], results: Results) -> Requests:
    """Measure the peak of servers that are still fresh, see that all answers are right, and write all requests."""
    requests: Requests = {}
    for server, process in running.items():
        if server is FLOOR:
            continue
        results.add(server.name, PEAK, peak_growth(process, server.json.encode(loads["W3"]).message()))
        for name, load in loads.items():
            if (form := server.form(load.binary)) is None:
                continue
            request, size = answered(server, form, process, load)
            requests[server, name] = request.message()
            if server is OURS:  # the floor is asked the same, and answers with as many bytes
                requests[FLOOR, name] = Request(f"/{size}", request.headers, request.body).message()
                if name == "W3":
                    results.megabytes = (len(request.body) + size) / 2**20
    return requests


def measure(running: Mapping[Server, Running], rounds: int) -> Results:
    """All measurements, in turns."""
    results, loads = Results(), workloads()
    requests = prepare(running, loads, results)
    bare = Bare(loads["W3"], OURS.json.encode(loads["W3"]).body)
    servers = deque(running.items())
    for turn in range(rounds):
        servers.rotate(max(1, len(servers) // rounds))  # so that nobody always comes after the same one
        for name, load in loads.items():
            asked = [(server, process.port, requests[server, name]) for server, process in servers
                     if (server, name) in requests]  # fmt: skip
            for server, port, request in asked * load.bursts:
                results.add(server.name, f"{name} p50 ms", latency(port, request, load.times))
            for server, port, request in asked if load.busy else ():
                results.add(server.name, f"{name} rps", throughput(port, request, 1.0))
            if name == "W3":
                for part, value in bare.milliseconds(load.times).items():
                    results.add(BARE, part, value)
        print(f"round {turn + 1} of {rounds}", file=sys.stderr)
    return results


def table(results: Results, servers: list[Server]) -> str:
    """Medians, and in brackets multiples of the floor."""
    columns = sorted(results.columns(), key=lambda column: (column == PEAK, column[:2]))
    lines = ["| | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    for server in servers:
        name = f"{server.name} {server.version()}" if server in PEERS else server.name
        cells = []
        for column in columns:
            value, floor = results.median(server.name, column), results.median(FLOOR.name, column)
            times = "" if math.isnan(floor) else f" ({value / floor:.2f})"
            cells.append("" if math.isnan(value) else f"{value:,.2f}{times}")
        if not any(cells):
            cells[0] = "absent"
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def bare_line(results: Results) -> str:
    """The parts of the bare calls."""
    parts = {part: results.median(BARE, part) for part in PARTS}
    text = ", ".join(f"{part} {value:.2f}" for part, value in parts.items())
    return f"Bare calls of W3 in process, ms: {text}; together {sum(parts.values()):.2f}"


def chosen(names: list[str] | None) -> list[Server]:
    """The servers of these names, and always the floor and this service, which all ratios need."""
    return [server for server in SERVERS if not names or server in (FLOOR, OURS, OURS_OIP) or server.name in names]


def main() -> None:
    """Start all, measure in rounds, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    names = [server.name for server in SERVERS]
    parser.add_argument("--servers", nargs="+", metavar="NAME", choices=names, help=f"of {', '.join(names)}")
    options = parser.parse_args()
    servers = chosen(options.servers)
    with ExitStack() as stack:
        running = start_all(servers, stack)
        others = Others()
        results = measure(running, options.rounds)
        meanwhile = others.line()
    machine = f"{platform.machine()}, {os.cpu_count()} processors, Python {platform.python_version()}"
    print(f"\n{machine}, {options.rounds} rounds, medians; in brackets multiples of the floor\n")
    print(table(results, servers))
    print(f"\n{bare_line(results)}\n{meanwhile}\n")
    print(rows(ratios(results)))


if __name__ == "__main__":
    main()
