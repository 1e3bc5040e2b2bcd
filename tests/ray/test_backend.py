"""The Ray backend gives the numbers of NumPy, whatever a request asks for and whichever workers are lost."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from attention_service.attention.planning import make_plan
from attention_service.attention.result import Result
from attention_service.attention.spec import AttentionSpec
from attention_service.attention.tiles import Tiling
from attention_service.backends.base import Backend, Check
from attention_service.backends.numpy.backend import NumpyBackend
from attention_service.backends.ray import cluster as cluster_of_process
from attention_service.backends.ray.backend import RayBackend
from attention_service.codecs.decoded import Decoded
from attention_service.codecs.table import CODECS
from attention_service.errors import Busy, InvalidRequest, Overflow
from attention_service.pipeline.engine import Engine
from attention_service.settings import Settings
from tests.cases import CASES
from tests.conftest import app, serving
from tests.helpers.options import plain, unusual
from tests.helpers.waiting import until
from tests.ray.conftest import NODE

SIZES = (2, 2, 4, 6)
OPTIONS = unusual(*SIZES)
# Of the pipeline around backends.
OTHER = {"dtype", "device", "backend", "query_tokens", "key_tokens", "untyped"}
SMALL = Tiling(scores=16, workers=2, fast_rows=1, fast_columns=2, max_scores=16)


def run(backend: Backend, spec: AttentionSpec, check: Check | None = None) -> Result:
    return backend.run(make_plan(spec), spec, spec.sources, check)


def leaves(arrays: Mapping[str, Any], prefix: str = "") -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for name, value in arrays.items():
        if isinstance(value, Mapping):
            found |= leaves(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = np.asarray(value)
    return found


def check_same(backend: RayBackend, spec: AttentionSpec) -> None:
    numpy = NumpyBackend()
    backend.tiling = numpy.tiling = SMALL
    found, right = run(backend, spec), run(numpy, spec)
    assert found.metadata.backend == "ray"
    assert replace(found.metadata, backend="numpy") == right.metadata
    expected = leaves(right.arrays)
    assert leaves(found.arrays).keys() == expected.keys()
    for name, array in leaves(found.arrays).items():
        assert array.dtype == expected[name].dtype
        np.testing.assert_allclose(array, expected[name], rtol=1e-13, atol=1e-13, err_msg=name)


@pytest.mark.parametrize("name", [name for name in OPTIONS if name not in OTHER])
def test_each_option_gives_the_numbers_of_numpy(name: str, backend: RayBackend) -> None:
    spec = plain(*SIZES)._replace(**OPTIONS[name])
    try:
        make_plan(spec)
    except InvalidRequest:
        pytest.skip(f"{name} needs another option beside it")
    check_same(backend, spec)
    if not spec.has_gradients:
        shape = run(NumpyBackend(), spec).output.shape
        cotangent = np.random.default_rng(0).normal(size=shape)
        check_same(backend, spec._replace(grad_output=cotangent, gradients="all", include=(), top_k=None))


def large(queries: int, keys: int) -> AttentionSpec:
    query, key, value = (
        np.random.default_rng(n).normal(size=(1, length, 64)).astype(np.float32)
        for n, length in enumerate((queries, keys, keys))
    )
    return AttentionSpec(query, key, value, layout="hld", is_causal=True, include=())


def test_an_overflow_on_a_worker_is_that_of_the_request(backend: RayBackend) -> None:
    numbers = np.full((1, 4), 3e38, np.float32)
    with pytest.raises(Overflow, match="scores"):
        run(backend, AttentionSpec(numbers, numbers, numbers, include=()))


def workers() -> list[psutil.Process]:
    """The processes that compute tiles."""
    return [
        one for one in psutil.process_iter(["name", "cmdline"]) if (one.info["cmdline"] or [])[:1] == ["ray::_compute"]
    ]


def test_a_killed_worker_is_replaced(backend: RayBackend) -> None:
    spec, killed = large(2**14, 2**14), threading.Event()

    def kill() -> None:
        if not killed.is_set() and (found := workers()):
            found[0].kill()
            killed.set()

    found = run(backend, spec, kill)
    assert killed.is_set()
    np.testing.assert_array_equal(found.output, run(RayBackend(), spec).output)


def test_a_cluster_that_loses_all_workers_is_busy(backend: RayBackend) -> None:
    def kill() -> None:
        for worker in workers():
            worker.kill()

    with pytest.raises(Busy, match="workers of Ray"):
        run(backend, large(2**14, 2**14), kill)


def test_the_end_of_a_request_ends_its_tasks(backend: RayBackend) -> None:
    def end() -> None:
        if workers():
            raise TimeoutError

    with pytest.raises(TimeoutError):
        run(backend, large(2**14, 2**14), end)
    until(lambda: not workers())


def test_golden_cases_over_http(cluster: Cluster, backend: RayBackend) -> None:
    assert backend
    with serving(app(backend="ray", ray_address=cluster.address)) as client:
        for case in CASES:
            answer = client.post("/attention", json=case.request).json()
            assert answer["metadata"]["backend"] == "ray", answer
            for expected in case.expected:
                expected.compare(answer)


@contextmanager
def connecting() -> Iterator[None]:
    """As if another request still connected."""
    kept, cluster_of_process._attempt = cluster_of_process._attempt, Future()
    try:
        yield
    finally:
        cluster_of_process._attempt.set_result(None)
        cluster_of_process._attempt = kept


def test_a_service_answers_while_a_request_waits_for_the_cluster(cluster: Cluster, backend: RayBackend) -> None:
    assert backend
    with serving(app(ray_address=cluster.address)) as client, ThreadPoolExecutor(1) as pool:
        with connecting():
            waiting = pool.submit(client.post, "/attention", json={"input": [[1.0]], "backend": "ray"})
            until(lambda: "attention_slots_in_use 1.0\n" in client.get("/metrics").text)
            assert client.get("/health/live").status_code == 200
            assert not waiting.done()
        assert waiting.result().json()["metadata"]["backend"] == "ray"


def test_a_connection_that_takes_long_is_busy(backend: RayBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attention_service.backends.ray.cluster.WAIT", 0.01)
    with connecting(), pytest.raises(Busy, match="that takes long"):
        run(backend, large(8, 8))


def test_estimates_follow_the_nodes_of_the_cluster(cluster: Cluster, backend: RayBackend) -> None:
    assert backend
    operation = Engine(Settings.model_construct(ray_address=cluster.address)).attention
    request = Decoded({"input": np.ones((64, 8)), "backend": "ray"}, frozenset())

    def estimate() -> int:
        return operation.cost(operation.prepare(request), CODECS["application/json"]).compute

    before = estimate()
    node = cluster.add_node(**NODE)
    until(lambda: ray.cluster_resources().get("CPU") == 3)
    more = estimate()
    cluster.remove_node(node)
    until(lambda: ray.cluster_resources().get("CPU") == 2)
    assert before < more
    assert estimate() == before


ALONE = """
import os
from attention_service.attention.planning import make_plan
from attention_service.backends.ray.cluster import connect
print(connect("").all, flush=True)
input()
"""


IDLE = """
import threading
from attention_service.backends.ray.cluster import connect
from attention_service.backends.ray.tasks import mapped
thread = threading.Thread(target=connect, args=("", 1))
thread.start()
thread.join()
print(sum(mapped(abs, range(-1000, 0), "", 1)))
"""


def test_a_cluster_outlives_the_thread_that_asked_for_it() -> None:
    """Threads of a service end when they have nothing to do for some seconds."""
    done = subprocess.run([sys.executable, "-c", IDLE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "500500\n"), done.stderr


def test_a_service_that_stops_leaves_no_process_of_ray() -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", ALONE], **pipes) as service:  # type: ignore[call-overload]
        assert int(service.stdout.readline()) >= 1
        children = psutil.Process(service.pid).children(recursive=True)
        assert len(children) > 2
        service.kill()
    until(lambda: not [one for one in children if one.is_running() and one.status() != psutil.STATUS_ZOMBIE])
