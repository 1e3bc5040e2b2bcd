"""Hours in short: valid, invalid and aborted requests in all formats, every answer checked.

Memory and descriptors are watched. Expected numbers are NumPy's, in float64, computed before the server starts. Exit
status 1 where anything is not as it should be.
"""

from __future__ import annotations

import argparse
import http.client
import io
import json
import os
import random
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson
from safetensors.numpy import load, save

from benchmarks.forms import JSON, SAFETENSORS
from benchmarks.serving import Others, Running, serving

NPZ: Final = "application/x-npz"
CLIENTS: Final = 4
# Seconds between looks at the server.
PAUSE: Final = 1.0
# Part of the run after which memory is to stay as it is, as caches and arenas are full: minute 3 of 15.
SETTLED: Final = 0.2
GROWTH: Final = 0.02
# Below so many seconds a run is too short to say anything about growth.
SHORTEST: Final = 600.0

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Question:
    """A request, and what it must be answered with.

    answer: the arrays, None for a refusal
    """

    name: str
    media_type: str
    body: bytes
    status: int
    answer: Arrays | None = None


def attended(query: np.ndarray, key: np.ndarray, value: np.ndarray, *, causal: bool) -> Arrays:
    """softmax(q kᵀ / √d) v by the definition, in float64."""
    query, key, value = (array.astype(np.float64) for array in (query, key, value))
    scores = query @ key.T / np.sqrt(query.shape[-1])
    if causal:
        scores = np.where(np.tri(*scores.shape) > 0, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return {"output": weights @ value, "attention_weights": weights}


def encode(media_type: str, arrays: Arrays, rest: dict[str, Any]) -> bytes:
    """A request in a wire format."""
    if media_type == JSON:
        return orjson.dumps({**arrays, **rest}, option=orjson.OPT_SERIALIZE_NUMPY)
    if media_type == SAFETENSORS:
        return save(arrays, {"request": json.dumps(rest)})
    stream = io.BytesIO()
    np.savez(stream, request=np.array(json.dumps(rest)), **arrays)  # type: ignore[arg-type]  # no array is named allow_pickle
    return stream.getvalue()


def decode(media_type: str, body: bytes) -> Arrays:
    """The arrays of an answer."""
    if media_type == JSON:
        fields = orjson.loads(body)
        return {name: np.array(fields[name]) for name in ("output", "attention_weights")}
    if media_type == SAFETENSORS:
        return load(body)
    with np.load(io.BytesIO(body), allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files if name != "response"}


def questions() -> list[Question]:
    """Good ones of several sizes and types in every format, and bad ones."""
    generator = np.random.default_rng(0)
    found: list[Question] = []
    for media_type in (JSON, NPZ, SAFETENSORS):
        for length, width in ((6, 4), (128, 64), (400, 64)):
            for dtype in (np.float32, np.float64):
                arrays = {
                    name: generator.normal(size=(length, width)).astype(dtype) for name in ("query", "key", "value")
                }
                causal = bool(len(found) % 2)
                rest = {"is_causal": causal, "dtype": np.dtype(dtype).name}
                name = f"{media_type} {length}x{width} {rest['dtype']}"
                right = attended(arrays["query"], arrays["key"], arrays["value"], causal=causal)
                found.append(Question(name, media_type, encode(media_type, arrays, rest), 200, right))
        tall = {"input": np.ones((2000, 2))}
        wrong = {"query": np.ones((2, 3)), "key": np.ones((2, 4)), "value": np.ones((2, 4))}
        found += [
            Question(f"{media_type} mismatch", media_type, encode(media_type, wrong, {}), 422),
            Question(f"{media_type} unknown field", media_type, encode(media_type, tall, {"inptu": 1}), 422),
            Question(f"{media_type} garbage", media_type, generator.bytes(5000), 400),
        ]
    vast = {"input": np.ones((200_000, 1), np.float32)}
    return [
        *found,
        Question("too much memory", SAFETENSORS, encode(SAFETENSORS, vast, {}), 413),
        Question("no such type", "text/plain", b"hello", 415),
        Question("NaN", JSON, b'{"input": [' + b"[1, 2], " * 5000 + b"[NaN, 1]]}", 400),
    ]


@dataclass
class Findings:
    """What clients saw."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


class Client(threading.Thread):
    """Asks one question after the other, and now and then hangs up."""

    def __init__(self, port: int, asked: list[Question], end: float, seed: int, findings: Findings) -> None:
        super().__init__()
        self._port, self._asked, self._end, self._findings = port, asked, end, findings
        self._random = random.Random(seed)
        self._connection = self._connect()

    def run(self) -> None:
        while time.monotonic() < self._end:
            question = self._random.choice(self._asked)
            try:
                if self._random.random() < 0.1:
                    self._abort(question)
                else:
                    self._ask(question)
            except Exception as error:  # whatever it is, the run is to tell of it in the end
                self._findings.wrong.append(f"{question.name}: {error!r}"[:300])
                self._connection.close()
                self._connection = self._connect()
        self._connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)

    def _abort(self, question: Question) -> None:
        """Send a part, or all, and hang up."""
        connection = self._connect()
        connection.putrequest("POST", "/attention")
        connection.putheader("Content-Type", question.media_type)
        connection.putheader("Content-Length", str(len(question.body)))
        connection.endheaders()
        with suppress(ConnectionError):
            connection.send(question.body[: self._random.randint(0, len(question.body))])
        connection.close()
        self._findings.counts["aborted"] += 1

    def _ask(self, question: Question) -> None:
        self._connection.request("POST", "/attention", question.body, {"Content-Type": question.media_type})
        response = self._connection.getresponse()
        body = response.read()
        if response.status != question.status:
            raise ValueError(f"{response.status} instead of {question.status}: {body[:200]!r}")
        if question.answer is not None:
            found = decode(question.media_type, body)
            for name, right in question.answer.items():
                if not np.allclose(found[name], right, rtol=1e-4, atol=1e-5):
                    raise ValueError(f"wrong {name}")
        self._findings.counts[str(response.status)] += 1


@dataclass(frozen=True)
class Look:
    """Megabytes in memory and open descriptors at a time."""

    at: float
    resident: float
    descriptors: int


def look(running: Running, start: float) -> Look:
    """As it is now."""
    descriptors = sum(len(os.listdir(Path("/proc") / str(pid) / "fd")) for pid in running.tree())
    return Look(time.monotonic() - start, running.resident(), descriptors)


def growth(looks: list[Look], seconds: float) -> tuple[float, float]:
    """Megabytes once settled, and in the end: medians over a tenth of the run each."""

    def between(first: float, last: float) -> float:
        return statistics.median(each.resident for each in looks if first <= each.at / seconds <= last)

    return between(SETTLED, SETTLED + 0.1), between(0.9, 1.1)


def soak(
    running: Running, asked: list[Question], seconds: float, pause: Callable[[float], None]
) -> tuple[Findings, list[Look]]:
    """Let the clients ask for so long."""
    findings, start = Findings(), time.monotonic()
    looks = [look(running, start)]
    clients = [Client(running.port, asked, start + seconds, seed, findings) for seed in range(CLIENTS)]
    for client in clients:
        client.start()
    while any(client.is_alive() for client in clients):
        pause(PAUSE)
        looks.append(look(running, start))
    return findings, looks


def report(findings: Findings, looks: list[Look], rest: Look, seconds: float) -> bool:
    """Print what was found; whether all is as it should be."""
    settled, end = growth(looks, seconds)
    grown = end / settled - 1
    print(f"{dict(sorted(findings.counts.items()))}, {len(findings.wrong)} wrong", *findings.wrong[:5], sep="\n  ")
    print(
        f"memory {settled:.1f} MB after {SETTLED * seconds:.0f} s, {end:.1f} MB in the end: "
        f"{grown:+.2%} (at most {GROWTH:.0%})"
    )
    most = max(each.descriptors for each in looks)
    print(f"descriptors: {looks[0].descriptors} before, {most} at most, {rest.descriptors} after")
    steady = grown < GROWTH or seconds < SHORTEST
    return steady and not findings.wrong and rest.descriptors <= looks[0].descriptors


def main() -> None:
    """One server, for as long as asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=900)
    options = parser.parse_args()
    asked, others = questions(), Others()
    first = asked[0]

    def once(port: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("POST", "/attention", first.body, {"Content-Type": first.media_type})
        connection.getresponse().read()
        connection.close()

    with serving([sys.executable, "-m", "service", "serve"], once) as running:
        time.sleep(1)  # for the first connection to be gone
        findings, looks = soak(running, asked, options.seconds, time.sleep)
        time.sleep(6)  # connections that are kept alive end after 5
        good = report(findings, looks, look(running, 0), options.seconds)
    print(others.line())
    sys.exit(not good)


if __name__ == "__main__":
    main()
