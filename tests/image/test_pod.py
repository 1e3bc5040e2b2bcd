"""The pod of the Kubernetes manifests, run by podman."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.image.engine import ENGINE, ROOT, Container, assert_confined, await_success, engine

DEPLOYMENT = str(ROOT / "deploy" / "kubernetes" / "base" / "deployment.yaml")

pytestmark = pytest.mark.skipif(ENGINE != "podman", reason="only podman runs manifests")


@pytest.fixture(scope="module")
def pod() -> Iterator[Container]:
    engine("play", "kube", DEPLOYMENT)
    try:
        (name,) = engine("ps", "--filter=name=^attention-pod.*-attention$", "--format={{.Names}}").split()
        await_success("exec", name, "attention-service", "health")
        yield Container(name, "")
    finally:
        engine("play", "kube", "--down", DEPLOYMENT)


def test_the_pod_has_as_many_threads_as_its_cpu_limit(pod: Container) -> None:
    assert pod.run("printenv", "ATTENTION_THREADS") == "2"


def test_the_pod_has_no_privileges(pod: Container) -> None:
    assert_confined(pod)
