"""What an operator sees of a service that runs as `attention-service serve`: its first lines and those of requests."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from attention_service.runtime.machine import cpu_count, memory_limit, memory_total
from attention_service.settings.keys import new_key
from attention_service.version import __version__
from benchmarks.serving import free_port
from tests.helpers.waiting import TIMEOUT, until

TRACE = "0af7651916cd43dd8448eb211c80319c"
GOOD: dict[str, Any] = {"query": [[1.0, 2.0]], "key": [[1.0, 2.0]], "value": [[2.0]]}


@contextmanager
def serving(folder: Path, **settings: object) -> Iterator[tuple[httpx.Client, Path]]:
    """A client of the service as a process with these settings, and the file with its log."""
    port, log = free_port(), folder / "log"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ATTENTION_")}
    environment |= {name.upper(): str(value) for name, value in ({"attention_threads": 1} | settings).items()}
    command = [sys.executable, "-m", "attention_service", "serve", "--port", str(port)]
    with (
        log.open("wb") as file,
        subprocess.Popen(command, env=environment, stderr=file) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT) as client,
    ):
        try:
            until(lambda: is_ready(client) or process.poll() is not None)
            yield client, log
        finally:
            process.terminate()
            process.wait(TIMEOUT)


def is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/health/ready").status_code == 200
    except httpx.TransportError:
        return False


def events(log: Path, message: str) -> list[dict[str, Any]]:
    """The events with a message in a log of JSON."""
    found = (json.loads(line) for line in log.read_text(encoding="utf-8").splitlines())
    return [event for event in found if event["message"] == message]


@pytest.mark.slow
def test_the_line_of_a_request_has_every_field(tmp_path: Path) -> None:
    key, hashed = new_key()
    (tmp_path / "keys").write_text(f"# people\n{hashed} Ada Lovelace  # of the laboratory\n")
    settings = {"attention_log_format": "json", "attention_api_keys_file": tmp_path / "keys"}
    with serving(tmp_path, **settings) as (client, log):
        headers = {
            "Authorization": f"Bearer {key}",
            "X-Request-ID": "find-me",
            "X-Forwarded-For": "192.0.2.7",  # the proxy is this machine, which FORWARDED_ALLOW_IPS has by default
            "traceparent": f"00-{TRACE}-b7ad6b7169203331-01",
        }
        sent = client.post("/attention", json=GOOD, headers=headers)
        until(lambda: events(log, "request"))
        client.post("/attention", json=GOOD)
        until(lambda: len(events(log, "request")) == 2)
        first, second = events(log, "request")
    expected = {
        "request_id": "find-me", "trace_id": TRACE, "client": "192.0.2.7", "key": "Ada Lovelace", "method": "POST",
        "path": "/attention", "status": 200, "received": int(sent.request.headers["content-length"]),
        "sent": int(sent.headers["content-length"]), "kernel": "numpy/small",
    }  # fmt: skip
    about_all = {"time", "level", "logger", "message", "milliseconds"}
    assert {name: value for name, value in first.items() if name not in about_all} == expected
    assert first["milliseconds"] > 0
    assert (second["client"], second["code"], second["status"]) == ("127.0.0.1", "unauthorized", 401)
    assert "key" not in second
    assert "trace_id" not in second
    assert key not in log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_one_line_at_the_start_says_what_runs(workers: int, tmp_path: Path) -> None:
    settings = {"attention_memory_limit": "100MiB", "attention_workers": workers, "attention_log_format": "json"}
    with serving(tmp_path, **settings, attention_api_keys=new_key()[1]) as (_, log):
        (event,) = events(log, "starting")
    expected = {"version": __version__, "backend": "numpy", "workers": workers, "threads": 1, "keys": "on"}
    assert {name: event[name] for name in expected} == expected
    assert event["memory_limit"] == 100 * 2**20


@pytest.mark.slow
def test_the_human_log_begins_alike_and_warns_of_memory_that_is_not_there(tmp_path: Path) -> None:
    total = memory_limit() or memory_total()
    assert total is not None
    with serving(tmp_path, attention_memory_limit=total + 2**20, attention_threads=0) as (client, log):
        client.get('/a" status=200 key="root')
        until(lambda: "status=404" in log.read_text())
        start, *others = log.read_text().splitlines()
    assert re.fullmatch(
        rf"\d\d:\d\d:\d\d INFO +starting version={re.escape(__version__)} backend=numpy workers=1 "
        rf"threads={cpu_count()} memory_limit={total + 2**20} keys=off",
        start,
    )
    assert sum("WARNING ATTENTION_MEMORY_LIMIT" in line and "above the memory" in line for line in others) == 1
    (line,) = (line for line in others if "status=404" in line)
    fields = [part.partition("=") for part in shlex.split(line)]
    found = {name: value for name, _, value in fields if value}
    assert (found["path"], found["status"]) == ('/a" status=200 key="root', "404")
    assert "key" not in found


# Runs the command with modules in whose import the signal comes, and what becomes of SystemExit there: pydantic raises
# another error in its place, or none.
STOPPED = """
import os, signal, sys
from attention_service import cli
import attention_service.server.run as run

def stopped(*_):
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    except SystemExit:
        {handled}
    return None

run.{name} = stopped
sys.argv = ["attention-service", "serve", "--port", "0"]
sys.exit(cli.main())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "handled"), [("log_start", "pass"), ("log_start", "raise ValueError('in its place')"), ("tune", "pass")]
)
def test_a_signal_while_it_starts_ends_it_even_if_its_exception_is_lost(name: str, handled: str) -> None:
    program = STOPPED.format(name=name, handled=handled)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("ATTENTION_")}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "running on" not in done.stderr.lower()
