"""The README and the docs are right: their commands, requests and programs run unmodified, their links have targets."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any, get_args

import httpx
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from attention_service.attention.spec import Output
from attention_service.errors import error_classes
from attention_service.schemas.request import AttentionRequest
from attention_service.settings import Settings
from attention_service.version import __version__
from benchmarks.judges import JUDGES
from tests.cases import CASES
from tests.conftest import app, serving
from tests.helpers.documents import BLOCKS, PAGES, ROOT, Block

# Blocks that cannot run here, by page and first words, each with what runs it instead, or why nothing does.
ELSEWHERE = {
    ("README.md", "make serve "): ("deploy/release-check", "installs an environment; make test is what runs this"),
    ("docs/install.md", "make serve\n"): ("deploy/release-check", "installs an environment"),
    ("docs/install.md", "python3 -m venv "): (
        "deploy/release-check",
        "makes an environment; docs/notebooks.md has the same installation, which is run there",
    ),
    ("docs/deployment.md", "make image\n"): ("tests/image/test_docs.py", "needs docker or podman"),
    ("docs/deployment.md", "docker run "): ("tests/image/test_docs.py", "needs docker or podman"),
    ("docs/deployment.md", "docker compose up "): ("tests/image/test_docs.py", "needs docker or podman"),
    ("docs/deployment.md", "kubectl apply "): (
        "tests/deploy/test_manifests.py",
        "needs a cluster; what it would send is built and validated",
    ),
    ("docs/deployment.md", "python3 -m venv /opt/"): (
        "tests/deploy/test_systemd.py",
        "needs systemd; its unit is tested",
    ),
    ("docs/notebooks.md", "pip install"): ("deploy/release-check", "installs an environment"),
    ("docs/notebooks.md", "import numpy as np\nfrom attention_service import attend\n\nanimals"): (
        "tests/test_notebooks.py",
        "its last line is a picture",
    ),
    ("docs/notebooks.md", "import jax"): ("tests/test_notebooks.py", "needs torch and JAX"),
    ("docs/inference-protocol.md", "import numpy"): ("tests/clients/test_docs.py", "needs tritonclient"),
    ("docs/inference-protocol.md", "import asyncio"): ("tests/clients/test_docs.py", "needs kserve"),
    ("docs/inference-protocol.md", "pip install"): ("tests/clients/test_docs.py", "serves until it is stopped"),
    ("docs/clients.md", ""): ("tests/clients", "needs other languages and generators"),
    ("docs/scaling.md", "pip install"): ("tests/ray", "needs Ray, and serves until it is stopped"),
    ("docs/compare.md", 'cd "$(mktemp -d)"'): ("tests/test_docs.py", "what it prints is asserted"),
    ("docs/compare.md", "import torch"): ("tests/test_library_report.py", "needs torch"),
    ("docs/layers.md", ""): ("tests/test_layer_import.py", "needs a checkpoint, and a service with its layers"),
    ("docs/models.md", ""): ("tests/peers/test_capture.py", "needs transformers and a trained model"),
    ("docs/heatmaps.md", ""): ("tests/test_heatmap.py", "each block writes a file"),
    ("docs/paper.md", ""): ("tests/test_paper_pictures.py", "each block writes a file"),
    ("docs/engine-answers.md", ""): ("tests/test_verdicts.py", "needs an engine on a GPU; a recording is made there"),
    ("docs/agents.md", ""): ("tests/test_docs.py", "each block goes on where the one before it ended"),
    ("docs/tutorial-by-hand.md", ""): ("tests/test_tutorials.py", "each block goes on where the one before it ended"),
    ("docs/tutorial-kernel.md", ""): ("tests/test_tutorials.py", "each block goes on where the one before it ended"),
    ("docs/tutorial-model.md", ""): ("tests/peers/test_tutorial.py", "needs transformers and a trained model"),
    **{
        ("docs/conformance.md", start): ("tests/peers/test_conformance.py", "needs the library")
        for start in (
            "import jax",
            "import torch",
            "import os",
            "import numpy as np\nimport onnxruntime",
            "import numpy as np\nimport torch",
            "import numpy as np\nfrom onnx",
        )
    },
}
# Commands within the text of the pages for operators, by their start, each with what runs it, or why nothing does.
INLINE = {
    ("docs/deployment.md", "attention-service health"): ("tests/image/test_docs.py", "in a container"),
    ("docs/deployment.md", "docker compose restart"): ("tests/image/test_scale.py", "needs docker or podman"),
    ("docs/deployment.md", "docker compose up"): ("tests/image/test_docs.py", "needs docker or podman"),
    ("docs/deployment.md", "kubectl "): ("tests/deploy/test_manifests.py", "needs a cluster"),
    ("docs/deployment.md", "attention-service settings --effective"): ("tests/test_settings.py", "in an environment"),
    ("docs/deployment.md", "podman play kube"): ("tests/image/test_pod.py", "needs podman"),
    ("docs/deployment.md", "attention-service key"): ("tests/deploy/test_manifests.py", "makes the file of hashes"),
    ("docs/deployment.md", "attention-service serve"): ("tests/conftest.py", "what most tests do"),
    ("docs/deployment.md", "uvicorn "): ("tests/servers/test_servers.py", "needs its own environment"),
    ("docs/deployment.md", "hypercorn "): ("tests/servers/test_servers.py", "needs its own environment"),
    ("docs/deployment.md", "granian "): ("tests/servers/test_servers.py", "needs its own environment"),
    ("docs/deployment.md", "make "): ("Makefile", "targets and variables are checked below; each takes minutes"),
    ("docs/operations.md", "attention-service health"): ("tests/test_cli.py", "with and without a service"),
    ("docs/operations.md", "attention-service serve"): ("tests/conftest.py", "what most tests do"),
    ("docs/operations.md", "attention-service settings --effective"): ("tests/test_settings.py", "in an environment"),
    ("docs/operations.md", "make "): ("Makefile", "targets and variables are checked below; each takes minutes"),
}
OPERATORS = ("docs/deployment.md", "docs/operations.md")
PROGRAMS = "attention-service|docker|podman|kubectl|helm|make|uvicorn|hypercorn|granian|promtool|curl"
# Blocks that compute for more than a second.
SLOW = (("docs/suites.md", "key, value = (np.tile("), ("docs/rounding.md", "import numpy as np, ml_dtypes"))
# Blocks that are neither commands nor requests have separate tests below.
SHELL, PYTHON = "sh", "python"


def entries_of(block: Block) -> list[tuple[str, str]]:
    """The keys of ELSEWHERE that match a block."""
    return [(page, start) for page, start in ELSEWHERE if page == block.page and block.text.startswith(start)]


HERE = [block for block in BLOCKS if block.language in (SHELL, PYTHON) and not entries_of(block)]


def one(page: str, language: str, start: str = "") -> Block:
    """The only block of a page with this language and start."""
    (found,) = (b for b in BLOCKS if (b.page, b.language) == (page, language) and b.text.startswith(start))
    return found


@pytest.fixture(scope="module")
def address(client: httpx.Client) -> str:
    return client.base_url.netloc.decode()


@pytest.mark.parametrize("block", [block for block in HERE if block.language == SHELL], ids=str)
def test_commands_and_requests_run(block: Block, address: str) -> None:
    """The shell runs the commands without an error, and the service responds without a problem."""
    if "curl" in block.text and shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    printed = block.run(address)
    assert printed
    if "/attention/compare" in block.text:
        assert json.loads(printed)["verdict"], printed
    elif "/attention" in block.text or "compute" in block.text:
        assert {"output", "outputs"} & json.loads(printed).keys(), printed


def marks_of(block: Block) -> list[Any]:
    return [pytest.mark.slow for page, words in SLOW if page == block.page and words in block.text]


@pytest.mark.parametrize(
    "block", [pytest.param(block, marks=marks_of(block)) for block in HERE if block.language == PYTHON], ids=str
)
def test_python_examples_run(block: Block, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each expression with a comment behind it has the value of the comment."""
    monkeypatch.chdir(tmp_path)  # some write files
    shown = block.execute(address)
    assert shown, "nothing that could be compared"
    for expression, value, said in shown:
        assert value == said, expression


@pytest.mark.parametrize(("page", "start"), ELSEWHERE)
def test_blocks_that_other_tests_run_exist_and_are_run_there(page: str, start: str) -> None:
    assert any((page, start) in entries_of(block) for block in BLOCKS), "no block begins like this any more"
    runner = ROOT / ELSEWHERE[page, start][0]
    assert runner.is_dir() or Path(page).name in runner.read_text(encoding="utf-8"), "its runner does not name the page"


@pytest.mark.parametrize("page", OPERATORS)
def test_every_command_within_the_text_for_operators_has_a_test(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    commands = set(re.findall(rf"`((?:{PROGRAMS}) [^`]+)`", text)) - {"docker run", "docker stop", "docker compose"}
    known = [start for name, start in INLINE if name == page]
    assert [command for command in commands if not command.startswith(tuple(known))] == []
    assert [start for start in known if not any(command.startswith(start) for command in commands)] == []
    assert all((ROOT / INLINE[page, start][0]).is_file() for start in known)


def test_all_blocks_have_languages_that_are_tested() -> None:
    """No test would run a block of another language."""
    others = {(block.page, block.language) for block in BLOCKS if block.language not in (SHELL, PYTHON)}
    tested = {("CONTRIBUTING.md", ""), ("CONTRIBUTING.md", "mermaid"), ("docs/http.md", "json"),
              ("docs/attention.md", "json"), ("docs/compare.md", "json"), ("docs/agents.md", "json"),
              ("docs/compare.md", "text"),
              ("docs/engine-answers.md", "text"), ("docs/engine-answers.md", "yaml"),
              ("docs/deployment.md", "yaml"), ("docs/layers.md", "json"), ("docs/tutorial-by-hand.md", "text"),
              ("docs/tutorial-kernel.md", "text"), ("docs/tutorial-kernel.md", "diff"),
              ("docs/tutorial-model.md", "text")}  # fmt: skip
    assert {(page, language) for page, language in others if page != "docs/clients.md"} == tested


def test_the_curl_command_of_the_docs_gives_the_response_that_they_show(address: str) -> None:
    """The request is that of a notebook, and the numbers of the response are those that the notebook prints."""
    block = one("docs/http.md", "sh", "curl")
    words = shlex.split(block.text)
    defaults = Settings.model_construct()
    assert words[1] == f"http://{defaults.host}:{defaults.port}/attention"
    (case,) = (case for case in CASES if case.name == "animals_two_queries")
    assert json.loads(words[words.index("-d") + 1]) == case.request
    answer = json.loads(block.run(address))
    shown = json.loads(one("docs/http.md", "json").text)
    for expected in case.expected:
        expected.compare(answer)
        np.testing.assert_allclose(shown[expected.name], answer[expected.name], rtol=0, atol=5.01e-9)
    metadata = shown.pop("metadata")
    assert metadata.items() <= answer["metadata"].items()
    assert shown.keys() == answer.keys() - {"metadata"}


def test_python_client_examples_run(address: str) -> None:
    """The examples that need neither another language nor a generator."""
    examples = [block for block in BLOCKS if (block.page, block.language) == ("docs/clients.md", PYTHON)]
    for expression, value, said in [shown for block in examples for shown in block.execute(address)]:
        assert value == said, expression
    answer = json.loads(one("docs/clients.md", SHELL, "curl").run(address))
    assert answer["output"]


def test_safetensors_writes_bfloat16_for_numpy_but_does_not_read_it() -> None:
    """As docs/formats.md says. If this fails, the library has learned it, and the page can be shorter."""
    content = safetensors.numpy.save({"input": np.eye(2).astype(ml_dtypes.bfloat16)})
    with pytest.raises(KeyError, match="BF16"):
        safetensors.numpy.load(content)


def test_a_browser_lets_the_web_page_send_and_read_its_headers() -> None:
    """What a browser asks the service before it sends the request of the page, and what the page may then read."""
    page = one("docs/clients.md", "html").text
    sent = set(re.findall(r'"([A-Z][a-z]+(?:-[A-Z][a-z]+)*)"(?=: |\] = )', page))
    read = set(re.findall(r'headers\.get\("([^"]+)"\)', page))
    assert (sent, read) == ({"Content-Type", "Authorization"}, {"Retry-After", "X-Request-ID"})
    section = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8").split("\n## A web page\n")[1].split("```")[0]
    may_send, may_read = (
        set(re.findall(r"`([A-Za-z]+(?:-[A-Z][A-Za-z]+)*)`", part)) for part in section.split("and read")
    )
    assert sent < may_send
    assert read < may_read
    origin = {"Origin": "https://app.example"}
    with serving(app(api_keys=f"sha256:{'0' * 64}", cors_origins=origin["Origin"])) as client:
        asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": ",".join(sorted(may_send))}
        preflight = client.options("/attention", headers=origin | asked)
        assert preflight.status_code == 200, preflight.text
        refused = client.post("/attention", json={}, headers=origin)
        assert refused.headers["access-control-allow-origin"] == origin["Origin"]
        assert set(refused.headers["access-control-expose-headers"].split(", ")) == may_read


def test_the_typed_array_of_the_docs_has_the_described_numbers(client: httpx.Client) -> None:
    array = one("docs/attention.md", "json").text
    answer = client.post("/attention", json={"input": json.loads(array)}).json()
    assert answer["output"] == [[1, -2]]
    assert answer["metadata"]["dtype"] == "float32"


def test_the_first_request_of_the_site_gives_the_response_that_it_shows(address: str) -> None:
    block = one("docs/install.md", SHELL, "curl")
    weights = json.loads(block.run(address))["attention_weights"]
    assert weights[0] == [1, 0, 0]
    np.testing.assert_allclose(np.sum(weights, axis=-1), 1, rtol=1e-15)


def assert_shows(shown: Any, found: Any) -> None:
    """An abbreviated report agrees with the whole one: names may be left out, numbers are rounded to three digits."""
    if isinstance(shown, dict):
        for name, value in shown.items():
            assert_shows(value, found[name])
    elif isinstance(shown, list):
        for one, other in zip(shown, found, strict=True):
            assert_shows(one, other)
    elif isinstance(shown, float):
        assert found == pytest.approx(shown, rel=5e-3)
    else:
        assert shown == found


def test_the_first_comparison_gives_the_report_that_is_shown(address: str) -> None:
    report = json.loads(one("docs/compare.md", SHELL, "curl").run(address))
    assert_shows(json.loads(one("docs/compare.md", "json").text), report)


@pytest.mark.slow
def test_the_adapter_that_is_shown_is_right_and_needed() -> None:
    printed = one("docs/compare.md", SHELL, "cd ").run().splitlines()
    assert printed[0].startswith("correct")
    assert printed[1:] == ["exit status 3"]


@pytest.mark.slow
def test_an_agent_can_follow_its_page(tmp_path: Path) -> None:
    """The blocks of docs/agents.md, one after the other in an empty folder."""
    verdicts = []
    for block in (block for block in BLOCKS if block.page == "docs/agents.md"):
        if block.language == "json":
            assert_shows(json.loads(block.text), json.loads((tmp_path / "report.json").read_text(encoding="utf-8")))
            continue
        printed = block.run(folder=tmp_path)
        verdicts += re.findall(r"exit status \d|(?<=status\": \")\w+|^correct", printed)
    assert verdicts == ["exit status 1", "wrong", "correct", "correct"]


def test_all_judges_are_in_the_table() -> None:
    """The table is what `python -m benchmarks.judges` printed, which takes minutes."""
    page = (ROOT / "docs" / "judges.md").read_text(encoding="utf-8")
    for judge in JUDGES:
        assert f"\n| {judge.name} | {judge.inputs}" in page
        assert f"| {judge.rule} |" in page
        assert f"\n- **{judge.name}**: " in page
        assert all(source in page for source in judge.sources)


def test_the_kubernetes_overlay_has_this_version() -> None:
    assert f"newTag: {__version__}\n" in one("docs/deployment.md", "yaml").text


def test_all_files_name_the_same_versions_of_python() -> None:
    """The image has one of them, and the wheels of dependencies are asked for in each."""
    classifiers = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text())
    for page in ("README.md", "docs/install.md", "docs/notebooks.md", "CONTRIBUTING.md"):
        assert f"Python {classifiers[0]} to {classifiers[-1]}" in (ROOT / page).read_text(), page
    pythons = re.search(r"^PYTHONS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert pythons
    assert pythons[1].split()[: len(classifiers)] == classifiers
    for name, image in (
        ("Dockerfile", "BASE_IMAGE=python:"),
        ("deploy/local-base-image", "PYTHON_IMAGE=localhost/python:"),
    ):
        version = re.search(rf"{image}(3\.\d+)-slim$", (ROOT / name).read_text(), re.MULTILINE)
        assert version
        assert version[1] in classifiers, name


def test_all_described_packages_exist() -> None:
    names = re.findall(r"^  (\S+) ", one("CONTRIBUTING.md", "", "service/attention_service/").text, re.MULTILINE)
    assert len(names) > 10
    assert [name for name in names if not (ROOT / "service" / "attention_service" / name).exists()] == []


def test_the_modules_that_the_pipeline_names_exist() -> None:
    section = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("\n## The pipeline in ten lines\n")[1]
    names = re.findall(r"`([a-z_]+/(?:[a-z_]+\.py)?)`", section.split("\n## ")[0])
    assert len(names) > 15
    assert [name for name in names if not (ROOT / "service" / "attention_service" / name).exists()] == []


def test_the_memory_budget_is_defined_in_one_place() -> None:
    """By the setting; no other page, manifest or compose file repeats its default or sets it."""
    repeated = re.compile(r"half of (the|its)\s+(available\s+)?memory|available\s+memory", re.IGNORECASE)
    pages = [page for page in PAGES if page.name not in ("settings.md", "CHANGELOG.md")]
    assert [page.name for page in pages if repeated.search(page.read_text(encoding="utf-8"))] == []
    files = [ROOT / "docker-compose.yml", *(ROOT / "deploy" / "kubernetes").rglob("*.yaml")]
    assert [file.name for file in files if "MEMORY_LIMIT" in file.read_text(encoding="utf-8")] == []


def test_every_field_is_documented() -> None:
    page = (ROOT / "docs" / "attention.md").read_text(encoding="utf-8")
    for name in [*AttentionRequest.model_fields, *get_args(Output)]:
        assert f"`{name}`" in page or f'"{name}"' in page, name


def test_every_setting_and_error_code_is_documented() -> None:
    settings = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert all(f"`ATTENTION_{name.upper()}`" in settings for name in Settings.model_fields)
    errors = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    assert all(f"`{code}`" in errors for code in error_classes())
