"""What the README and the docs say is so."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import httpx
import numpy as np
import pytest

from service.attention.spec import Output
from service.errors import error_classes
from service.schemas.request import AttentionRequest
from service.settings import Settings
from tests.cases import CASES

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def test_the_readme_s_curl_gives_the_answer_that_it_shows(client: httpx.Client) -> None:
    """The request is a notebook's, and the answer shown is the one printed there."""
    (curl,) = (block for block in blocks(ROOT / "README.md", "sh") if block.startswith("curl"))
    words = shlex.split(curl)
    assert words[1] == f"http://{Settings().host}:{Settings().port}/attention"
    request = json.loads(words[words.index("-d") + 1])
    (case,) = (case for case in CASES if case.name == "animals_two_queries")
    assert request == case.request
    answer = client.post("/attention", json=request).json()
    shown = json.loads(blocks(ROOT / "README.md", "json")[0])
    for expected in case.expected:
        expected.compare(answer)
        np.testing.assert_allclose(shown[expected.name], answer[expected.name], rtol=0, atol=5.01e-9)
    metadata = shown.pop("metadata")
    assert metadata.items() <= answer["metadata"].items()
    assert shown.keys() == answer.keys() - {"metadata"}


def test_the_readme_s_other_commands_run() -> None:
    """What does not serve or test, which other tests do."""
    commands = [line for block in blocks(ROOT / "README.md", "sh") for line in block.splitlines()]
    (compute,) = (command for command in commands if "compute" in command)
    local = compute.replace(".venv/bin/", f"{Path(sys.executable).parent}/")
    done = subprocess.run(local, shell=True, capture_output=True, text=True, check=True, cwd=ROOT)
    assert json.loads(done.stdout)["metadata"]["query_length"] == 2
    assert {"make serve", "make test"} <= {command.partition("  ")[0] for command in commands}


def test_python_in_docs_runs() -> None:
    (example,) = blocks(ROOT / "docs" / "attention.md", "python")
    names: dict[str, Any] = {}
    exec(example, names)
    assert names["result"].output.shape == (2, 8, 64, 32)
    assert names["result"]["logsumexp"].shape == (2, 8, 64)
    assert names["result"].metadata.fully_masked_rows == 0


def test_binary_examples_run(client: httpx.Client) -> None:
    npz, tensors = blocks(ROOT / "docs" / "formats.md", "python")
    address = str(client.base_url).rstrip("/")
    shapes = []
    for example in (npz, tensors):
        names: dict[str, Any] = {}
        exec(example.replace("http://127.0.0.1:8000", address), names)
        shapes.append({name: array.shape for name, array in names["answer"].items() if array.ndim})
    assert shapes[0] == {"output": (8, 128, 64), "logsumexp": (8, 128)}
    assert shapes[1] == {"output": (3, 3), "top_weights.indices": (3, 1), "top_weights.values": (3, 1)}


def test_client_examples_run(client: httpx.Client) -> None:
    address = str(client.base_url).rstrip("/")
    (example,) = blocks(ROOT / "docs" / "clients.md", "python")
    names: dict[str, Any] = {}
    exec(example.replace("http://127.0.0.1:8000", address), names)
    assert names["answer"]["scores"] == [[1, 0]]
    for page, path in (("clients", "/attention"), ("inference-protocol", "/v2/models/attention/infer")):
        curl = next(block for block in blocks(ROOT / "docs" / f"{page}.md", "sh") if block.startswith("curl"))
        words = shlex.split(curl)
        assert words[1] == f"http://127.0.0.1:8000{path}"
        assert client.post(path, content=words[-1], headers={"Content-Type": "application/json"}).status_code == 200


def test_json_in_docs_is_what_it_says(client: httpx.Client) -> None:
    (array,) = blocks(ROOT / "docs" / "attention.md", "json")
    answer = client.post("/attention", json={"input": json.loads(array)}).json()
    assert answer["output"] == [[1, -2]]
    assert answer["metadata"]["dtype"] == "float32"


def test_every_field_is_documented_with_what_it_means() -> None:
    page = (ROOT / "docs" / "attention.md").read_text(encoding="utf-8")
    for name in [*AttentionRequest.model_fields, *get_args(Output)]:
        assert f"`{name}`" in page or f'"{name}"' in page, name


def test_every_setting_and_code_is_documented() -> None:
    settings = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert all(f"`ATTENTION_{name.upper()}`" in settings for name in Settings.model_fields)
    errors = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    assert all(f"`{code}`" in errors for code in error_classes())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if not link.startswith("http"):
            assert (page.parent / link).exists(), link


def test_every_make_target_that_is_named_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        for target in re.findall(r"(?:`|^)make ([a-z-]+)", page.read_text(encoding="utf-8"), re.MULTILINE):
            assert target in targets, f"{page.name}: make {target}"


def test_the_first_request_of_the_site_is_answered_as_it_says(client: httpx.Client) -> None:
    (curl,) = (block for block in blocks(ROOT / "docs" / "index.md", "sh") if block.startswith("curl"))
    words = shlex.split(curl)
    weights = client.post("/attention", json=json.loads(words[words.index("-d") + 1])).json()["attention_weights"]
    assert weights[0] == [1, 0, 0]
    np.testing.assert_allclose(np.sum(weights, axis=-1), 1, rtol=1e-15)
