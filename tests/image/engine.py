"""Containers, by the engine that deploy/engine found, and the bare process that they are compared with."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.conftest import free_port

ROOT = Path(__file__).resolve().parents[2]
ENGINE, IMAGE, BASE_IMAGE = (os.environ[name] for name in ("ENGINE", "IMAGE", "BASE_IMAGE"))
# As docker-compose.yml and the manifests run it.
HARDENED = (
    *("--read-only", "--tmpfs=/tmp", "--cap-drop=all", "--security-opt=no-new-privileges"),
    *("--memory=1g", "--pids-limit=256"),
)


def engine(*arguments: str) -> str:
    """What a command of the engine prints. Its complaints are seen only where it fails."""
    done = subprocess.run([ENGINE, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(arguments)}: {done.stderr}"
    return done.stdout.strip()


def succeeds(*arguments: str) -> bool:
    """Whether a command of the engine does."""
    return subprocess.run([ENGINE, *arguments], capture_output=True, check=False).returncode == 0


@dataclass(frozen=True)
class Container:
    """One that runs, and where it answers."""

    name: str
    url: str

    def run(self, *command: str) -> str:
        """What a command prints that runs in the container."""
        return engine("exec", self.name, *command)

    def can(self, *command: str) -> bool:
        """Whether a command succeeds there."""
        return succeeds("exec", self.name, *command)


@contextmanager
def container(*flags: str) -> Iterator[Container]:
    """A hardened container of the image, not awaited; removed in the end."""
    port = free_port()
    name = engine("run", "--detach", *HARDENED, f"--publish=127.0.0.1:{port}:8000", *flags, IMAGE)
    try:
        yield Container(name, f"http://127.0.0.1:{port}")
    finally:
        engine("rm", "--force", "--volumes", name)


@contextmanager
def process() -> Iterator[str]:
    """The URL of a service without a container."""
    port = free_port()
    # Bytecode is kept, as it is in the image.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-m", "service", "serve", "--port", str(port)]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL) as running:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            running.terminate()


def await_answer(url: str, seconds: float = 60) -> None:
    """Ask until there is an answer."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            assert httpx.post(f"{url}/attention", json={"input": [[1, 0], [0, 1]]}).json()["output"]
        except httpx.TransportError:
            assert time.monotonic() < deadline, f"no answer within {seconds} seconds"
            time.sleep(0.005)
        else:
            return
