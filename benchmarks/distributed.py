"""The backend ray on this machine: nodes of one processor each, which share one sequence, causal, without weights.

`python -m benchmarks.distributed` takes the time of 65,536 tokens × 64 features with one and two nodes, in pairs, and
its parts. `--length 262144 --rounds 1 --no-pairs` has two nodes only. Each run compares rows with NumPy in float64, and
prints the peak memory of each worker beside its bound.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
from ray.cluster_utils import Cluster
from ray.exceptions import GetTimeoutError

from attention_service.attention.planning import make_plan
from attention_service.attention.spec import AttentionSpec
from attention_service.backends.numpy.backend import NumpyBackend
from attention_service.backends.ray import backend as module
from attention_service.backends.ray import tasks
from attention_service.backends.ray.work import Part, SharedWork, compute_part
from benchmarks.ratios import Ratio, rows

FEATURES = 64
SAMPLES = 64
# The least speed of two workers, in that of one.
GOAL = 1.6
# Bytes that a worker may take beside query, key and value, which it maps, and one such array, for outputs: 128 MiB when
# it is idle, and scores of 2 MiB, masks, and what the allocator keeps.
BEYOND = 160 * 2**20


@dataclass
class Times:
    """Seconds of a computation, and of its parts: the last four are those of the service but for `compute`.

    compute: of all tasks together; fetch: mapping results that are done; merge: writing them to the output
    """

    total: float = 0.0
    compute: float = 0.0
    put: float = 0.0
    fetch: float = 0.0
    merge: float = 0.0

    def add(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function whose time is added to a part."""

        @wraps(function)
        def timed(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                setattr(self, name, getattr(self, name) + time.perf_counter() - start)

        return timed


@ray.remote(num_cpus=1)
def timed_compute(shared: SharedWork, tiles: Any) -> Part:
    """What a task computes, with its seconds."""
    start = time.perf_counter()
    part = compute_part(shared, tiles)
    part.seconds = time.perf_counter() - start  # type: ignore[attr-defined]
    return part


class TimedRay:
    """The functions of Ray that the backend calls, timed."""

    def __init__(self, times: Times) -> None:
        self.put = times.add("put", ray.put)
        self.cancel, self.wait = ray.cancel, ray.wait
        self._times, self._get = times, times.add("fetch", ray.get)

    def get(self, reference: Any, timeout: float) -> Part:
        """A result. Waiting for it is no part of fetching it."""
        if not ray.wait([reference], timeout=timeout, fetch_local=False)[0]:
            raise GetTimeoutError
        part: Part = self._get(reference, timeout=timeout)
        self._times.compute += part.seconds  # type: ignore[attr-defined]
        return part


@contextmanager
def timing() -> Iterator[Times]:
    """The times of what is computed inside."""
    times = Times()
    backend: Any = module
    task_loop: Any = tasks
    part: Any = Part
    kept = backend.ray, backend._compute, part.put
    backend.ray = task_loop.ray = TimedRay(times)
    backend._compute, part.put = timed_compute, times.add("merge", part.put)
    start = time.perf_counter()
    try:
        yield times
    finally:
        times.total = time.perf_counter() - start
        backend.ray, backend._compute, part.put = kept
        task_loop.ray = ray


def measure(spec: AttentionSpec, backend: NumpyBackend) -> tuple[Times, np.ndarray]:
    """The times of a computation, and its output."""
    plan = make_plan(spec)
    with timing() as times:
        output = backend.run(plan, spec, spec.sources).output
    return times, output


def check(spec: AttentionSpec, output: np.ndarray) -> float:
    """The largest error of sample rows, compared with NumPy in float64, which is asserted to be small."""
    query, key, value = (array[0].astype(np.float64) for array in spec.sources.values())
    worst = 0.0
    for row in np.linspace(0, len(query) - 1, SAMPLES, dtype=int):
        scores = key[: row + 1] @ query[row] / math.sqrt(FEATURES)
        weights = np.exp(scores - scores.max())
        expected = weights @ value[: row + 1] / weights.sum()
        np.testing.assert_allclose(output[0, row], expected, rtol=1e-4, atol=1e-5)
        worst = max(worst, float(np.abs(output[0, row] - expected).max()))
    return worst


def workers() -> Iterator[psutil.Process]:
    """The processes that compute tasks, or wait for some."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended
            if (process.cmdline() or [""])[0].startswith("ray::"):
                yield process


def status(process: psutil.Process, name: str) -> int:
    """A number of bytes of a process, like VmHWM."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def set_nodes(cluster: Cluster, nodes: list[Any], count: int) -> None:
    """Make the cluster have so many nodes of one processor."""
    while len(nodes) > count:
        cluster.remove_node(nodes.pop())
    while len(nodes) < count:
        nodes.append(cluster.add_node(num_cpus=1, object_store_memory=2**30))
    while ray.cluster_resources().get("CPU") != count:
        time.sleep(0.1)


def warm_up(spec: AttentionSpec, backend: NumpyBackend) -> None:
    """Have each worker import what it computes with."""
    query, key, value = (array[:, : 2**13] for array in spec.sources.values())
    small = spec._replace(query=query, key=key, value=value)
    for _ in range(3):
        backend.run(make_plan(small), small, small.sources)


def main() -> None:
    """Measure what the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=65_536)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-pairs", dest="pairs", action="store_false", help="two nodes only")
    chosen = parser.parse_args()
    random = np.random.default_rng(0)
    query, key, value = (random.normal(size=(1, chosen.length, FEATURES)).astype(np.float32) for _ in range(3))
    spec = AttentionSpec(query, key, value, layout="hld", is_causal=True, include=())
    blas = {name: text for name, text in os.environ.items() if name.startswith(("OPENBLAS_", "OMP_"))}
    print(f"{chosen.length} × {FEATURES}, float32, causal; {os.cpu_count()} processors, {blas or 'no OPENBLAS_'}\n")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 2**30})
    ray.init(cluster.address, log_to_driver=False, runtime_env={"py_executable": sys.executable})
    try:
        run_rounds(cluster, spec, chosen.rounds, [1, 2] if chosen.pairs else [2])
    finally:
        ray.shutdown()
        cluster.shutdown()


def run_rounds(cluster: Cluster, spec: AttentionSpec, rounds: int, counts: list[int]) -> None:
    """Print the times of each round, and the ratios of the best pair, and the memory of workers."""
    backend, nodes = module.RayBackend(address=cluster.address), list[Any]()
    ratios: list[Ratio] = []
    speeds: list[float] = []
    print("| round | nodes | load before | seconds | compute, all workers | put | fetch | merge | else |")
    print("|---|---|---|---|---|---|---|---|---|")
    for number in range(1, rounds + 1):
        totals = []
        for count in counts:
            set_nodes(cluster, nodes, count)
            warm_up(spec, backend)
            load = os.getloadavg()[0]
            times, output = measure(spec, backend)
            ratios = memory(spec, count)
            check(spec, output)
            totals.append(times.total)
            known = times.compute / count + times.put + times.fetch + times.merge
            parts = (times.total, times.compute, times.put, times.fetch, times.merge, times.total - known)
            print(
                f"| {number} | {count} | {load:.2f} | " + " | ".join(f"{part:.2f}" for part in parts) + " |", flush=True
            )
        speeds.append(totals[0] / totals[-1])
    if len(counts) > 1:
        ratios.append(Ratio("speed of two nodes / one, best pair", max(speeds), GOAL, at_least=True))
    print(f"\n{SAMPLES} rows differ from NumPy in float64 by at most {check(spec, output):.1e}\n")
    print(rows(ratios))


def memory(spec: AttentionSpec, count: int) -> list[Ratio]:
    """The peaks of the workers that take most, beside what they may take."""
    bound = sum(array.nbytes for array in spec.sources.values()) + spec.sources["query"].nbytes + BEYOND
    peaks = sorted((status(process, "VmHWM") for process in workers()), reverse=True)[:count]
    return [Ratio("peak memory of a worker, MiB", peak / 2**20, bound / 2**20) for peak in peaks]


if __name__ == "__main__":
    main()
