"""The estimate of memory counts the object store and the workers on this machine."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import ray
from ray.cluster_utils import Cluster
from ray.experimental import get_object_locations

from attention_service.attention import cost
from attention_service.attention.planning import make_plan
from attention_service.backends.dense.compute import TileWork
from attention_service.backends.ray.backend import RayBackend, RayLibrary
from attention_service.backends.ray.memory import shared_bytes
from attention_service.backends.ray.work import SharedWork
from attention_service.errors import InvalidRequest
from tests.conftest import app, serving
from tests.helpers.options import plain, unusual
from tests.helpers.wire import SAFETENSORS, write
from tests.ray.peak import CASES, long
from tests.ray.test_backend import OTHER

SIZES = (2, 2, 64, 96)
OPTIONS = unusual(*SIZES)
# What Ray itself writes of a pickle with the objects of a plan.
PICKLE = 2**15


@pytest.mark.parametrize("name", [case.__name__ for case in CASES])
def test_all_processes_take_no_more_than_the_estimate(name: str) -> None:
    command = [sys.executable, "-m", "tests.ray.peak", name]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["peak"] <= found["estimate"] <= 5 * found["peak"]


def test_an_estimate_by_hand() -> None:
    """Two workers, 16,384 tokens of 64 features in float32, causal: each array has 4 MiB."""
    plan, array = make_plan(long(2**14)), 2**14 * 64 * 4
    added = RayBackend(2).peak_bytes(plan, "auto", 0) - cost.peak_bytes(plan, 0, 0)
    # The store: query, key and value, and the output and two numbers of each row, which workers hold twice, too.
    rows = 2 * 2**14 * 4
    arrays = 3 * array + 3 * (array + rows)
    # Each worker: the scores of 64 rows, at most as much of masks, and 35 times 128 KiB for tasks.
    tile = 64 * 2**14 * 4
    assert arrays + 2 * tile <= added <= arrays + 2 * 2 * tile + 35 * 2**17


def test_what_workers_read_takes_no_more_than_its_estimate(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each option, and of its gradients: the sizes of the objects in the store are Ray's own."""
    assert cluster
    sizes: list[int] = []

    def run(self: RayLibrary, function: TileWork, tiles: object) -> object:
        reference = ray.put(SharedWork.of(function, self.tiling))
        sizes.append(get_object_locations([reference])[reference]["object_size"])
        return list(map(function, tiles))  # type: ignore[call-overload]

    monkeypatch.setattr("attention_service.backends.ray.backend.SHARED_FLOPS", 0)
    monkeypatch.setattr(RayLibrary, "run", run)
    backend, checked = RayBackend(address=cluster.address), 0
    for name in (name for name in OPTIONS if name not in OTHER):
        spec = plain(*SIZES)._replace(**OPTIONS[name])
        try:
            specs = [spec]
            shape = backend.run(make_plan(spec), spec, spec.sources).output.shape
            specs += [spec._replace(grad_output=np.ones(shape), gradients="all", include=(), top_k=None)]
        except InvalidRequest:  # it needs another option beside it
            continue
        for each in specs:
            sizes.clear()
            plan = make_plan(each)
            backend.run(plan, each, each.sources)
            checked += 1
            assert sum(sizes) <= shared_bytes(plan) + len(sizes) * PICKLE, name
    assert checked > 80


def test_a_request_that_does_not_fit_with_the_store_is_refused() -> None:
    """Query, key and value have 12 MiB, the output 4; the store and the workers take as much again, and more."""
    spec = long(2**14)
    fields = {**spec.sources, "layout": "hld", "is_causal": True, "include": []}
    body = write(fields, SAFETENSORS)
    estimate = RayBackend(2).peak_bytes(make_plan(spec), "auto", 0)
    limit = len(body) + estimate - 2**22
    with serving(app(backend="ray", memory_limit=limit, max_body_bytes=2**24, threads=2)) as client:
        for backend, status in (("ray", 413), ("numpy", 200)):
            head = {"Content-Type": SAFETENSORS}
            body = write(fields | {"backend": backend}, SAFETENSORS)
            response = client.post("/attention", content=body, headers=head)
            assert response.status_code == status, response.text
            if status == 413:
                assert response.json()["code"] == "memory_limit"
