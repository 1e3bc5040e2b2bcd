"""The commands of docs/deployment.md run, with the built image, a free port and other names."""

from __future__ import annotations

import os
import re
import signal
import subprocess

import pytest

from benchmarks.serving import free_port
from tests.helpers.documents import blocks
from tests.image.engine import COMPOSE, ENGINE, IMAGE, ROOT, await_response

MADE, CONTAINER, COMPOSED, *_OTHERS = (  # kubectl and systemd, which tests/deploy check
    block.text for block in blocks(ROOT / "docs" / "deployment.md") if block.language == "sh"
)
PROFILES = re.findall(r"^\| `--profile (\S+) up ?(\S*)`", (ROOT / "docs" / "deployment.md").read_text(), re.MULTILINE)
NAME = "attention-docs"
# Makes the engine available as `docker`, which the page uses, and removes all containers on exit.
SETUP = f"""set -e
docker() {{ case "$1" in compose) shift; {" ".join(COMPOSE)} "$@";; *) command {ENGINE} "$@";; esac; }}
trap 'docker rm --force {NAME} || true; docker compose down --volumes || true' EXIT
"""


@pytest.mark.parametrize("commands", [CONTAINER, COMPOSED], ids=["container", "compose"])
def test_the_commands_of_the_page_run(commands: str) -> None:
    port = str(free_port())
    own = commands.replace("attention-service:cpu", IMAGE)
    own = re.sub(r"(?<=\s)attention(?=\s)", NAME, own.replace("127.0.0.1:8000", f"127.0.0.1:{port}"))
    environment = os.environ | {"PORT": port, "COMPOSE_PROJECT_NAME": NAME}
    done = subprocess.run(
        ["bash", "-c", SETUP + own], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_image_runs_by_make_until_ctrl_c() -> None:
    """`make run-image` finds the engine by itself: the variables of these tests are not in its environment."""
    build, run = MADE.splitlines()
    assert build == "make image"
    port = str(free_port())
    environment = {name: os.environ[name] for name in ("HOME", "PATH")}
    command = f"{run.partition('#')[0]} PORT={port} IMAGE={IMAGE.removesuffix(':cpu')}"
    with subprocess.Popen(
        command.split(), cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            await_response(f"http://127.0.0.1:{port}")
        finally:
            os.killpg(process.pid, signal.SIGINT)
            _, errors = process.communicate(timeout=60)
    assert "startup complete" in errors
    assert "Finished server process" in errors


@pytest.mark.parametrize(("profile", "service"), PROFILES)
def test_every_profile_of_the_page_has_its_service(profile: str, service: str) -> None:
    """compose reads the file. test_scale.py and test_observability.py run the profiles that need no GPU."""
    command = [*COMPOSE, "--profile", profile, "config", "--services"]
    services = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert {"attention", service or "prometheus"} <= set(services)
