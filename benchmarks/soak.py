"""Soak test: valid, invalid and aborted requests in all formats, with every answer, memory and descriptors checked.

Expected numbers come from NumPy in float64, computed before the server starts. Exit status 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import http.client
import io
import json
import random
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import orjson
from safetensors.numpy import load, save

from benchmarks.forms import JSON, SAFETENSORS
from benchmarks.serving import Others, Running, serving

NPZ: Final = "application/x-npz"
CLIENTS: Final = 4
# Seconds between samples of memory and descriptors.
PAUSE: Final = 1.0
# Part of the run after which memory must not grow, as caches and arenas are full: minute 3 of 15.
SETTLED: Final = 0.2
GROWTH: Final = 0.02
# Shorter runs, in seconds, do not check the growth of memory.
SHORTEST: Final = 600.0

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Question:
    """A request, with the expected status and arrays.

    answer: None for an error
    """

    name: str
    media_type: str
    body: bytes
    status: int
    answer: Arrays | None = None


def attended(query: np.ndarray, key: np.ndarray, value: np.ndarray, *, causal: bool) -> Arrays:
    """Return output and weights of softmax(q kᵀ / √d) v by the definition, in float64."""
    query, key, value = (array.astype(np.float64) for array in (query, key, value))
    scores = query @ key.T / np.sqrt(query.shape[-1])
    if causal:
        scores = np.where(np.tri(*scores.shape) > 0, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return {"output": weights @ value, "attention_weights": weights}


def encode(media_type: str, arrays: Arrays, rest: dict[str, Any]) -> bytes:
    """Return the body of a request in a wire format."""
    if media_type == JSON:
        return orjson.dumps({**arrays, **rest}, option=orjson.OPT_SERIALIZE_NUMPY)
    if media_type == SAFETENSORS:
        return save(arrays, {"request": json.dumps(rest)})
    stream = io.BytesIO()
    np.savez(stream, request=np.array(json.dumps(rest)), **arrays)  # type: ignore[arg-type]  # no array is named allow_pickle
    return stream.getvalue()


def decode(media_type: str, body: bytes) -> Arrays:
    """Return the arrays of an answer."""
    if media_type == JSON:
        fields = orjson.loads(body)
        return {name: np.array(fields[name]) for name in ("output", "attention_weights")}
    if media_type == SAFETENSORS:
        return load(body)
    with np.load(io.BytesIO(body), allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files if name != "response"}


def questions() -> list[Question]:
    """Return valid requests of several sizes and dtypes in every format, and invalid ones."""
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
    """Numbers of answers by status, and descriptions of wrong ones."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


class Client(threading.Thread):
    """Sends one question after the other, and disconnects during some of them."""

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
            except Exception as error:  # reported at the end of the run
                self._findings.wrong.append(f"{question.name}: {error!r}"[:300])
                self._connection.close()
                self._connection = self._connect()
        self._connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self._port, timeout=600)

    def _abort(self, question: Question) -> None:
        """Send a part of a request, or all of it, and disconnect."""
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
class Sample:
    """Resident memory in MB and open descriptors at a time."""

    at: float
    resident: float
    descriptors: int


def sample(running: Running, start: float) -> Sample:
    """Return the present memory and descriptors."""
    return Sample(time.monotonic() - start, running.resident(), running.descriptors())


def growth(samples: list[Sample], seconds: float) -> tuple[float, float]:
    """Return the memory in MB once settled and at the end: medians of the nearest tenth of the samples each."""

    def around(share: float) -> float:
        nearest = sorted(samples, key=lambda each: abs(each.at / seconds - share))
        return statistics.median(each.resident for each in nearest[: -(-len(samples) // 10)])

    return around(SETTLED + 0.05), around(1)


def soak(
    running: Running, asked: list[Question], seconds: float, pause: Callable[[float], None]
) -> tuple[Findings, list[Sample]]:
    """Run the clients for some seconds; return their findings, and the samples taken meanwhile."""
    findings, start = Findings(), time.monotonic()
    samples = [sample(running, start)]
    clients = [Client(running.port, asked, start + seconds, seed, findings) for seed in range(CLIENTS)]
    for client in clients:
        client.start()
    while any(client.is_alive() for client in clients):
        pause(PAUSE)
        samples.append(sample(running, start))
    return findings, samples


def report(findings: Findings, samples: list[Sample], left: int, seconds: float) -> bool:
    """Print the findings; return True if everything is right."""
    settled, end = growth(samples, seconds)
    grown = end / settled - 1
    print(f"{dict(sorted(findings.counts.items()))}, {len(findings.wrong)} wrong", *findings.wrong[:5], sep="\n  ")
    print(
        f"memory {settled:.1f} MB after {SETTLED * seconds:.0f} s, {end:.1f} MB at the end: "
        f"{grown:+.2%} (at most {GROWTH:.0%})"
    )
    most = max(each.descriptors for each in samples)
    print(f"descriptors: {samples[0].descriptors} before, {most} at most, {left} after")
    steady = grown < GROWTH or seconds < SHORTEST
    return steady and findings.counts["200"] > 0 and not findings.wrong and left <= samples[0].descriptors


def main() -> None:
    """Run one server and its clients for --seconds."""
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

    with serving([sys.executable, "-m", "attention_service", "serve"], once) as running:
        time.sleep(1)  # until the first connection is closed
        findings, samples = soak(running, asked, options.seconds, time.sleep)
        good = report(findings, samples, running.descriptors_left(samples[0].descriptors), options.seconds)
    print(others.line())
    sys.exit(not good)


if __name__ == "__main__":
    main()
