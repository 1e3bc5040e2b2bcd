"""The files of deploy/ray: Ray reads them, and KubeRay knows each field."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from ray.serve.schema import ServeDeploySchema

from attention_service.settings import Settings
from deploy.ray.attention_on_ray import AttentionService
from tests.helpers.documents import ROOT

FOLDER = ROOT / "deploy" / "ray"
SCHEMA = json.loads((ROOT / "tests" / "deploy" / "schemas" / "RayService.json").read_text())
RESOURCE = yaml.safe_load((FOLDER / "kuberay.yaml").read_text())
CONFIGURATIONS = {
    "serve.yaml": yaml.safe_load((FOLDER / "serve.yaml").read_text()),
    "kuberay.yaml": yaml.safe_load(RESOURCE["spec"]["serveConfigV2"]),
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_ray_reads_what_is_served(name: str) -> None:
    (application,) = ServeDeploySchema.model_validate(CONFIGURATIONS[name]).applications
    assert application.import_path in ("deploy.ray.attention_on_ray:app", "attention_on_ray:app")
    (deployment,) = application.deployments
    assert deployment.name == AttentionService.name  # type: ignore[attr-defined]  # a Deployment
    variables = application.runtime_env["env_vars"]
    assert {variable.removeprefix("ATTENTION_").lower() for variable in variables} <= Settings.model_fields.keys()


def test_kuberay_knows_each_field() -> None:
    assert not list(Draft202012Validator(SCHEMA).iter_errors(RESOURCE))
    cluster = RESOURCE["spec"]["rayClusterConfig"]
    (workers,) = cluster["workerGroupSpecs"]
    images = {group["template"]["spec"]["containers"][0]["image"] for group in (cluster["headGroupSpec"], workers)}
    assert images == {f"registry.example/attention-on-ray:{cluster['rayVersion']}"}
    assert workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]


@pytest.mark.parametrize(
    "place", [("spec",), ("spec", "rayClusterConfig"), ("spec", "rayClusterConfig", "headGroupSpec")]
)
def test_the_schema_refuses_what_is_misspelt(place: tuple[str, ...]) -> None:
    resource: dict[str, Any] = yaml.safe_load((FOLDER / "kuberay.yaml").read_text())
    inner = resource
    for name in place:
        inner = inner[name]
    inner["replica"] = 1
    assert "replica" in next(Draft202012Validator(SCHEMA).iter_errors(resource)).message
