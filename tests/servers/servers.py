"""The ASGI servers that the application is tested under: how to start each one, and how it exits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx

from benchmarks.serving import free_port
from tests.attack.server import Live, within

ROOT: Final = Path(__file__).resolve().parents[2]
BIN: Final = Path(sys.executable).parent
FACTORY: Final = "attention_service.app:from_environment"
# Seconds for a server to import the application and to bind its port.
START_TIMEOUT: Final = 90.0


@dataclass(frozen=True)
class Server:
    """The command line that serves the application on a port, and the exit status after SIGTERM."""

    name: str
    command: Callable[[int], list[str]]
    exit_status: int = 0

    def __str__(self) -> str:
        return self.name


def uvicorn(parser: str) -> Server:
    """Stock uvicorn with one of its HTTP parsers. It shuts down, then raises the signal again."""
    return Server(
        f"uvicorn-{parser}",
        lambda port: [f"{BIN}/uvicorn", FACTORY, "--factory", "--http", parser, "--port", str(port)],
        exit_status=-signal.SIGTERM,
    )


SERVERS: Final = (
    Server("serve", lambda port: [sys.executable, "-m", "attention_service", "serve", "--port", str(port)]),
    uvicorn("h11"),
    uvicorn("httptools"),
    Server(
        "hypercorn",
        lambda port: [f"{BIN}/hypercorn", f"{FACTORY}()", "--bind", f"127.0.0.1:{port}", "--graceful-timeout", "60"],
    ),
    Server(
        "granian",
        lambda port: [f"{BIN}/granian", "--interface", "asgi", "--factory", FACTORY, "--port", str(port)],
    ),
)


@contextmanager
def started(server: Server, **settings: object) -> Iterator[Live]:
    """Start a server with these ATTENTION_* settings, and kill all its processes on exit.

    Asserts that its log has no traceback.
    """
    port = free_port()
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("ATTENTION_")}
    environment = (
        inherited
        | {"ATTENTION_ALLOWED_HOSTS": "x"}
        | {f"ATTENTION_{name.upper()}": str(value) for name, value in settings.items()}
    )
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            server.command(port),
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # its workers are in its process group
        )
        live = Live(process, port, log)
        try:
            assert within(START_TIMEOUT, lambda: process.poll() is not None or is_ready(port)), live.logged()
            assert process.poll() is None, live.logged()
            yield live
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        assert "Traceback" not in live.logged(), live.logged()


def is_ready(port: int) -> bool:
    """True if /health/ready answers 200."""
    with suppress(httpx.TransportError):
        return httpx.get(f"http://127.0.0.1:{port}/health/ready").status_code == 200
    return False
