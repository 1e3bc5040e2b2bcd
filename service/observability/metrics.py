"""What is counted, in plain numbers: a request must not wait for its own statistics.

Each worker counts by itself. With several, each writes its counts to a folder now and then, and whichever is asked
adds up its own and those of the others.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import orjson

# Seconds; each bucket holds what is at most this long.
BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)

# Status of a request without a response, as its client disconnected or the server stops; as nginx has it.
DISCONNECTED = 499


class Metric(NamedTuple):
    """A metric: its kind (counter, gauge, histogram), what it tells, the names of its labels."""

    kind: str
    help: str
    labels: tuple[str, ...] = ()


METRICS = {
    "attention_requests": Metric(
        "counter", "Requests answered, by their status over HTTP.", ("protocol", "operation", "status")
    ),
    "attention_problems": Metric("counter", "Requests answered with a problem.", ("code",)),
    "attention_request_seconds": Metric("histogram", "From head of request to end of answer.", ("operation",)),
    "attention_received_bytes": Metric("counter", "Bytes of the bodies of tensor operations.", ("media_type",)),
    "attention_sent_bytes": Metric("counter", "Bytes of the answers of tensor operations.", ("media_type",)),
    "attention_computed": Metric("counter", "Attentions computed.", ("backend", "kernel")),
    "attention_compute_seconds": Metric("counter", "Time of computing.", ("backend", "kernel")),
    "attention_decode_seconds": Metric("counter", "Time of reading bodies.", ("media_type",)),
    "attention_encode_seconds": Metric("counter", "Time of writing answers before they are sent.", ("media_type",)),
    "attention_queue_seconds": Metric("counter", "Time of waiting for a slot and memory."),
    "attention_batches": Metric("counter", "Batches of more than one small request that were computed as one."),
    "attention_batched_requests": Metric("counter", "Small requests that were computed in such batches."),
    "attention_requests_in_flight": Metric("gauge", "Requests that are not answered yet."),
    "attention_slots_in_use": Metric("gauge", "Large requests that are decoded or computed."),
    "attention_slots": Metric("gauge", "Large requests that may be decoded or computed at once."),
    "attention_requests_waiting": Metric("gauge", "Large requests that wait for a slot or for memory."),
    "attention_memory_bytes": Metric("gauge", "Memory held by requests, until they are answered."),
    "attention_memory_limit_bytes": Metric("gauge", "Memory that requests may hold."),
    "attention_workers": Metric("gauge", "Processes that answer."),
}  # fmt: skip

Labels = tuple[Any, ...]
Cells = dict[tuple[str, Labels], Any]


class Seconds(Protocol):
    """What the steps of one request took."""

    decode: float
    queue: float
    compute: float
    encode: float


class Tally:
    """The counts of one worker: a number for a counter or gauge, [sum, count in each bucket …] for a histogram."""

    def __init__(self) -> None:
        self.in_flight = 0
        self._cells: Cells = {}
        # (media type of body, of answer, backend, kernel) -> [answers, bytes in, bytes out, seconds of four steps]
        self._tensors: dict[tuple[str, str, str, str], list[float]] = {}

    def answered(
        self, operation: str, status: int, seconds: float, problem: str | None, protocol: str = "http"
    ) -> None:
        """Count an answer; status: over HTTP, whatever the protocol."""
        key: tuple[str, Labels] = ("attention_requests", (protocol, operation, status))
        cells = self._cells
        cells[key] = cells.get(key, 0) + 1
        cell = cells.get(("attention_request_seconds", (operation,)))
        if cell is None:
            cell = cells["attention_request_seconds", (operation,)] = [0.0] * (len(BUCKETS) + 2)
        cell[0] += seconds
        cell[bisect_left(BUCKETS, seconds) + 1] += 1
        if problem is not None:
            key = ("attention_problems", (problem,))
            cells[key] = cells.get(key, 0) + 1

    def computed(self, kind: tuple[str, str, str, str], received: int, sent: int, seconds: Seconds) -> None:
        """Count a tensor operation."""
        cell = self._tensors.get(kind)
        if cell is None:
            cell = self._tensors[kind] = [0.0] * 7
        cell[0] += 1
        cell[1] += received
        cell[2] += sent
        cell[3] += seconds.decode
        cell[4] += seconds.queue
        cell[5] += seconds.compute
        cell[6] += seconds.encode

    @property
    def cells(self) -> Cells:
        """All counts by name and labels."""
        tensors: Cells = {("attention_queue_seconds", ()): 0.0}
        for (own, other, *kernel), cell in self._tensors.items():
            count, received, sent, decode, queue, compute, encode = cell
            for name, labels, amount in (
                ("computed", tuple(kernel), count),
                ("received_bytes", (own,), received),
                ("sent_bytes", (other,), sent),
                ("decode_seconds", (own,), decode),
                ("queue_seconds", (), queue),
                ("compute_seconds", tuple(kernel), compute),
                ("encode_seconds", (other,), encode),
            ):
                key = (f"attention_{name}", labels)
                tensors[key] = tensors.get(key, 0.0) + amount
        return {(name, tuple(map(str, labels))): value for (name, labels), value in self._cells.items()} | tensors


def note_computed(
    tally: Tally | None,
    media_types: tuple[str, str],
    metadata: Mapping[str, Any],
    received: int,
    sent: int,
    seconds: Seconds,
) -> dict[str, Any]:
    """Count a tensor operation, if anybody counts, and what to log of it; media_types: of the body and the answer."""
    backend, kernel = metadata["backend"], metadata["kernel"]
    if tally is not None:
        tally.computed((*media_types, backend, kernel), received, sent, seconds)
    return {"received": received, "sent": sent, "kernel": f"{backend}/{kernel}"}


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
