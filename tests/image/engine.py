"""Containers, run by the engine that deploy/engine found, and a process without a container for comparison."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.serving import free_port

ROOT = Path(__file__).resolve().parents[2]
ENGINE, BASE_IMAGE = os.environ["ENGINE"], os.environ["BASE_IMAGE"]
IMAGE = f"{os.environ['IMAGE']}:cpu"
COMPOSE = ("docker", "compose") if ENGINE == "docker" else (os.environ["PODMAN_COMPOSE"],)
# The options of docker-compose.yml and the manifests.
HARDENED = (
    *("--read-only", "--tmpfs=/tmp", "--cap-drop=all", "--security-opt=no-new-privileges"),
    *("--memory=1g", "--pids-limit=256", "--cpus=2", "--env=ATTENTION_THREADS=2"),
)


def engine(*arguments: str) -> str:
    """The output of a command of the engine. Errors: AssertionError with its stderr if it fails."""
    done = subprocess.run([ENGINE, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(arguments)}: {done.stderr}"
    return done.stdout.strip()


def succeeds(*arguments: str) -> bool:
    """True if a command of the engine succeeds."""
    return subprocess.run([ENGINE, *arguments], capture_output=True, check=False).returncode == 0


def compose(project: str, *arguments: str, **environment: str) -> None:
    """Run a command of docker compose. Errors: AssertionError with its stderr if it fails."""
    command = [*COMPOSE, "--project-name", project, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(arguments)}: {done.stderr}"


def containers(project: str, service: str) -> list[str]:
    """The names of all containers of a service of a compose project."""
    names = engine("ps", "--format", "{{.Names}}").splitlines()
    return sorted(name for name in names if re.fullmatch(rf"{project}[-_]{service}[-_]\d+", name))


@dataclass(frozen=True)
class Container:
    """A running container, and the URL of its service."""

    name: str
    url: str

    def run(self, *command: str) -> str:
        """The output of a command in the container."""
        return engine("exec", self.name, *command)

    def can(self, *command: str) -> bool:
        """True if a command succeeds in the container."""
        return succeeds("exec", self.name, *command)

    def status(self) -> dict[str, str]:
        """The fields of /proc/1/status in the container: the state of the service's process."""
        return dict(line.split(":", 1) for line in self.run("cat", "/proc/1/status").splitlines())


def assert_confined(one: Container) -> None:
    """Assert that the container has no root, no capabilities, no new privileges, and only one writable folder."""
    facts = {name: value.split() for name, value in one.status().items()}
    assert {*facts["Uid"], *facts["Gid"]} == {"10001"}
    assert int(facts["CapEff"][0], 16) == int(facts["CapBnd"][0], 16) == 0
    assert facts["NoNewPrivs"] == ["1"]
    for folder, writable in (("/tmp", True), ("/", False), ("/opt/attention", False)):
        assert one.can("touch", f"{folder}/file") == writable, folder


@contextmanager
def container(*flags: str) -> Iterator[Container]:
    """A hardened container of the image, which may still be starting; it is removed on exit."""
    port = free_port()
    name = engine("run", "--detach", *HARDENED, f"--publish=127.0.0.1:{port}:8000", *flags, IMAGE)
    try:
        yield Container(name, f"http://127.0.0.1:{port}")
    finally:
        engine("rm", "--force", "--volumes", name)


@contextmanager
def process() -> Iterator[str]:
    """The URL of a service in a process without a container."""
    port = free_port()
    # Python writes bytecode, which the image has, too.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-m", "attention_service", "serve", "--port", str(port)]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL) as running:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            running.terminate()


def await_response(url: str) -> None:
    """Send requests until the service responds."""

    def answers() -> bool:
        try:
            return "output" in httpx.post(f"{url}/attention", json={"input": [[1, 0], [0, 1]]}).json()
        except httpx.TransportError:
            return False

    await_condition(answers, f"an answer from {url}")


def await_success(*arguments: str) -> None:
    """Run a command of the engine until it succeeds."""
    await_condition(lambda: succeeds(*arguments), " ".join(arguments))


def await_condition(holds: Callable[[], bool], what: str, seconds: float = 60) -> None:
    """Poll the condition until it is true. Errors: AssertionError after `seconds`."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds} seconds: {what}"
        time.sleep(0.005)
