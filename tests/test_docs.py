"""The README and the docs are right: their commands, requests and programs run unmodified, their links have targets."""

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

# Blocks that cannot run here, by page and first words, each with what runs it instead, or why nothing does.
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
    if "/attention" in block.text or "compute" in block.text:
        assert {"output", "outputs"} & json.loads(printed).keys(), printed


@pytest.mark.parametrize("block", [block for block in HERE if block.language == PYTHON], ids=str)
def test_python_examples_run(block: Block, address: str) -> None:
    """Each expression with a comment behind it has the value of the comment."""
    shown = block.execute(address)
    assert shown, "nothing that could be compared"
    for expression, value, said in shown:
        assert value == said, expression


@pytest.mark.parametrize(("page", "start"), ELSEWHERE)
def test_blocks_that_other_tests_run_exist_and_are_run_there(page: str, start: str) -> None:
    assert any((page, start) in entries_of(block) for block in BLOCKS), "no block begins like this any more"
    runner = ROOT / ELSEWHERE[page, start][0]
    assert runner.is_dir() or Path(page).name in runner.read_text(encoding="utf-8"), "its runner does not name the page"


def test_all_blocks_have_languages_that_are_tested() -> None:
    """No test would run a block of another language."""
    others = {(block.page, block.language) for block in BLOCKS if block.language not in (SHELL, PYTHON)}
    tested = {("README.md", "json"), ("CONTRIBUTING.md", ""), ("CONTRIBUTING.md", "mermaid"),
              ("docs/attention.md", "json"),
              ("docs/deployment.md", "yaml")}  # fmt: skip
    assert {(page, language) for page, language in others if page != "docs/clients.md"} == tested


def test_the_curl_command_of_the_readme_gives_the_response_that_it_shows(address: str) -> None:
    """The request is that of a notebook, and the numbers of the response are those that the notebook prints."""
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


def test_python_client_examples_run(address: str) -> None:
    """The examples that need neither another language nor a generator."""
    for expression, value, said in one("docs/clients.md", PYTHON).execute(address):
        assert value == said, expression
    answer = json.loads(one("docs/clients.md", SHELL, "curl").run(address))
    assert answer["output"]


def test_the_typed_array_of_the_docs_has_the_described_numbers(client: httpx.Client) -> None:
    array = one("docs/attention.md", "json").text
    answer = client.post("/attention", json={"input": json.loads(array)}).json()
    assert answer["output"] == [[1, -2]]
    assert answer["metadata"]["dtype"] == "float32"


def test_the_first_request_of_the_site_gives_the_response_that_it_shows(address: str) -> None:
    block = one("docs/index.md", SHELL, "curl")
    weights = json.loads(block.run(address))["attention_weights"]
    assert weights[0] == [1, 0, 0]
    np.testing.assert_allclose(np.sum(weights, axis=-1), 1, rtol=1e-15)


def test_the_kubernetes_overlay_has_this_version() -> None:
    assert f"newTag: {__version__}\n" in one("docs/deployment.md", "yaml").text


def test_all_described_packages_exist() -> None:
    names = re.findall(r"^  (\S+) ", one("CONTRIBUTING.md", "", "service/").text, re.MULTILINE)
    assert len(names) > 10
    assert [name for name in names if not (ROOT / "service" / name).exists()] == []


def test_the_modules_that_the_pipeline_names_exist() -> None:
    section = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("\n## The pipeline in ten lines\n")[1]
    names = re.findall(r"`([a-z_]+/(?:[a-z_]+\.py)?)`", section.split("\n## ")[0])
    assert len(names) > 15
    assert [name for name in names if not (ROOT / "service" / name).exists()] == []


def test_every_field_is_documented() -> None:
    page = (ROOT / "docs" / "attention.md").read_text(encoding="utf-8")
    for name in [*AttentionRequest.model_fields, *get_args(Output)]:
        assert f"`{name}`" in page or f'"{name}"' in page, name


def test_every_setting_and_error_code_is_documented() -> None:
    settings = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert all(f"`ATTENTION_{name.upper()}`" in settings for name in Settings.model_fields)
    errors = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    assert all(f"`{code}`" in errors for code in error_classes())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_all_links_have_targets(page: Path) -> None:
    """Links within the project lead to a file and heading that exist; other links are well formed."""
    for link in links(page):
        target = urlsplit(link)
        if target.scheme or target.netloc:
            assert re.fullmatch(r"https://([a-z0-9-]+\.)+[a-z]+(/[!-~]*)?", link), link
            continue
        file = page.parent / target.path if target.path else page
        assert file.exists(), link
        assert not target.fragment or target.fragment in anchors(file), link


def test_every_page_of_the_site_is_in_the_menu() -> None:
    menu = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(menu) == sorted(str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md"))


def test_every_mentioned_make_target_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        for target in re.findall(r"(?:`|^)make ([a-z-]+)", page.read_text(encoding="utf-8"), re.MULTILINE):
            assert target in targets, f"{page.name}: make {target}"
