"""Metrics, logs and traces of the service."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from service.errors import error_classes
from service.observability.logs import FIELDS, HumanFormatter, JsonFormatter
from service.observability.metrics import remove_stale_files
from tests.conftest import app, free_port, serving
from tests.helpers.waiting import TIMEOUT, until

GOOD: dict[str, Any] = {"query": [[1.0, 2.0]], "key": [[1.0, 2.0]], "value": [[2.0]]}


def samples(client: httpx.Client) -> dict[str, float]:
    """Every sample of /metrics by its name and labels, read by Prometheus' own parser."""
    response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        sample.name + "".join(f" {name}={value}" for name, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


@pytest.fixture
def fresh_client() -> Iterator[httpx.Client]:
    with serving(app()) as client:
        yield client


def test_requests_are_counted(fresh_client: httpx.Client) -> None:
    for _ in range(3):
        assert fresh_client.post("/attention", json=GOOD).status_code == 200
    fresh_client.post("/attention", json=GOOD | {"scale": "x"})
    fresh_client.get("/health/live")
    fresh_client.get("/etc/passwd")
    found = samples(fresh_client)
    assert found["attention_requests_total operation=/attention protocol=http status=200"] == 3
    assert found["attention_requests_total operation=/attention protocol=http status=422"] == 1
    assert found["attention_requests_total operation=/health/live protocol=http status=200"] == 1
    assert found["attention_requests_total operation=other protocol=http status=404"] == 1
    assert found["attention_problems_total code=invalid_value"] == 1
    assert found["attention_request_seconds_count operation=/attention"] == 4
    assert found["attention_computed_total backend=numpy kernel=small"] == 3
    size = len(json.dumps(GOOD, separators=(",", ":")))
    assert found["attention_received_bytes_total media_type=application/json"] == 3 * size
    assert found["attention_sent_bytes_total media_type=application/json"] > 3 * 100
    assert found["attention_requests_in_flight"] == 1, "this one"
    assert found["attention_memory_bytes"] == 0
    assert found["process_open_fds"] > 0
    assert not any("passwd" in name for name in found)


def test_histogram_buckets_are_cumulative(fresh_client: httpx.Client) -> None:
    fresh_client.post("/attention", json=GOOD)
    found = samples(fresh_client)
    counts = [value for name, value in found.items() if name.startswith("attention_request_seconds_bucket")]
    assert counts == sorted(counts)
    assert counts[-1] == found["attention_request_seconds_count operation=/attention"] == 1


def test_the_setting_metrics_false_removes_the_metrics() -> None:
    with serving(app(metrics=False)) as client:
        assert client.get("/metrics").status_code == 404
        assert client.post("/attention", json=GOOD).status_code == 200


def test_the_counter_of_every_problem_starts_at_0(fresh_client: httpx.Client) -> None:
    """increase() of Prometheus ignores the first sample of a series."""
    found = {name: value for name, value in samples(fresh_client).items() if name.startswith("attention_problems")}
    assert found == {f"attention_problems_total code={code}": 0 for code in error_classes()}


@pytest.mark.slow
def test_workers_share_their_metrics(tmp_path: Path) -> None:
    """Each request and scrape has a new connection, so that any worker may serve it."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"

    def scrape() -> dict[str, float]:
        try:
            with httpx.Client(base_url=url, timeout=30) as client:
                return samples(client)
        except httpx.TransportError:
            return {}

    def workers() -> set[int]:
        return {int(file.stem.rpartition("_")[2]) for file in tmp_path.glob("attention-*/gauge_livesum_*.db")}

    answered = "attention_requests_total operation=/attention protocol=http status=200"
    command = [sys.executable, "-m", "service", "serve", "--port", str(port), "--workers", "2", "--threads", "1"]
    environment = {"ATTENTION_LOG_LEVEL": "error", "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(command, env=os.environ | environment)
    try:
        until(lambda: scrape().get("attention_workers") == 2)
        for _ in range(20):
            assert httpx.post(f"{url}/attention", json=GOOD).status_code == 200
        until(lambda: scrape()[answered] == 20)
        found = scrape()
        assert found["attention_request_seconds_count operation=/attention"] == 20
        assert found["attention_slots"] == 2 * app().state.settings.concurrency
        assert [value for name, value in found.items() if name.startswith("attention_build_info")] == [1]
        first = workers()
        for worker in first:
            os.kill(worker, signal.SIGKILL)
        until(lambda: scrape().get("attention_workers") == 2 and not first & workers())
        assert scrape()[answered] == 20, "what ended workers counted stays"
    finally:
        process.terminate()
        assert process.wait(TIMEOUT) == 0


def test_files_of_an_earlier_run_are_removed(tmp_path: Path) -> None:
    for name in ("counter_7.db", "gauge_livesum_7.db", "gauge_livemax_12.db", "histogram_7.db", "counter_notes.db"):
        (tmp_path / name).touch()
    remove_stale_files(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["counter_notes.db"]


def logged(caplog: pytest.LogCaptureFixture) -> logging.LogRecord:
    """The log record of the only request, which is written after the response starts."""

    def found() -> list[logging.LogRecord]:
        return [record for record in caplog.records if record.name == "attention.access"]

    until(found)
    return found()[0]


def test_the_log_has_no_numbers_of_tensors_and_no_keys(
    fresh_client: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "attention")
    headers = {"X-Request-ID": "find-me", "Authorization": "Bearer very-secret"}
    fresh_client.post("/attention", json=GOOD | {"value": [[31337.25]]}, headers=headers)
    record = logged(caplog)
    human, event = HumanFormatter().format(record), json.loads(JsonFormatter().format(record))
    assert re.fullmatch(r"\d\d:\d\d:\d\d INFO +request request_id=find-me method=POST path=/attention status=200 "
                        r"milliseconds=[\d.]+ received=\d+ sent=\d+ kernel=numpy/small", human)  # fmt: skip
    assert (event["status"], event["path"], event["level"]) == (200, "/attention", "info")
    for text in (human, str(event)):
        assert "31337" not in text
        assert "very-secret" not in text


def test_a_log_record_is_a_single_line(fresh_client: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "attention")
    fresh_client.get("/a%0Ab%1B", headers={"X-Request-ID": "a\tb"})
    record = logged(caplog)
    assert HumanFormatter().format(record).isprintable()


def test_traces_continue_the_trace_of_the_client() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with serving(app(tracing=True)) as client:
        assert client.post("/attention", json=GOOD, headers={"traceparent": parent}).status_code == 200
    (span,) = exporter.get_finished_spans()
    assert span.context is not None
    assert f"{span.context.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == "b7ad6b7169203331"


def names_in(text: str) -> set[str]:
    return set(re.findall(r"\battention_[a-z_]+\b", text))


@pytest.mark.parametrize("path", ["deploy/prometheus/rules/attention.yml", "deploy/grafana/dashboards/attention.json"])
def test_alerts_and_dashboard_use_existing_metrics(path: str, fresh_client: httpx.Client) -> None:
    fresh_client.post("/attention", json=GOOD)
    offered = {name.split()[0] for name in samples(fresh_client)}
    asked = names_in(Path(path).read_text(encoding="utf-8"))
    assert len(asked) >= 5
    assert asked - offered == set()


def test_every_alert_and_metric_is_documented(fresh_client: httpx.Client) -> None:
    text = Path("docs/operations.md").read_text(encoding="utf-8")
    alerts = re.findall(r"alert: (\w+)", Path("deploy/prometheus/rules/attention.yml").read_text(encoding="utf-8"))
    assert len(alerts) >= 6
    found = text_string_to_metric_families(fresh_client.get("/metrics").text)
    metrics = [f"{family.name}_total" if family.type == "counter" else family.name for family in found]
    own = [name for name in metrics if name.startswith("attention_")]
    assert len(own) >= 20
    assert [name for name in [*alerts, *own, *FIELDS] if f"`{name}`" not in text] == []
