"""Where the time of a request goes: steps of the pipeline, processor time and page faults, beside bare uvicorn.

    .venv/bin/python -m benchmarks.profile --workloads W3 "W3 binary"

Each server answers one client on one connection. The steps are those of the header Server-Timing, which comes before a
long response is encoded: for such a response the step `encode` is part of `rest`, with all that servers, middleware
and the client do.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import signal
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from benchmarks.client import Connection
from benchmarks.forms import Request
from benchmarks.http import checked_request
from benchmarks.serving import Others, Running, blas_variables
from benchmarks.table import BY_HAND, FLOORS, ONE_THREAD, OURS_BY_PARSER, PARSERS, Server
from benchmarks.workloads import Workload, workloads

ROUNDS = 5
SECONDS = 1.0  # of each server in each round
MIN_REQUESTS = 10
STEPS = ("decode", "prepare", "queue", "compute", "encode")
STEP = re.compile(r"(\w+);dur=([0-9.]+)")
COLUMNS = ("p50", *STEPS, "rest", "CPU", "faults")


@dataclass
class Profile:
    """Figures of one server. All but the page faults are milliseconds.

    rounds: for each column the value of each round: the median of its requests, or the mean of CPU and page faults
    """

    server: Server
    running: Running
    message: bytes
    rounds: dict[str, list[float]] = field(default_factory=dict)

    def measure(self) -> None:
        """Ask for a second, and add the figures of this round."""
        connection = Connection(self.running.port)
        for _ in range(MIN_REQUESTS // 2):  # a new connection, and processors that were idle, are slower
            connection.ask(self.message)
        requests: dict[str, list[float]] = {}
        faults, processor = self.running.page_faults(), self.running.processor_seconds()
        while len(totals := requests.setdefault("p50", [])) < MIN_REQUESTS or sum(totals) < SECONDS * 1e3:
            total = connection.ask(self.message) * 1e3
            steps = server_timing(connection.head)
            for name, value in {"p50": total, **steps, "rest": total - sum(steps.values())}.items():
                requests.setdefault(name, []).append(value)
        count = len(totals)
        found = {name: statistics.median(values) for name, values in requests.items()}
        found["CPU"] = (self.running.processor_seconds() - processor) * 1e3 / count
        found["faults"] = (self.running.page_faults() - faults) / count
        for name, value in found.items():
            self.rounds.setdefault(name, []).append(value)
        connection.close()

    def row(self) -> str:
        """The row of the table: medians of the rounds."""
        cells = []
        for name in COLUMNS:
            value = statistics.median(self.rounds[name]) if name in self.rounds else None
            cells.append("" if value is None else f"{value:.0f}" if name == "faults" else f"{value:.3f}")
        return f"| {self.server.name} | {' | '.join(cells)} |"


def server_timing(head: bytes) -> dict[str, float]:
    """The milliseconds of each step in the header Server-Timing of a response; none without the header."""
    line = next((line for line in head.split(b"\r\n") if line.lower().startswith(b"server-timing:")), b"")
    return {name: float(value) for name, value in STEP.findall(line.decode()) if name in STEPS}


def start(load: Workload, stack: ExitStack, variables: Mapping[str, str]) -> list[Profile]:
    """Start bare uvicorn, FastAPI by hand and the service, each on each parser. variables: of their processes"""
    found = []
    for parser in PARSERS:
        ours, by_hand = OURS_BY_PARSER[parser], BY_HAND[parser]
        running = stack.enter_context(ours.started(**variables))
        form = ours.form(load.binary)
        assert form is not None
        request, size = checked_request(ours, form, running, load)
        floor = stack.enter_context(FLOORS[parser].started(**variables))
        # As many bytes in both directions.
        found.append(Profile(FLOORS[parser], floor, Request(f"/{size}", request.headers, request.body).message()))
        if (hand_form := by_hand.form(load.binary)) is not None:
            hand = stack.enter_context(by_hand.started(**variables))
            found.append(Profile(by_hand, hand, checked_request(by_hand, hand_form, hand, load)[0].message()))
        found.append(Profile(ours, running, request.message()))
    return found


def table(profiles: Sequence[Profile]) -> str:
    """The figures as a table in Markdown."""
    lines = ["| server | " + " | ".join(COLUMNS) + " |", "|---|" + "---|" * len(COLUMNS)]
    return "\n".join(lines + [profile.row() for profile in profiles])


def main() -> None:
    """Profile the workloads that are named, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    names = list(workloads())
    parser.add_argument("--workloads", nargs="+", metavar="NAME", choices=names, default=names, help=", ".join(names))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--own-threads", action="store_true", help="each server with its own BLAS threads, not one")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # so that the servers are stopped
    others = Others()
    variables = {} if options.own_threads else ONE_THREAD
    print(f"{platform.machine()}, {os.cpu_count()} processors, Python {platform.python_version()}")
    print(f"{'BLAS with its own threads' if options.own_threads else 'one BLAS thread each'}, {blas_variables()}")
    for name in options.workloads:
        with ExitStack() as stack:
            profiles = start(workloads()[name], stack, variables)
            for turn in range(options.rounds):
                for profile in profiles if turn % 2 else profiles[::-1]:
                    profile.measure()
        print(f"\n{name}, medians of {options.rounds} rounds: milliseconds, and page faults of a request\n")
        print(table(profiles), flush=True)
    print(f"\n{others.line()}")


if __name__ == "__main__":
    main()
