"""What the README and the docs say is so: their commands and requests run as they stand there, their links lead on."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import get_args
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest

from service.attention.spec import Output
from service.errors import error_classes
from service.schemas.request import AttentionRequest
from service.settings import Settings
from service.version import __version__
from tests.cases import CASES
from tests.helpers.documents import BLOCKS, PAGES, ROOT, Block, anchors, links

# What cannot run here, by its page and how it begins: what runs it instead, and why.
ELSEWHERE = {
    ("README.md", "make serve "): ("deploy/release-check", "installs an environment; make test is what runs this"),
    ("docs/index.md", "make serve\n"): ("deploy/release-check", "installs an environment"),
    ("docs/deployment.md", "make image\n"): ("tests/image/test_docs.py", "needs docker or podman"),
    ("docs/deployment.md", "docker compose up "): ("tests/image/test_docs.py", "needs docker or podman"),
    ("docs/deployment.md", "kubectl apply "): (
        "tests/image/test_docs.py",
        "needs a cluster; what it would send is made",
    ),
    ("docs/inference-protocol.md", "import numpy"): ("tests/clients/test_docs.py", "needs tritonclient"),
    ("docs/inference-protocol.md", "import asyncio"): ("tests/clients/test_docs.py", "needs kserve"),
    ("docs/inference-protocol.md", "pip install"): ("tests/clients/test_docs.py", "serves until it is stopped"),
    ("docs/clients.md", ""): ("tests/clients", "needs other languages and generators"),
}
# What is neither a command nor a request has tests of its own below.
SHELL, PYTHON = "sh", "python"


def elsewhere(block: Block) -> list[tuple[str, str]]:
    """The entries for a block above."""
    return [(page, start) for page, start in ELSEWHERE if page == block.page and block.text.startswith(start)]


HERE = [block for block in BLOCKS if block.language in (SHELL, PYTHON) and not elsewhere(block)]


def one(page: str, language: str, start: str = "") -> Block:
    """The only such block."""
    (found,) = (b for b in BLOCKS if (b.page, b.language) == (page, language) and b.text.startswith(start))
    return found


@pytest.fixture(scope="module")
def address(client: httpx.Client) -> str:
    return client.base_url.netloc.decode()


@pytest.mark.parametrize("block", [block for block in HERE if block.language == SHELL], ids=str)
def test_commands_and_requests_run(block: Block, address: str) -> None:
    """By the shell; and what comes back from the service is no error."""
    if "curl" in block.text and shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    printed = block.run(address)
    assert printed
    if "/attention" in block.text or "compute" in block.text:
        assert {"output", "outputs"} & json.loads(printed).keys(), printed


@pytest.mark.parametrize("block", [block for block in HERE if block.language == PYTHON], ids=str)
def test_python_runs(block: Block, address: str) -> None:
    """And gives what the comments behind its expressions say."""
    shown = block.execute(address)
    assert shown, "nothing that could be compared"
    for expression, value, said in shown:
        assert value == said, expression


@pytest.mark.parametrize(("page", "start"), ELSEWHERE)
def test_what_does_not_run_here_is_still_there_and_runs_elsewhere(page: str, start: str) -> None:
    assert any((page, start) in elsewhere(block) for block in BLOCKS), "no block begins like this any more"
    runner = ROOT / ELSEWHERE[page, start][0]
    assert runner.is_dir() or Path(page).name in runner.read_text(encoding="utf-8"), "its runner does not name the page"


def test_blocks_are_of_languages_that_are_tested() -> None:
    """One of another language would be neither run nor looked at."""
    others = {(block.page, block.language) for block in BLOCKS if block.language not in (SHELL, PYTHON)}
    tested = {("README.md", "json"), ("CONTRIBUTING.md", ""), ("CONTRIBUTING.md", "mermaid"),
              ("docs/attention.md", "json"),
              ("docs/deployment.md", "yaml")}  # fmt: skip
    assert {(page, language) for page, language in others if page != "docs/clients.md"} == tested


def test_the_readme_s_curl_gives_the_answer_that_it_shows(address: str) -> None:
    """The request is a notebook's, and the answer shown is the one printed there."""
    block = one("README.md", "sh", "curl")
    words = shlex.split(block.text)
    defaults = Settings.model_construct()
    assert words[1] == f"http://{defaults.host}:{defaults.port}/attention"
    (case,) = (case for case in CASES if case.name == "animals_two_queries")
    assert json.loads(words[words.index("-d") + 1]) == case.request
    answer = json.loads(block.run(address))
    shown = json.loads(one("README.md", "json").text)
    for expected in case.expected:
        expected.compare(answer)
        np.testing.assert_allclose(shown[expected.name], answer[expected.name], rtol=0, atol=5.01e-9)
    metadata = shown.pop("metadata")
    assert metadata.items() <= answer["metadata"].items()
    assert shown.keys() == answer.keys() - {"metadata"}


def test_client_examples_run(address: str) -> None:
    """Those that need neither another language nor a generator."""
    for expression, value, said in one("docs/clients.md", PYTHON).execute(address):
        assert value == said, expression
    answer = json.loads(one("docs/clients.md", SHELL, "curl").run(address))
    assert answer["output"]


def test_json_in_docs_is_what_it_says(client: httpx.Client) -> None:
    array = one("docs/attention.md", "json").text
    answer = client.post("/attention", json={"input": json.loads(array)}).json()
    assert answer["output"] == [[1, -2]]
    assert answer["metadata"]["dtype"] == "float32"


def test_the_first_request_of_the_site_is_answered_as_it_says(address: str) -> None:
    block = one("docs/index.md", SHELL, "curl")
    weights = json.loads(block.run(address))["attention_weights"]
    assert weights[0] == [1, 0, 0]
    np.testing.assert_allclose(np.sum(weights, axis=-1), 1, rtol=1e-15)


def test_the_overlay_is_of_this_version() -> None:
    assert f"newTag: {__version__}\n" in one("docs/deployment.md", "yaml").text


def test_the_tree_is_as_described() -> None:
    names = re.findall(r"^  (\S+) ", one("CONTRIBUTING.md", "", "service/").text, re.MULTILINE)
    assert len(names) > 10
    assert [name for name in names if not (ROOT / "service" / name).exists()] == []


def test_the_modules_that_the_pipeline_names_exist() -> None:
    section = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("\n## The pipeline in ten lines\n")[1]
    names = re.findall(r"`([a-z_]+/(?:[a-z_]+\.py)?)`", section.split("\n## ")[0])
    assert len(names) > 15
    assert [name for name in names if not (ROOT / "service" / name).exists()] == []


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
    """Within the project to a file and a heading of it; elsewhere they are at least well formed."""
    for link in links(page):
        target = urlsplit(link)
        if target.scheme or target.netloc:
            assert re.fullmatch(r"https://([a-z0-9-]+\.)+[a-z]+(/[!-~]*)?", link), link
            continue
        file = page.parent / target.path if target.path else page
        assert file.exists(), link
        assert not target.fragment or target.fragment in anchors(file), link


def test_every_page_of_the_site_is_in_its_menu() -> None:
    menu = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(menu) == sorted(str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md"))


def test_every_make_target_that_is_named_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        for target in re.findall(r"(?:`|^)make ([a-z-]+)", page.read_text(encoding="utf-8"), re.MULTILINE):
            assert target in targets, f"{page.name}: make {target}"
