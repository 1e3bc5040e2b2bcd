"""The commands of docs/deployment.md run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import free_port
from tests.helpers.documents import blocks
from tests.image.engine import COMPOSE, ENGINE, IMAGE, ROOT

CONTAINER, COMPOSED, APPLY, OVERLAY = (block.text for block in blocks(ROOT / "docs" / "deployment.md"))
MANIFESTS = Path("deploy") / "kubernetes"
NAME = "attention-docs"
# Makes the engine available as `docker`, which the page uses, and removes all containers on exit.
SETUP = f"""set -e
docker() {{ case "$1" in compose) shift; {" ".join(COMPOSE)} "$@";; *) command {ENGINE} "$@";; esac; }}
trap 'docker rm --force {NAME} || true; docker compose down --volumes || true' EXIT
"""


@pytest.mark.parametrize("commands", [CONTAINER, COMPOSED], ids=["container", "compose"])
def test_the_commands_of_the_page_run(commands: str) -> None:
    """The commands of the page run with the built image, a free port and other names."""
    port = str(free_port())
    own = commands.replace("make image\n", "").replace("attention-service:cpu", IMAGE)
    own = re.sub(r"(?<=\s)attention(?=\s)", NAME, own.replace("127.0.0.1:8000", f"127.0.0.1:{port}"))
    environment = os.environ | {"PORT": port, "COMPOSE_PROJECT_NAME": NAME}
    done = subprocess.run(
        ["bash", "-c", SETUP + own], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_the_kubernetes_manifests_and_the_overlay_render(tmp_path: Path) -> None:
    """kubectl renders the folder that the page applies, and the overlay that it shows."""
    shutil.copytree(ROOT / MANIFESTS, tmp_path / MANIFESTS)
    overlay = MANIFESTS / "overlay"
    (tmp_path / overlay).mkdir()
    (tmp_path / overlay / "kustomization.yaml").write_text(OVERLAY)
    made = []
    for folder in (MANIFESTS / "base", overlay):
        command = APPLY.replace("apply -k", "kustomize").replace(str(MANIFESTS / "base"), str(folder))
        made.append(subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True))
    base, own = (done.stdout for done in made)
    assert "image: attention-service:" in base
    assert re.sub("image: attention-service:.*", "image: registry.example/attention-service:0.1.0", base) == own
