"""What a stored layer saves: requests with `layer` beside the same with its projections inline, and without any.

    python -m benchmarks.layers

A layer of BERT's size: 768 features, 12 heads, 128 tokens. The service is a process of its own, and answers one
request at a time. A request with the layer is compared with the sum of `attend()` on the same arrays in this process,
and of the floor: bare uvicorn, which reads the same body and answers with as many bytes. Each round measures everything
in turn; the least median of all rounds counts, because other work on a machine only adds to it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
from threadpoolctl import threadpool_limits

from attention_service import attend
from attention_service.layers.files import write_layer
from benchmarks.client import latency
from benchmarks.forms import Request, fetch
from benchmarks.ratios import Ratio, rows
from benchmarks.serving import Others
from benchmarks.table import FLOOR, OURS
from tests.helpers import wire

FEATURES: Final = 768
HEADS: Final = 12
TOKENS: Final = 128
ROLES: Final = ("query", "key", "value", "output")
KINDS: Final = {"JSON": wire.JSON, "safetensors": wire.SAFETENSORS}
# Requests of one kind in a round.
TIMES: Final = 5


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    options.add_argument("--rounds", type=int, default=9, help="(default: 9)")
    rounds = options.parse_args().rounds
    random = np.random.default_rng(0)
    maps = {role: random.normal(size=(FEATURES, FEATURES), scale=FEATURES**-0.5).astype(np.float32) for role in ROLES}
    tokens = random.normal(size=(TOKENS, FEATURES)).astype(np.float32)
    inline: dict[str, Any] = {
        "projection": {role: {"weight": weight} for role, weight in maps.items()},
        "num_heads": HEADS,
    }
    others = Others()
    with TemporaryDirectory() as folder:
        weights = {f"projection.{role}.weight": weight for role, weight in maps.items()}
        write_layer(Path(folder), "bert", weights, {"num_heads": HEADS}, "random")
        server = replace(OURS, environment={**OURS.environment, "ATTENTION_LAYERS": folder})
        with server.started() as service, FLOOR.started() as floor:
            measured, sizes = requests(service.port, floor.port, tokens, inline)
            for kind in KINDS:  # lists have no type: the service computes them in float64
                source = tokens.astype(np.float64) if kind == "JSON" else tokens
                compute = partial(attend, input=source, **inline, include=[])
                measured[kind, "in process"] = partial(in_process, compute)
                measured[kind, "in process, 1 thread"] = partial(in_process, compute, 1)
            times: dict[tuple[str, str], list[float]] = {key: [] for key in measured}
            for _ in range(rounds):
                for key, measure in measured.items():
                    times[key].append(measure())
    report({key: min(found) for key, found in times.items()}, sizes)
    print(f"\n{others.line()}")


def requests(
    service: int, floor: int, tokens: np.ndarray, inline: dict[str, Any]
) -> tuple[dict[tuple[str, str], Callable[[], float]], dict[tuple[str, str], tuple[int, int]]]:
    """What measures each request in milliseconds, and the bytes of each request and of its response."""
    measured: dict[tuple[str, str], Callable[[], float]] = {}
    sizes = {}
    common: dict[str, Any] = {"input": tokens, "include": []}
    expected = attend(input=tokens.astype(np.float64), **inline, include=[]).output
    for kind, media_type in KINDS.items():
        for name, fields in (("layer", {"layer": "bert"}), ("inline", inline), ("none", {"num_heads": HEADS})):
            body = wire.write(common | fields, media_type)
            request = Request("/attention", {"Content-Type": media_type, "Accept": media_type}, body)
            reply = fetch(service, request).body
            if name != "none":
                np.testing.assert_allclose(wire.read(reply, media_type)["output"], expected, atol=1e-4)
            measured[kind, name] = partial(latency, service, request.message(), TIMES)
            sizes[kind, name] = len(body), len(reply)
            if name == "layer":
                bare = Request(f"/{len(reply)}", request.headers, body)
                measured[kind, "floor"] = partial(latency, floor, bare.message(), TIMES)
                sizes[kind, "floor"] = sizes[kind, name]
    return measured, sizes


def in_process(compute: Callable[[], object], threads: int | None = None) -> float:
    """The median milliseconds of a call. threads: of BLAS, by default one for each processor"""
    taken = []
    with threadpool_limits(threads, user_api="blas"):
        for _ in range(TIMES):
            start = time.perf_counter()
            compute()
            taken.append(time.perf_counter() - start)
    return statistics.median(taken) * 1e3


def report(times: dict[tuple[str, str], float], sizes: dict[tuple[str, str], tuple[int, int]]) -> None:
    """Print the times, and the ratios with their bounds."""
    for key, milliseconds in times.items():
        sent, received = sizes.get(key, (0, 0))
        traffic = f"{sent / 1e6:7.2f} MB, answered with {received / 1e6:.2f} MB" if sent else ""
        print(f"{', '.join(key):34} {milliseconds:8.1f} ms  {traffic}")
    ratios = []
    for kind in KINDS:
        # Two threads of BLAS wait long for each other on a machine that does other work.
        computing = min(times[kind, "in process"], times[kind, "in process, 1 thread"])
        layer, least = times[kind, "layer"], computing + times[kind, "floor"]
        # Of binary formats nothing is promised: they are fast with their projections inline.
        bound = 5 if kind == "JSON" else 1
        ratios += [
            Ratio(f"{kind}: inline / layer", times[kind, "inline"] / layer, bound, at_least=True),
            Ratio(f"{kind}: layer / (in process + floor)", layer / least, 1.3),
        ]
    print(f"\n{rows(ratios)}")


if __name__ == "__main__":
    main()
