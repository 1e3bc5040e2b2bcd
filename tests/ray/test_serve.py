"""The service as a deployment of Ray Serve answers as it does alone."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import httpx
import pytest
from ray.cluster_utils import Cluster

from tests.cases import CASES, Case
from tests.conftest import CLIENT_TIMEOUT, free_port


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[httpx.Client]:
    assert cluster
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of pydantic, for what Ray Serve does
        from ray import serve

        from deploy.ray.attention_on_ray import app

    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(app)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=CLIENT_TIMEOUT) as found:
        yield found
    serve.shutdown()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_golden_cases(case: Case, client: httpx.Client) -> None:
    response = client.post("/attention", json=case.request)
    assert response.status_code == 200, response.text
    for expected in case.expected:
        expected.compare(response.json())


def test_a_bad_request_is_named(client: httpx.Client) -> None:
    response = client.post("/attention", json={"query": [[1, 0]], "key": [[1]], "value": [[1]]})
    assert response.status_code == 422
    assert response.json()["errors"][0]["pointer"] == "/key"


@pytest.mark.parametrize("path", ["/", "/metrics", "/health/ready", "/openapi.json", "/docs"])
def test_pages_are_there(path: str, client: httpx.Client) -> None:
    assert client.get(path).status_code == 200
