"""A cluster of Ray on this machine: two nodes of one processor each, beside a head without any."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from attention_service.backends.ray.backend import RayBackend
from tests.helpers.waiting import until

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of pydantic, for what Ray Serve does when it is imported
    from ray import serve

__all__ = ["serve"]
ROOT = Path(__file__).parents[2]
NODE = {"num_cpus": 1, "object_store_memory": 2**28}


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    found = Cluster(initialize_head=True, head_node_args=NODE | {"num_cpus": 0})
    for _ in range(2):
        found.add_node(**NODE)
    ray.init(found.address, log_to_driver=False, runtime_env={"py_executable": sys.executable})
    until(lambda: ray.cluster_resources().get("CPU") == 2)
    yield found
    ray.shutdown()
    found.shutdown()


@pytest.fixture
def backend(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> RayBackend:
    """The backend, which sends the smallest requests, too."""
    monkeypatch.setattr("attention_service.backends.ray.backend.SHARED_FLOPS", 0)
    return RayBackend(address=cluster.address)
