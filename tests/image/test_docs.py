"""The commands of docs/deployment.md run, as they stand there."""

from __future__ import annotations

import os
import re
import subprocess

import pytest

from tests.conftest import free_port
from tests.image.engine import COMPOSE, ENGINE, IMAGE, ROOT
from tests.test_docs import blocks

CONTAINER, COMPOSED, _ = blocks(ROOT / "docs" / "deployment.md", "sh")
NAME = "attention-docs"
# The engine, whichever it is, under the name that the page has for it; and nothing left behind.
SETUP = f"""set -e
docker() {{ case "$1" in compose) shift; {" ".join(COMPOSE)} "$@";; *) command {ENGINE} "$@";; esac; }}
trap 'docker rm --force {NAME} || true; docker compose down --volumes || true' EXIT
"""


@pytest.mark.parametrize("commands", [CONTAINER, COMPOSED], ids=["container", "compose"])
def test_commands_run(commands: str) -> None:
    """The image is built already; port and names are our own."""
    port = str(free_port())
    own = commands.replace("make image\n", "").replace("attention-service:cpu", IMAGE)
    own = re.sub(r"(?<=\s)attention(?=\s)", NAME, own.replace("127.0.0.1:8000", f"127.0.0.1:{port}"))
    environment = os.environ | {"PORT": port, "COMPOSE_PROJECT_NAME": NAME}
    done = subprocess.run(
        ["bash", "-c", SETUP + own], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
