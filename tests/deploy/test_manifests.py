"""The Kubernetes manifests: every folder, and the overlay of docs/deployment.md, as kustomize builds it."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from attention_service.settings.keys import Keys
from tests.helpers.documents import ROOT, blocks

MANIFESTS = ROOT / "deploy" / "kubernetes"
SCHEMAS = Path(__file__).parent / "schemas"
FOLDERS = {
    path.parent.name: yaml.safe_load(path.read_text())["kind"]
    for path in sorted(MANIFESTS.glob("*/kustomization.yaml"))
}
COMPONENTS = [name for name, kind in FOLDERS.items() if kind == "Component"]
OVERLAYS = [name for name, kind in FOLDERS.items() if kind == "Kustomization"]
SHELL, OVERLAY = (
    [block for block in blocks(ROOT / "docs" / "deployment.md") if block.language == language]
    for language in ("sh", "yaml")
)

Resources = dict[str, dict[str, Any]]


def build(folder: Path) -> str:
    """The resources of a folder as YAML. Errors: AssertionError with the message of kubectl."""
    done = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def resources(text: str) -> Resources:
    """Resources by kind; every kind occurs once."""
    found = list(yaml.safe_load_all(text))
    assert len({each["kind"] for each in found}) == len(found)
    return {each["kind"]: each for each in found}


def combine(folder: Path, base: str, components: list[str]) -> str:
    """The resources of an overlay in this folder with these components."""
    content = {"resources": [f"../{base}"], "components": [f"../{name}" for name in components]}
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(content))
    return build(folder)


@pytest.fixture(scope="module")
def overlay(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder beside all others, for an overlay."""
    root = tmp_path_factory.mktemp("kubernetes")
    for name in FOLDERS:
        (root / name).symlink_to(MANIFESTS / name)
    own = root / "overlay"
    own.mkdir()
    return own


@pytest.fixture(scope="module")
def key_and_hash() -> list[str]:
    return [line.split()[-1] for line in run(sys.executable, "-m", "attention_service", "key").splitlines()]


@pytest.fixture(scope="module")
def page(overlay: Path, key_and_hash: list[str]) -> str:
    """The resources of the overlay of the page, with a hash in the file that it names."""
    (shown,) = OVERLAY
    (overlay / "kustomization.yaml").write_text(shown.text)
    (overlay / "hashes").write_text(f"{key_and_hash[1]}\n")
    return build(overlay)


@pytest.fixture(scope="module")
def built(overlay: Path, page: str) -> dict[str, str]:
    """The resources of each overlay, also with each component and with all of them, and of the page."""
    found = {name: build(MANIFESTS / name) for name in OVERLAYS}
    for base, name in product(OVERLAYS, COMPONENTS):
        found[f"{base}+{name}"] = combine(overlay, base, [name])
    # `requests` and `keda` scale by the same metric.
    found["all"] = combine(overlay, "base", [name for name in COMPONENTS if name != "requests"])
    return found | {"page": page}


def run(*command: str | Path) -> str:
    """The output of a command. Errors: AssertionError with this output if it fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout
    return done.stdout


def container(found: Resources) -> dict[str, Any]:
    (only,) = found["Deployment"]["spec"]["template"]["spec"]["containers"]
    return dict(only)


def assert_names_lead_somewhere(found: Resources) -> None:
    """Assert that ports, objects and volumes that the resources name exist."""
    ports = {port["name"] for port in container(found)["ports"]}
    services = {port["name"]: port["targetPort"] for port in found["Service"]["spec"]["ports"]}
    assert set(services.values()) == ports
    assert {port["port"] for rule in found["NetworkPolicy"]["spec"]["ingress"] for port in rule["ports"]} == ports
    volumes = {volume["name"] for volume in found["Deployment"]["spec"]["template"]["spec"]["volumes"]}
    assert {mount["name"] for mount in container(found)["volumeMounts"]} == volumes
    labels = found["Deployment"]["spec"]["template"]["metadata"]["labels"]
    for kind in ("Service", "NetworkPolicy", "PodDisruptionBudget", "ServiceMonitor"):
        if kind in found:
            spec = found[kind]["spec"]
            selector = spec.get("podSelector") or spec["selector"]
            assert selector.get("matchLabels", selector).items() <= labels.items(), kind
    for kind in ("HorizontalPodAutoscaler", "ScaledObject"):
        if kind in found:
            assert found[kind]["spec"]["scaleTargetRef"]["name"] == found["Deployment"]["metadata"]["name"]
    if "Ingress" in found:
        (rule,) = found["Ingress"]["spec"]["rules"]
        for path in rule["http"]["paths"]:
            assert path["backend"]["service"]["name"] == found["Service"]["metadata"]["name"]
            assert path["backend"]["service"]["port"]["name"] in services
        assert found["Ingress"]["spec"]["tls"][0]["hosts"] == [rule["host"]]
    if "ServiceMonitor" in found:
        spec = found["ServiceMonitor"]["spec"]
        assert {endpoint["port"] for endpoint in spec["endpoints"]} <= services.keys()
        assert found["Service"]["metadata"]["labels"][spec["jobLabel"]] == "attention"  # which the alerts name


def test_every_resource_is_valid(built: dict[str, str], tmp_path: Path) -> None:
    """Kubernetes knows every field; the schemas here know those of custom resources."""
    files: dict[str, list[Path]] = {}
    seen = set()
    for name, text in built.items():
        for kind, resource in resources(text).items():
            if (content := yaml.safe_dump(resource)) not in seen:
                seen.add(content)
                file = tmp_path / f"{name}-{kind}.yaml"
                file.write_text(content)
                files.setdefault(kind if (SCHEMAS / f"{kind}.json").exists() else "", []).append(file)
    core = files.pop("")
    assert len(core) > 15
    # A kind without a schema is only a warning, and nothing of it is checked.
    assert "WARN" not in run("kubernetes-validate", "--strict", *core)
    assert files.keys() == {"ScaledObject", "ServiceMonitor"}
    for kind, paths in files.items():
        run("check-jsonschema", "--schemafile", SCHEMAS / f"{kind}.json", *paths)


def test_all_names_lead_somewhere(built: dict[str, str]) -> None:
    for text in built.values():
        assert_names_lead_somewhere(resources(text))


def test_each_component_changes_each_overlay(built: dict[str, str]) -> None:
    assert all(built[f"{base}+{name}"] != built[base] for base, name in product(OVERLAYS, COMPONENTS))


def test_the_base_needs_nothing_that_a_cluster_may_lack(built: dict[str, str]) -> None:
    """No custom resources; the autoscaler uses the metrics of the metrics server only."""
    found = resources(built["base"])
    assert {each["apiVersion"] for each in found.values()} == {
        "v1", "apps/v1", "autoscaling/v2", "networking.k8s.io/v1", "policy/v1"
    }  # fmt: skip
    (metric,) = found["HorizontalPodAutoscaler"]["spec"]["metrics"]
    assert metric == {
        "type": "Resource",
        "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 80}},
    }


def test_an_autoscaler_by_requests_keeps_the_cpu(built: dict[str, str]) -> None:
    metrics = resources(built["base+requests"])["HorizontalPodAutoscaler"]["spec"]["metrics"]
    assert [metric["type"] for metric in metrics] == ["Resource", "Pods"]


def test_there_is_one_autoscaler_with_keda(built: dict[str, str]) -> None:
    found = resources(built["base+keda"])
    assert "ScaledObject" in found
    assert "HorizontalPodAutoscaler" not in found


def test_pods_do_not_start_without_the_secret_of_keys(built: dict[str, str]) -> None:
    """No Secret is here that could hold a key that works; the volume is not optional."""
    found = resources(built["base+keys"])
    assert "Secret" not in found
    (secret,) = (v["secret"] for v in found["Deployment"]["spec"]["template"]["spec"]["volumes"] if "secret" in v)
    assert not secret.get("optional")


def test_pods_with_traces_may_connect_to_the_receiver_that_they_are_given(built: dict[str, str]) -> None:
    found = resources(built["base+tracing"])
    variables = {each["name"]: each.get("value") for each in container(found)["env"]}
    assert variables["ATTENTION_TRACING"] == "true"
    receiver = urlsplit(variables["OTEL_EXPORTER_OTLP_ENDPOINT"])
    rule, _ = found["NetworkPolicy"]["spec"]["egress"]
    assert rule["ports"] == [{"port": receiver.port}]
    namespace = rule["to"][0]["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
    assert str(receiver.hostname).split(".")[1] == namespace


def test_the_ingress_has_every_operation_but_those_of_operators(built: dict[str, str]) -> None:
    (rule,) = resources(built["base+ingress"])["Ingress"]["spec"]["rules"]
    exact = {path["path"] for path in rule["http"]["paths"] if path["pathType"] == "Exact"}
    below = {path["path"] for path in rule["http"]["paths"] if path["pathType"] == "Prefix"}
    document = json.loads((ROOT / "openapi" / "openapi.json").read_text())
    hidden = {
        path for path in document["paths"] if path not in exact and f"/{path.split('/')[1]}" not in below
    }  # fmt: skip
    assert hidden == {"/health/live", "/health/ready", "/metrics"}
    assert "/" in exact
    assert {"/page", "/docs", "/docs-assets"} <= below  # which the document does not list


def test_the_schemas_refuse_what_is_misspelt(tmp_path: Path) -> None:
    for kind, file in {
        "ScaledObject": "keda/scaled-object",
        "ServiceMonitor": "service-monitor/service-monitor",
    }.items():
        resource = yaml.safe_load((MANIFESTS / f"{file}.yaml").read_text())
        resource["spec"]["triger"] = []
        (tmp_path / f"{kind}.yaml").write_text(yaml.safe_dump(resource))
        with pytest.raises(AssertionError, match="triger"):
            run("check-jsonschema", "--schemafile", SCHEMAS / f"{kind}.json", tmp_path / f"{kind}.yaml")


def test_the_command_of_the_page_names_the_base() -> None:
    (command,) = (block.text for block in SHELL if block.text.startswith("kubectl apply"))
    assert command.split() == ["kubectl", "apply", "-k", "deploy/kubernetes/base"]


def test_the_overlay_of_the_page_sets_image_host_and_keys(page: str, key_and_hash: list[str], tmp_path: Path) -> None:
    """The service accepts a key whose hash is in the file that the page names."""
    found = resources(page)
    assert container(found)["image"].startswith("registry.example/attention-service:")
    assert found["Ingress"]["spec"]["rules"][0]["host"] == "attention.example.org"
    variables = {each["name"]: each.get("value") for each in container(found)["env"]}
    (mount,) = (m["mountPath"] for m in container(found)["volumeMounts"] if m["name"] == "keys")
    file = Path(str(variables["ATTENTION_API_KEYS_FILE"]))
    assert str(file.parent) == mount
    mounted = tmp_path / file.name
    mounted.write_bytes(base64.b64decode(found["Secret"]["data"][file.name]))
    assert Keys("", mounted).find(f"Bearer {key_and_hash[0]}".encode()) is not None
