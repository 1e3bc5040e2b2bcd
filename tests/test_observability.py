"""What the service tells of itself: metrics, logs, traces."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from service.observability.logs import FIELDS, HumanFormatter, JsonFormatter
from service.observability.metrics import METRICS, Shared, Tally, total
from tests.conftest import app, free_port, serving
from tests.helpers.waiting import PATIENCE, until

GOOD: dict[str, Any] = {"query": [[1.0, 2.0]], "key": [[1.0, 2.0]], "value": [[2.0]]}


def samples(client: httpx.Client) -> dict[str, float]:
    """Every sample by its name and labels, as Prometheus' own parser reads them."""
    response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        sample.name + "".join(f" {name}={value}" for name, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


@pytest.fixture
def fresh() -> Iterator[httpx.Client]:
    with serving(app()) as client:
        yield client


def test_requests_are_counted(fresh: httpx.Client) -> None:
    for _ in range(3):
        assert fresh.post("/attention", json=GOOD).status_code == 200
    fresh.post("/attention", json=GOOD | {"scale": "x"})
    fresh.get("/health/live")
    fresh.get("/etc/passwd")
    found = samples(fresh)
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


def test_buckets_hold_what_is_below_them(fresh: httpx.Client) -> None:
    fresh.post("/attention", json=GOOD)
    found = samples(fresh)
    counts = [value for name, value in found.items() if name.startswith("attention_request_seconds_bucket")]
    assert counts == sorted(counts)
    assert counts[-1] == found["attention_request_seconds_count operation=/attention"] == 1


def test_without_metrics_there_are_none() -> None:
    with serving(app(metrics=False)) as client:
        assert client.get("/metrics").status_code == 404
        assert client.post("/attention", json=GOOD).status_code == 200


def test_counts_of_workers_add_up(tmp_path: Path) -> None:
    """Counters of ended workers stay, their gauges do not."""
    tallies = [Tally(), Tally(), Tally()]
    for number, tally in enumerate(tallies, 1):
        for _ in range(number):
            tally.answered("/attention", 503, 0.3 * number, "busy")
        shared = Shared(tmp_path)
        shared._own = tmp_path / f"{number}.json"
        shared.write(tally.cells | {("attention_workers", ()): 1})
    os.utime(tmp_path / "3.json", (0, 0))
    (tmp_path / "4.json").write_text("half a li")
    own = Shared(tmp_path)
    own._own = tmp_path / "1.json"
    found = total(iter([tallies[0].cells | {("attention_workers", ()): 1}, *own.others()]))
    assert found["attention_problems", ("busy",)] == 6
    assert found["attention_workers", ()] == 2
    assert found["attention_requests", ("http", "/attention", "503")] == 6
    assert found["attention_request_seconds", ("/attention",)][0] == pytest.approx(0.3 + 4 * 0.3 + 9 * 0.3)
    assert sum(found["attention_request_seconds", ("/attention",)][1:]) == 6


@pytest.mark.slow
def test_two_workers_tell_the_same(tmp_path: Path) -> None:
    """Each worker writes its counters for the others every now and then."""
    port = free_port()
    command = [sys.executable, "-m", "service", "serve", "--port", str(port), "--workers", "2", "--threads", "1"]
    process = subprocess.Popen(command, env=os.environ | {"ATTENTION_LOG_LEVEL": "error"})
    url = f"http://127.0.0.1:{port}"

    def sample(name: str) -> float:
        """By a connection of its own, and so by any worker."""
        with suppress(httpx.TransportError), httpx.Client(base_url=url) as client:
            return samples(client).get(name, 0)
        return 0

    try:
        until(lambda: sample("attention_workers") == 2)
        for _ in range(20):  # each on a connection of its own, so that both workers get some
            assert httpx.post(f"{url}/attention", json=GOOD).status_code == 200
        answered = "attention_requests_total operation=/attention protocol=http status=200"
        until(lambda: all(sample(answered) == 20 for _ in range(4)))
    finally:
        process.terminate()
        assert process.wait(PATIENCE) == 0


def logged(caplog: pytest.LogCaptureFixture) -> logging.LogRecord:
    """The line about the one request; it is written when the answer is on its way."""

    def found() -> list[logging.LogRecord]:
        return [record for record in caplog.records if record.name == "attention.access"]

    until(found)
    return found()[0]


def test_the_log_holds_no_numbers_and_no_keys(fresh: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "attention")
    headers = {"X-Request-ID": "find-me", "Authorization": "Bearer very-secret"}
    fresh.post("/attention", json=GOOD | {"value": [[31337.25]]}, headers=headers)
    record = logged(caplog)
    human, event = HumanFormatter().format(record), json.loads(JsonFormatter().format(record))
    assert re.fullmatch(r"\d\d:\d\d:\d\d INFO +request request_id=find-me method=POST path=/attention status=200 "
                        r"milliseconds=[\d.]+ received=\d+ sent=\d+ kernel=numpy/small", human)  # fmt: skip
    assert (event["status"], event["path"], event["level"]) == (200, "/attention", "info")
    for text in (human, str(event)):
        assert "31337" not in text
        assert "very-secret" not in text


def test_a_line_of_the_log_is_one_line(fresh: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "attention")
    fresh.get("/a%0Ab%1B", headers={"X-Request-ID": "a\tb"})
    record = logged(caplog)
    assert HumanFormatter().format(record).isprintable()


def test_traces_continue_those_of_the_caller() -> None:
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
def test_alerts_and_dashboard_ask_for_metrics_that_there_are(path: str, fresh: httpx.Client) -> None:
    fresh.post("/attention", json=GOOD)
    offered = {name.split()[0] for name in samples(fresh)} | {"attention_problems_total"}
    asked = names_in(Path(path).read_text(encoding="utf-8"))
    assert len(asked) >= 5
    assert asked - offered == set()


def test_every_alert_and_metric_is_explained() -> None:
    text = Path("docs/operations.md").read_text(encoding="utf-8")
    alerts = re.findall(r"alert: (\w+)", Path("deploy/prometheus/rules/attention.yml").read_text(encoding="utf-8"))
    assert len(alerts) >= 6
    assert [name for name in [*alerts, *METRICS, *FIELDS] if f"`{name}`" not in text] == []
