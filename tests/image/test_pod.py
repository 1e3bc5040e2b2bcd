"""The pod of the Kubernetes manifests, run by podman."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.image.engine import ENGINE, IMAGE, ROOT, Container, assert_confined, await_success, engine

# The command of the page, with its folder; without "podman", which is the engine.
(COMMAND,) = re.findall(r"`podman (play kube \S+)`", (ROOT / "docs" / "deployment.md").read_text())
PLAY, KUBE, DEPLOYMENT = COMMAND.split()

pytestmark = pytest.mark.skipif(ENGINE != "podman", reason="only podman runs manifests")


@pytest.fixture(scope="module")
def pod(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    manifest = tmp_path_factory.mktemp("pod") / "deployment.yaml"
    manifest.write_text((ROOT / DEPLOYMENT).read_text().replace("attention-service:cpu", IMAGE))
    engine(PLAY, KUBE, str(manifest))
    try:
        (name,) = engine("ps", "--filter=name=^attention-pod.*-attention$", "--format={{.Names}}").split()
        await_success("exec", name, "attention-service", "health")
        yield Container(name, "")
    finally:
        engine(PLAY, KUBE, "--down", str(manifest))


def test_the_pod_has_as_many_threads_as_its_cpu_limit(pod: Container) -> None:
    assert pod.run("printenv", "ATTENTION_THREADS") == "2"


def test_the_pod_has_half_of_its_memory_limit_for_requests(pod: Container) -> None:
    fetch = "from urllib.request import urlopen; print(urlopen('http://127.0.0.1:8000/metrics').read().decode())"
    metrics = pod.run("python", "-c", fetch)
    (limit,) = re.findall(r"^attention_memory_limit_bytes (\S+)$", metrics, re.MULTILINE)
    assert float(limit) == 3 * 2**29


def test_the_pod_has_no_privileges(pod: Container) -> None:
    assert_confined(pod)
