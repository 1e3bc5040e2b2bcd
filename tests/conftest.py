"""A real server on a real port: what the tests see is what a client sees."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from uvicorn.config import LOGGING_CONFIG

from service.app import create_app
from service.backends.dense.library import ArrayLibrary
from service.server.progress import ReportProgress
from service.server.run import uvicorn_options
from service.settings import Settings

# So that an output that nobody computed cannot pass.
ArrayLibrary.fill = math.nan


@contextmanager
def serving(app: FastAPI | Callable[..., Any], **options: Any) -> Iterator[httpx.Client]:
    """A client of a server that runs the application in a thread on a free port. options: more of uvicorn's."""
    settings = app.state.settings if isinstance(app, FastAPI) and hasattr(app.state, "settings") else Settings()
    ours = {**uvicorn_options(settings), "port": 0, "log_level": "warning", "log_config": LOGGING_CONFIG}
    config = uvicorn.Config(ReportProgress(app), **{**ours, **options})
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    deadline = time.monotonic() + 30
    while not server.started:
        assert thread.is_alive(), "the server died while starting"
        assert time.monotonic() < deadline, "the server does not start"
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        scheme = "https" if options.get("ssl_certfile") else "http"
        with httpx.Client(base_url=f"{scheme}://127.0.0.1:{port}", timeout=30, verify=False) as client:
            yield client
    finally:
        server.should_exit = True
        thread.join()


def app(**settings: Any) -> FastAPI:
    """The service with these settings, whatever the environment says, and defaults for the rest."""
    return create_app(Settings.model_construct(**settings))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextmanager
def uncaptured(request: pytest.FixtureRequest) -> Iterator[None]:
    """What is printed inside is seen in every run."""
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--url", help="a service that runs already, to be tested in place of one of the tests' own")


@pytest.fixture(scope="session")
def client(request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    url = request.config.getoption("--url")
    with httpx.Client(base_url=url, timeout=30) if url else serving(app()) as client:
        yield client
