"""What is counted, in plain numbers: a request must not wait for its own statistics.

Each worker counts by itself. With several, each writes its counts to a folder now and then, and whichever is asked
adds up its own and those of the others.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import orjson

# Seconds; each bucket holds what is at most this long.
BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


class Metric(NamedTuple):
    """A metric: its kind (counter, gauge, histogram), what it tells, the names of its labels."""

    kind: str
    help: str
    labels: tuple[str, ...] = ()


METRICS = {
    "attention_requests": Metric("counter", "Requests answered.", ("operation", "status")),
    "attention_problems": Metric("counter", "Requests answered with a problem.", ("code",)),
    "attention_request_seconds": Metric("histogram", "From head of request to end of answer.", ("operation",)),
    "attention_received_bytes": Metric("counter", "Bytes of the bodies of tensor operations.", ("media_type",)),
    "attention_sent_bytes": Metric("counter", "Bytes of the answers of tensor operations.", ("media_type",)),
    "attention_compute_seconds": Metric("histogram", "Computing.", ("backend", "kernel")),
    "attention_decode_seconds": Metric("histogram", "Reading bodies.", ("media_type",)),
    "attention_encode_seconds": Metric("histogram", "Writing answers, unless while they are sent.", ("media_type",)),
    "attention_queue_seconds": Metric("histogram", "Waiting for a place and memory."),
    "attention_requests_in_flight": Metric("gauge", "Requests that are not answered yet."),
    "attention_places_taken": Metric("gauge", "Large requests at work."),
    "attention_places": Metric("gauge", "Large requests that may be at work at once."),
    "attention_requests_waiting": Metric("gauge", "Large requests that wait for a place or for memory."),
    "attention_memory_bytes": Metric("gauge", "Memory taken by requests, by estimates.", ("pool",)),
    "attention_memory_limit_bytes": Metric("gauge", "Memory that requests may take.", ("pool",)),
    "attention_workers": Metric("gauge", "Processes that answer."),
}  # fmt: skip

Labels = tuple[str, ...]
Cells = dict[tuple[str, Labels], Any]


class Tally:
    """The counts of one worker: a number for a counter or gauge, [sum, count in each bucket …] for a histogram."""

    def __init__(self) -> None:
        self.cells: Cells = {}
        self.in_flight = 0

    def add(self, name: str, labels: Labels, amount: float = 1) -> None:
        """Count something."""
        key = (name, labels)
        self.cells[key] = self.cells.get(key, 0) + amount

    def observe(self, name: str, labels: Labels, seconds: float) -> None:
        """Count a duration."""
        cell = self.cells.get((name, labels))
        if cell is None:
            cell = self.cells[name, labels] = [0.0] * (len(BUCKETS) + 2)
        cell[0] += seconds
        cell[bisect_left(BUCKETS, seconds) + 1] += 1


class Shared:
    """The counts of all workers, through files in a folder: what ended workers counted stays, their gauges do not."""

    # Seconds between two writings; what has not been written for longer than the second number is of an ended worker.
    EVERY, ENDED = 1.0, 10.0

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._own = folder / f"{os.getpid()}.json"

    def write(self, cells: Cells) -> None:
        """Let others see these."""
        content = orjson.dumps([[name, labels, value] for (name, labels), value in cells.items()])
        temporary = self._own.with_suffix(".new")
        with suppress(OSError):  # a full disk must not stop the service
            temporary.write_bytes(content)
            temporary.replace(self._own)

    def others(self) -> Iterator[Cells]:
        """The counts of every other worker."""
        for path in sorted(self._folder.glob("*.json")):
            if path != self._own:
                with suppress(OSError, ValueError):
                    ended = time.time() - path.stat().st_mtime > self.ENDED
                    rows = orjson.loads(path.read_bytes())
                    yield {(name, tuple(labels)): value for name, labels, value in rows
                           if not (ended and METRICS[name].kind == "gauge")}  # fmt: skip


def total(counts: Iterator[Cells]) -> Cells:
    """Everything added up."""
    found: Cells = {}
    for cells in counts:
        for key, value in cells.items():
            before = found.get(key)
            if before is None:
                found[key] = list(value) if isinstance(value, list) else value
            elif isinstance(value, list):
                found[key] = [one + other for one, other in zip(before, value, strict=True)]
            else:
                found[key] = before + value
    return found
