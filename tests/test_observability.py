"""Metrics and logs of the service, and the alerts and the dashboard that use them."""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from attention_service.errors import error_classes
from attention_service.observability.logs import FIELDS, HumanFormatter, JsonFormatter
from attention_service.observability.metrics import remove_stale_files
from benchmarks.serving import free_port
from tests.conftest import app, serving
from tests.helpers.documents import ROOT, anchors
from tests.helpers.rpc import remote
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
    counts = [
        value
        for name, value in found.items()
        if re.match("attention_request_seconds_bucket.* operation=/attention$", name)
    ]
    assert counts == sorted(counts)
    assert len(counts) == 17
    assert counts[-1] == found["attention_request_seconds_count operation=/attention"] == 1


def test_the_setting_metrics_false_removes_the_metrics() -> None:
    with serving(app(metrics=False)) as client:
        assert client.get("/metrics").status_code == 404
        assert client.post("/attention", json=GOOD).status_code == 200


def test_the_counter_of_every_problem_starts_at_0(fresh_client: httpx.Client) -> None:
    """increase() of Prometheus ignores the first sample of a series."""
    found = {name: value for name, value in samples(fresh_client).items() if name.startswith("attention_problems")}
    assert found == {f"attention_problems_total code={code}": 0 for code in error_classes()}


def test_the_metrics_of_alerts_and_dashboard_start_at_0() -> None:
    """With each value of a label that a query names, over HTTP and gRPC: increase() ignores the first sample."""
    with serving(app(grpc_port=0)) as client:
        found = text_string_to_metric_families(client.get("/metrics").text)
        fresh = [(sample.name, sample.labels, sample.value) for family in found for sample in family.samples]
    paths = ("deploy/prometheus/rules/attention.yml", "deploy/grafana/dashboards/attention.json")
    text = "".join(Path(path).read_text(encoding="utf-8").replace('\\"', '"') for path in paths)
    selected = set(re.findall(r"\b(attention_\w+)\{([^}]*)\}", text))
    assert len(selected) >= 4
    for name, matchers in selected:
        wanted = dict(re.findall(r'(\w+)="([^"]*)"', matchers))
        values = {value for series, labels, value in fresh if series == name and wanted.items() <= labels.items()}
        assert values == {0}, (name, wanted)
    refused = [labels for name, labels, _ in fresh if name == "attention_requests_total" and labels["status"] == "503"]
    assert {(labels["protocol"], labels["operation"]) for labels in refused} == {
        ("http", "/attention"),
        ("http", "/attention/call"),
        ("http", "/attention/call/compare"),
        ("http", "/attention/compare"),
        ("http", "/attention/heatmap"),
        ("http", "/attention/merge"),
        ("http", "/v2/models/{model_name}/infer"),
        ("http", "/v2/models/{model_name}/versions/{model_version}/infer"),
        ("grpc", "/inference.GRPCInferenceService/ModelInfer"),
    }


@pytest.mark.slow
def test_workers_share_their_metrics(tmp_path: Path) -> None:
    """Each request and scrape has a new connection, so that any worker may serve it."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"

    def scrape() -> dict[str, float]:
        try:
            with httpx.Client(base_url=url, timeout=TIMEOUT) as client:
                return samples(client)
        except httpx.TransportError:
            return {}

    def workers() -> set[int]:
        return {int(file.stem.rpartition("_")[2]) for file in tmp_path.glob("attention-*/gauge_livesum_*.db")}

    answered = "attention_requests_total operation=/attention protocol=http status=200"
    command = [
        sys.executable,
        "-m",
        "attention_service",
        "serve",
        "--port",
        str(port),
        "--workers",
        "2",
        "--threads",
        "1",
    ]
    environment = {"ATTENTION_LOG_LEVEL": "error", "TMPDIR": str(tmp_path)}
    before, process = time.time(), subprocess.Popen(command, env=os.environ | environment)
    try:
        until(lambda: scrape().get("attention_workers") == 2)
        found = scrape()
        assert {found[f"attention_problems_total code={code}"] for code in error_classes()} == {0}
        assert found["attention_requests_total operation=/attention protocol=http status=503"] == 0
        for _ in range(20):
            assert httpx.post(f"{url}/attention", json=GOOD, timeout=TIMEOUT).status_code == 200
        until(lambda: scrape()[answered] == 20)
        found = scrape()
        assert found["attention_request_seconds_count operation=/attention"] == 20
        assert found["attention_slots"] == 2 * app().state.settings.concurrency
        assert [value for name, value in found.items() if name.startswith("attention_build_info")] == [1]
        started = found["process_start_time_seconds"]
        assert before < started < time.time()
        first = workers()
        for worker in first:
            os.kill(worker, signal.SIGKILL)
        until(lambda: scrape().get("attention_workers") == 2 and not first & workers())
        found = scrape()
        assert found[answered] == 20, "what ended workers counted stays"
        assert found["process_start_time_seconds"] > started, "as AttentionRestarts needs it"
    finally:
        process.terminate()
        assert process.wait(TIMEOUT) == 0


@pytest.mark.slow
def test_workers_that_start_slowly_are_not_replaced(tmp_path: Path) -> None:
    """As on a busy machine: each takes longer to start than the five seconds that uvicorn waits by default."""
    slow = "import sys, time\nif '--multiprocessing-fork' in sys.orig_argv: time.sleep(7)\n"
    (tmp_path / "sitecustomize.py").write_text(slow)
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "attention_service",
        "serve",
        "--port",
        str(port),
        "--workers",
        "2",
        "--threads",
        "1",
    ]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path[:1]])}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        log = [process.stderr.readline()]
        while "died" not in log[-1] and sum("startup complete" in line for line in log) < 2:
            log.append(process.stderr.readline())
        process.terminate()
        process.communicate(timeout=TIMEOUT)
    assert "died" not in log[-1]


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
    assert re.fullmatch(r"\d\d:\d\d:\d\d INFO +request request_id=find-me client=127\.0\.0\.1 method=POST "
                        r"path=/attention status=200 "
                        r"milliseconds=[\d.]+ received=\d+ sent=\d+ kernel=numpy/small", human)  # fmt: skip
    assert (event["status"], event["path"], event["level"]) == (200, "/attention", "info")
    for text in (human, str(event)):
        assert "31337" not in text
        assert "very-secret" not in text


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (f"00-{'1' * 32}-{'2' * 16}-00", "1" * 32),
        (f"cc-{'1' * 32}-{'2' * 16}-01-more", "1" * 32),
        (f"00-{'0' * 32}-{'2' * 16}-01", ""),
        (f"00-{'A' * 32}-{'2' * 16}-01", ""),
        (f"00-{'1' * 31}-{'2' * 16}-01", ""),
        ("", ""),
    ],
)
def test_without_tracing_the_trace_is_that_of_the_client(
    given: str, expected: str, fresh_client: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "attention.access")
    fresh_client.get("/problems/busy", headers={"traceparent": given})
    assert logged(caplog).__dict__["trace_id"] == expected


@pytest.mark.parametrize("forwarded", ["192.0.2.7", "192.0.2.7, 127.0.0.1", "2001:db8::7", "x y=z\x1b"])
def test_the_client_is_whom_a_trusted_proxy_names(
    forwarded: str, fresh_client: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "attention.access")
    fresh_client.get("/problems/busy", headers={"X-Forwarded-For": forwarded})
    assert logged(caplog).__dict__["client"] == forwarded.split(",")[0]
    assert HumanFormatter().format(logged(caplog)).isprintable()


def test_a_proxy_that_is_not_trusted_names_no_client(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "192.0.2.1")
    caplog.set_level(logging.INFO, "attention.access")
    with serving(app()) as client:
        client.get("/problems/busy", headers={"X-Forwarded-For": "192.0.2.7"})
        assert logged(caplog).__dict__["client"] == "127.0.0.1"


def test_a_log_record_is_a_single_line(fresh_client: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "attention")
    fresh_client.get("/a%0Ab%1B", headers={"X-Request-ID": "a\tb"})
    record = logged(caplog)
    assert HumanFormatter().format(record).isprintable()


FORGED = [
    "/a status=200",
    '/a" status=200',
    "/it's",
    "/a=b",
    '/\\" status=200',
    "/a\u00a0status=200",
    "/a\u2028b",
    "/a\tb",
    "/é",
]


@pytest.mark.parametrize("path", FORGED)
@pytest.mark.parametrize("name", ["path", "client", "key"])
def test_no_value_looks_like_another_field(path: str, name: str) -> None:
    """As a shell splits them: quotes keep a value together, and a backslash keeps a quote."""
    record = logging.makeLogRecord({"msg": "request", "levelname": "INFO", name: path, "status": 404})
    line = HumanFormatter().format(record)
    assert line.isprintable()
    assert line.isascii()
    fields = [part.split("=", 1) for part in shlex.split(line)[3:]]
    assert [field[0] for field in fields] in ([name, "status"], ["status", name])
    assert dict(fields)["status"] == "404"
    if path.isascii() and path.isprintable():
        assert path in line or dict(fields)[name].replace("\\\\", "\\") == path


def test_a_traceback_holds_no_line_that_looks_like_one_of_the_log() -> None:
    try:
        raise ValueError("no\n12:00:00 INFO    request status=200\x1b[31m\u2028")
    except ValueError:
        record = logging.makeLogRecord({"msg": "failed", "levelname": "ERROR", "exc_info": sys.exc_info()})
    first, *others = HumanFormatter().format(record).splitlines()
    assert first.endswith("failed")
    assert others[-1] == r"  12:00:00 INFO    request status=200\x1b[31m\u2028"
    assert all(line.startswith("  ") and line.isprintable() for line in others)


def test_a_message_of_a_library_is_a_single_line() -> None:
    record = logging.makeLogRecord({"msg": "quoted: %s", "args": ("\x1b[31m\r\nred\x9b\x85é",), "levelname": "WARNING"})
    line = HumanFormatter().format(record)
    assert line.endswith(r"quoted: \x1b[31m\r\nred\x9b\x85é")


# Health checks and scrapes, and all other operations, as HTTP paths.
PROBES = ("/health/live", "/health/ready", "/metrics", "/v2/health/live", "/v2/health/ready",
          "/v2/models/attention/ready", "/v2/models/attention/versions/1/ready")  # fmt: skip


def test_successful_probes_are_logged_at_debug(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "attention.access")
    with remote() as server:
        for path in PROBES:
            assert server.http.get(path).status_code == 200
        assert server.ask("ServerLive").live
        assert server.ask("ServerReady").ready
        assert server.named("ModelReady", "attention").ready
        server.http.get("/v2")
        until(lambda: len(caplog.records) == len(PROBES) + 4)
    levels = {record.__dict__["path"]: record.levelname for record in caplog.records}
    service = "/inference.GRPCInferenceService"
    calls = [f"{service}/{method}" for method in ("ServerLive", "ServerReady", "ModelReady")]
    assert levels == dict.fromkeys([*PROBES, *calls], "DEBUG") | {"/v2": "INFO"}


def test_failed_probes_are_logged_like_other_requests(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "attention.access")
    with remote() as server:
        server.app.state.engine.stopping = True
        for path in ("/health/ready", "/v2/health/ready", "/v2/models/attention/ready"):
            assert server.http.get(path).status_code == 503
        with pytest.raises(grpc.RpcError):
            server.named("ModelReady", "other")
        until(lambda: len(caplog.records) == 4)
    assert {(record.levelname, record.__dict__["status"]) for record in caplog.records} == {
        ("INFO", 503),
        ("INFO", 404),
    }


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
    assert len(own) >= 18
    assert [name for name in [*alerts, *own, *FIELDS] if f"`{name}`" not in text] == []


RULES = Path("deploy/prometheus/rules/attention.yml")
ALERTS: list[dict[str, Any]] = [
    rule for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"] for rule in group["rules"]
]


def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    """`make deploy-check` runs them with promtool."""
    fires: dict[str, set[bool]] = {}
    for path in Path("deploy/prometheus/tests").glob("*.yml"):
        for case in yaml.safe_load(path.read_text(encoding="utf-8"))["tests"]:
            found: dict[str, list[bool]] = {}
            for check in case["alert_rule_test"]:
                found.setdefault(check["alertname"], []).append(bool(check["exp_alerts"]))
            for name, expected in found.items():
                fires.setdefault(name, set()).add(any(expected))
    assert len(ALERTS) >= 6
    assert fires == {rule["alert"]: {True, False} for rule in ALERTS}


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: str(rule["alert"]))
def test_every_alert_leads_to_its_section_of_the_runbook(rule: dict[str, Any]) -> None:
    file, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    assert anchor == rule["alert"].lower()
    assert anchor in anchors(ROOT / file)
    section = (ROOT / file).read_text(encoding="utf-8").split(f"\n### {rule['alert']}\n")[1].split("\n#")[0]
    assert re.findall(r"^\*\*([A-Z][a-z ]+)", section, re.MULTILINE) == ["Meaning", "Look at", "Do"]
