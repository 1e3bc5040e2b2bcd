"""The service as a deployment of Ray Serve answers as it does alone."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import httpx
import numpy as np
import pytest
from ray import serve
from ray.cluster_utils import Cluster

from benchmarks.serving import free_port
from deploy.ray.attention_on_ray import AttentionService
from tests import test_bad_requests
from tests.cases import CASES, Case
from tests.conftest import CLIENT_TIMEOUT
from tests.helpers.waiting import until
from tests.helpers.wire import NPZ, write

# What asks more often than every ten seconds for the load is to become a variable.
pytestmark = pytest.mark.filterwarnings("ignore:.*metrics_interval_s")
# Of a body, in bytes.
LARGEST = 2**20
# Replicas are added after a second of load, and removed after two seconds without.
QUICK: dict[str, float] = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 2, "look_back_period_s": 1}
QUICK |= {"upscale_delay_s": 1, "downscale_delay_s": 2, "metrics_interval_s": 0.5}


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[httpx.Client]:
    """A client of Ray Serve, which has the application."""
    assert cluster
    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    environment = {"ATTENTION_MAX_BODY_BYTES": str(LARGEST)}
    options = {"num_cpus": 1, "runtime_env": {"env_vars": environment}}
    deployment = AttentionService.options(  # type: ignore[attr-defined]  # a Deployment
        ray_actor_options=options, autoscaling_config=QUICK, graceful_shutdown_timeout_s=5
    )
    serve.run(deployment.bind())
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=CLIENT_TIMEOUT) as found:
        yield found
    serve.shutdown()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_golden_cases(case: Case, client: httpx.Client) -> None:
    response = client.post("/attention", json=case.request)
    assert response.status_code == 200, response.text
    for expected in case.expected:
        expected.compare(response.json())


@pytest.mark.parametrize("bad", test_bad_requests.BAD, ids=lambda bad: bad.name)
def test_a_bad_request_gets_its_problem(bad: test_bad_requests.Bad, client: httpx.Client) -> None:
    test_bad_requests.check_problem(bad, client)


def check_problem(response: httpx.Response, status: int, code: str) -> None:
    assert (response.status_code, response.headers["content-type"]) == (status, "application/problem+json")
    assert response.json()["code"] == code


def test_a_body_that_is_too_large_is_refused(client: httpx.Client) -> None:
    head = {"Content-Type": "application/json"}
    check_problem(client.post("/attention", content=b" " * (LARGEST + 1), headers=head), 413, "body_too_large")


@pytest.mark.parametrize("path", ["/health/ready", "/openapi.json", "/docs"])
def test_other_pages_are_there(path: str, client: httpx.Client) -> None:
    assert client.get(path).status_code == 200


def test_the_page_is_there_with_what_it_loads(client: httpx.Client) -> None:
    page = client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert 'src="page/app.js"' in page.text
    loaded = client.get("/page/app.js")
    assert (loaded.status_code, loaded.headers["content-type"].partition(";")[0]) == (200, "text/javascript")


def test_metrics_count_requests(client: httpx.Client) -> None:
    def count() -> float:
        lines = client.get("/metrics").text.splitlines()
        prefix = "attention_requests_total{"
        return sum(float(line.split()[-1]) for line in lines if line.startswith(prefix) and "/attention" in line)

    before = count()
    assert client.post("/attention", json={"input": [[1]]}).status_code == 200
    assert count() == before + 1


def test_replicas_come_with_load_and_go_after_it(client: httpx.Client) -> None:
    """Eight requests at a time are four times what a replica should have; all of them are answered."""
    rows = np.random.default_rng(0).normal(size=(1024, 64)).astype(np.float32)
    body, head = write({"input": rows, "include": []}, NPZ), {"Content-Type": NPZ, "Accept": NPZ}
    ended = Event()

    def running() -> int:
        (application,) = serve.status().applications.values()
        (deployment,) = application.deployments.values()
        return int(deployment.replica_states.get("RUNNING", 0))

    def ask() -> list[int]:
        statuses = []
        while not ended.is_set():
            statuses.append(client.post("/attention", content=body, headers=head).status_code)
        return statuses

    until(lambda: running() == 1)
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask) for _ in range(8)]
        try:
            until(lambda: running() == 2)
        finally:
            ended.set()
        statuses = [status for one in asked for status in one.result()]
    assert set(statuses) == {200}
    until(lambda: running() == 1)
    assert client.post("/attention", content=body, headers=head).status_code == 200
