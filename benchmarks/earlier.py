"""The service beside an earlier tree of itself: ratios of latency and throughput, paired within each round.

    git worktree add ../earlier COMMIT
    .venv/bin/python -m benchmarks.earlier ../earlier

Both run with the packages of this environment. Each round starts both anew and asks them in turn.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from benchmarks.client import latency, throughput
from benchmarks.http import checked_request, failures_named
from benchmarks.serving import Others, Running, blas_variables
from benchmarks.table import OURS_BY_PARSER, PARSERS, Server
from benchmarks.workloads import Workload, workloads

ROUNDS = 8
BURSTS = 3  # measurements of latency per round and tree
SECONDS = 1
BUSY = ("W1", "W2")


def of_tree(server: Server, tree: Path, name: str) -> Server:
    """Return the server as the code of a tree runs it."""
    path = {"PYTHONPATH": os.fspath(tree / "service")}
    return replace(server, name=f"{name}, {server.name}", environment={**server.environment, **path})


def compare(now: Server, before: Server, rounds: int) -> dict[str, list[float]]:
    """Measure both trees in rounds. Each round starts both anew: equal processes differ by a tenth and more.

    Returns: ratios of each round by column; latencies are now / before, throughputs before / now: 1.05 is slower by 5 %
    """
    ratios: dict[str, list[float]] = {}
    for turn in range(rounds):
        order = (before, now) if turn % 2 else (now, before)
        with ExitStack() as stack:
            running = {server: stack.enter_context(server.started()) for server in order}
            for name, load in workloads().items():
                for column, ratio in measured(running, load, now, before).items():
                    ratios.setdefault(f"{name} {column}", []).append(ratio)
    return ratios


def measured(running: Mapping[Server, Running], load: Workload, now: Server, before: Server) -> dict[str, float]:
    """The ratios of one workload in one round. running: in the order in which they are asked"""
    messages = {}
    for server, process in running.items():
        form = server.form(load.binary)
        assert form is not None
        messages[server] = checked_request(server, form, process, load)[0].message()
    taken: dict[Server, list[float]] = {now: [], before: []}
    with failures_named(now, load.name):
        for server in (*running,) * BURSTS:
            taken[server].append(latency(running[server].port, messages[server], load.times))
        found = {"p50": statistics.median(taken[now]) / statistics.median(taken[before])}
        if load.name in BUSY:
            rates = {server: throughput(running[server].port, messages[server], SECONDS) for server in running}
            found["rps"] = rates[before] / rates[now]
    return found


def main() -> None:
    """Compare this tree with an earlier one, on each parser, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("tree", type=Path, help="a checkout of an earlier commit")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # so that the servers are stopped
    here = Path(__file__).resolve().parent.parent
    others = Others()
    columns = {
        name: compare(
            of_tree(OURS_BY_PARSER[name], here, "now"),
            of_tree(OURS_BY_PARSER[name], options.tree.resolve(), "before"),
            options.rounds,
        )
        for name in PARSERS
    }
    print(blas_variables())
    print(f"\nnow / before (rps: before / now), {options.rounds} rounds: median (least to greatest)\n")
    print("| | " + " | ".join(columns) + " |\n|---|" + "---|" * len(columns))
    for row in columns[PARSERS[0]]:
        values = (sorted(found[row]) for found in columns.values())
        cells = (f"{statistics.median(value):.3f} ({value[0]:.2f} to {value[-1]:.2f})" for value in values)
        print(f"| {row} | " + " | ".join(cells) + " |")
    print(f"\n{others.line()}")


if __name__ == "__main__":
    main()
