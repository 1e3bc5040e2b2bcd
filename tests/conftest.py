"""Fixtures and hooks of all tests. Tests send requests to a real server on a real port."""

from __future__ import annotations

import gc
import math
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from uvicorn.config import LOGGING_CONFIG

from attention_service.app import create_app
from attention_service.backends.dense.library import ArrayLibrary
from attention_service.server.drain import Drain
from attention_service.server.run import uvicorn_options
from attention_service.server.workers import Workers
from attention_service.settings import Settings
from tests.helpers.backends import HAS_TORCH
from tests.helpers.devices import missing_gpu
from tests.helpers.waiting import until

if find_spec("hypothesis"):  # the environment of `make test-clients` does not have it
    from hypothesis import HealthCheck
    from hypothesis import settings as examples

    # No time limit for an example, as a busy machine may be slow.
    sound: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
    examples.register_profile("sample", max_examples=50, **sound)
    examples.register_profile("deep", max_examples=2000, **sound)  # by `make test-deep`
    examples.load_profile("sample")

# Seconds. No test asserts how long an answer takes; a comparison on a busy machine may take more than half a minute.
CLIENT_TIMEOUT = 600.0
# A client leaves a connection that was idle for so many seconds before the server, which waits for five, closes it.
LIMITS = httpx.Limits(keepalive_expiry=2.0)

# Buffers for results hold NaN, so that an output that was not computed cannot pass.
ArrayLibrary.fill = math.nan


@contextmanager
def serving(app: FastAPI | Callable[..., Any], **options: Any) -> Iterator[httpx.Client]:
    """An HTTP client of a server that runs the application in a thread on a free port. options: of uvicorn"""
    settings = app.state.settings if isinstance(app, FastAPI) and hasattr(app.state, "settings") else Settings()
    ours = {**uvicorn_options(settings), "port": 0, "log_level": "warning", "log_config": LOGGING_CONFIG}
    whole = Drain(app, 0, Workers(None), grpc_port=None)
    config = uvicorn.Config(whole, **{**ours, **options})
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    until(lambda: server.started or not thread.is_alive())
    assert thread.is_alive(), "the server died while starting"
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        scheme = "https" if options.get("ssl_certfile") else "http"
        url = f"{scheme}://127.0.0.1:{port}"
        with httpx.Client(base_url=url, timeout=CLIENT_TIMEOUT, limits=LIMITS, verify=False) as client:
            yield client
    finally:
        server.should_exit = True
        thread.join()


def app(**settings: Any) -> FastAPI:
    """The application with these settings, and defaults for all others; it ignores environment variables."""
    return create_app(Settings.model_construct(**settings))


@contextmanager
def serving_freed() -> Iterator[httpx.Client]:
    """An HTTP client of a service that must hold no memory of a request at the end."""
    made = app()
    with serving(made) as client:
        yield client
        assert made.state.engine.admission.counted_requests == 0


@contextmanager
def uncaptured(request: pytest.FixtureRequest) -> Iterator[None]:
    """Inside, output is printed even if pytest captures output."""
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        yield


def unavailable() -> dict[str, str]:
    """Reasons by mark for the tests that cannot run here. They are not collected; a header lists them."""
    torch = "" if HAS_TORCH else "torch is not installed; run make test-torch"
    return {mark: reason for mark, reason in (("torch", torch), ("gpu", missing_gpu())) if reason}


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Look for garbage as rarely as a service, and never among the modules and tests, which took half of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(10_000, 10, 10)
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem() -> Generator[None, Any, Any]:
    """Leave out all tests with an unavailable mark."""
    made = yield
    if not isinstance(made, list):
        return made
    left_out = unavailable().keys()
    return [item for item in made if not any(mark.name in left_out for mark in item.iter_markers())]


def pytest_report_header() -> list[str]:
    return [f"not collected: tests marked {mark}: {reason}" for mark, reason in unavailable().items()]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the properties `deviation` that tests recorded, in any process."""
    reports = terminalreporter.getreports("passed")
    lines = [str(value) for report in reports for name, value in report.user_properties if name == "deviation"]
    if lines:
        title = "deviation from the numbers that the notebooks print, in units of the last digit (0.5 is exact)"
        terminalreporter.section(title)
        for line in lines:
            terminalreporter.write_line(line)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--url", help="URL of a running service, which the fixture `client` uses instead of starting one")


@pytest.fixture
def without_suggestions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparisons suggest no next input, the search for which takes most of the time of small ones."""
    monkeypatch.setattr("attention_service.comparison.compare.suggestions", lambda *given, **more: iter(()))


@pytest.fixture(scope="session")
def client(request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    url = request.config.getoption("--url")
    with httpx.Client(base_url=url, timeout=CLIENT_TIMEOUT, limits=LIMITS) if url else serving(app()) as client:
        yield client
