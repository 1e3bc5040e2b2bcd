"""The profile `observability` of docker-compose.yml: every panel of the dashboard has data in Prometheus.

Grafana itself does not run here: its dashboard is read by this test, and its queries are sent to Prometheus.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import yaml

from benchmarks.serving import free_port
from tests.helpers.wire import NPZ, write
from tests.image.engine import BASE_IMAGE, ROOT, await_condition, await_response, compose, engine

PROJECT = "attention-observed"
PROMETHEUS = ROOT / "deploy" / "prometheus"
DASHBOARD = ROOT / "deploy" / "grafana" / "dashboards" / "attention.json"
# What Grafana fills in for a range of an hour and a scrape interval of 15 seconds.
VARIABLES = {"$__rate_interval": "1m"}
QUERIES = [
    (f"{panel['title']}: {target['expr']}", target["expr"])
    for panel in json.loads(DASHBOARD.read_text())["panels"]
    for target in panel.get("targets", [])
]


class Observed:
    """A service, and the Prometheus that scrapes it."""

    def __init__(self, service: httpx.Client, prometheus: httpx.Client) -> None:
        self._service = service
        self._prometheus = prometheus

    def prometheus(self, path: str, **parameters: str) -> Any:
        """The data of an answer of Prometheus; None while it starts."""
        try:
            answer = self._prometheus.get(f"/api/v1{path}", params=parameters)
        except httpx.TransportError:
            return None
        return answer.json()["data"] if answer.status_code == 200 else None

    def values(self, expression: str) -> list[float]:
        """The values of all series that a query finds now, except NaN."""
        found = self.prometheus("/query", query=expression)
        values = [float(series["value"][1]) for series in found["result"]] if found else []
        return [value for value in values if not math.isnan(value)]

    def send_50_requests(self) -> None:
        """Send ten requests of each kind: JSON, npz, the inference protocol, health, and those that are refused."""
        tokens = np.random.default_rng(0).normal(size=(64, 16)).astype(np.float32)
        tensor = {"name": "input", "datatype": "FP32", "shape": [2, 2], "data": [1, 0, 0, 1]}
        for number in range(10):
            answers = [
                self._service.post("/attention", json={"input": [[1, 0], [0, 1]]}),
                self._service.post("/attention", content=write({"input": tokens}, NPZ), headers={"Content-Type": NPZ}),
                self._service.post("/v2/models/attention/infer", json={"inputs": [tensor]}),
                self._service.get("/health/ready"),
                self._refused(large=number % 2 == 0),
            ]
            assert [answer.status_code for answer in answers] == [200, 200, 200, 200, 413 if number % 2 == 0 else 422]

    def _refused(self, *, large: bool) -> httpx.Response:
        if large:  # 30,000 tokens have weights of 7 GB
            return self._service.post("/attention", json={"input": [[1]] * 30_000})
        return self._service.post("/attention", json={"query": [[1]]})


@pytest.fixture(scope="module")
def image() -> Iterator[dict[str, str]]:
    """The variable that names an image with Prometheus, where no registry has one: Debian's, in the base image."""
    if not BASE_IMAGE.startswith("localhost/"):
        yield {}
        return
    program = shutil.which("prometheus")
    assert program, "without a registry, this needs Debian's package prometheus"
    made = engine("create", BASE_IMAGE, "prometheus")
    try:
        engine("cp", program, f"{made}:/usr/local/bin/prometheus")
        engine("commit", "--quiet", made, "localhost/prometheus:test")
    finally:
        engine("rm", made)
    yield {"PROMETHEUS_IMAGE": "localhost/prometheus:test"}
    engine("rmi", "localhost/prometheus:test")


@pytest.fixture(scope="module")
def observed(image: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    override = quicker(tmp_path_factory.mktemp("compose"))
    ports = {"PORT": str(free_port()), "PROMETHEUS_PORT": str(free_port())}
    files = ("--file", "docker-compose.yml", "--file", str(override))
    run = partial(compose, PROJECT, *files, "--profile", "observability", **ports, **image)
    try:
        run("up", "--detach", "attention", "prometheus")
        service, prometheus = (f"http://127.0.0.1:{port}" for port in ports.values())
        await_response(service)
        with httpx.Client(base_url=service, timeout=60) as one, httpx.Client(base_url=prometheus, timeout=60) as other:
            yield Observed(one, other)
    finally:
        run("down", "--volumes")


def quicker(folder: Path) -> Path:
    """A compose file with which Prometheus scrapes and evaluates every second."""
    own = folder / "prometheus"
    shutil.copytree(PROMETHEUS, own)
    configuration = yaml.safe_load((own / "prometheus.yml").read_text())
    configuration["global"] |= {"scrape_interval": "1s", "evaluation_interval": "1s"}
    for job in configuration["scrape_configs"]:
        for discovery in job["dns_sd_configs"]:
            discovery["refresh_interval"] = "1s"
    (own / "prometheus.yml").write_text(yaml.safe_dump(configuration))
    override = folder / "quicker.yml"
    override.write_text(yaml.safe_dump({"services": {"prometheus": {"volumes": [f"{own}:/etc/prometheus:ro"]}}}))
    return override


def has_counted(observed: Observed, requests: float) -> bool:
    """True if a scrape has seen so many requests."""
    return sum(observed.values("attention_requests_total")) >= requests


@pytest.fixture(scope="module")
def busy(observed: Observed) -> Observed:
    """The same after 100 requests, and a scrape before, between and after them."""
    await_condition(lambda: observed.values('up{job="attention"}') == [1], "the first scrape")
    before = sum(observed.values("attention_requests_total"))
    for sent in (50, 100):
        observed.send_50_requests()
        await_condition(partial(has_counted, observed, before + sent), "a scrape")
    return observed


@pytest.mark.parametrize("query", [query for _, query in QUERIES], ids=[name for name, _ in QUERIES])
def test_every_query_of_the_dashboard_has_data(query: str, busy: Observed) -> None:
    for name, value in VARIABLES.items():
        query = query.replace(name, value)
    assert "$" not in query, "a variable of Grafana that VARIABLES lacks"
    assert busy.values(query)


def test_the_dashboard_has_a_query_for_each_panel() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len(panels) > 5
    assert all(panel.get("targets") for panel in panels if panel["type"] != "row")


def test_prometheus_loads_the_alerts(busy: Observed) -> None:
    """All rules of the files are evaluated without an error."""
    written = [
        rule
        for path in (PROMETHEUS / "rules").glob("*.yml")
        for group in yaml.safe_load(path.read_text())["groups"]
        for rule in group["rules"]
    ]
    await_condition(lambda: {rule["health"] for rule in rules(busy)} == {"ok"}, "the evaluation of all rules")
    assert len(rules(busy)) == len(written) > 0


def rules(observed: Observed) -> list[dict[str, Any]]:
    return [rule for group in observed.prometheus("/rules")["groups"] for rule in group["rules"]]
