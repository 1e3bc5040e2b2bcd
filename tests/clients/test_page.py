"""The web page of docs/clients.md, with a service that requires API keys. Node.js runs its script.

A browser also enforces CORS; tests/test_docs.py compares the headers of the page with those that the service allows.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from benchmarks.serving import free_port
from tests.conftest import app, serving
from tests.helpers.documents import ADDRESS, BLOCKS

KEY = "correct horse"
# The elements of the page: a form with the key, and a place where the script shows text, which is printed.
ELEMENTS = """let submit;
const elements = {
  form: { elements: { key: { value: %s } }, addEventListener: (name, run) => { submit = run; } },
  pre: { set textContent(text) { console.log(text); } },
};
globalThis.document = { querySelector: (name) => elements[name] };
%s
await submit({ preventDefault() {} });
"""


def program(page: str, key: str) -> str:
    """The script of a page as a program for Node.js that enters the key, submits the form, and prints what is shown."""
    (script,) = re.findall(r"<script type=\"module\">(.*?)</script>", page, re.DOTALL)
    return ELEMENTS % (json.dumps(key), script)


@pytest.fixture(scope="module")
def protected() -> Iterator[httpx.Client]:
    with serving(app(api_keys=f"sha256:{hashlib.sha256(KEY.encode()).hexdigest()}")) as client:
        yield client


def shown(folder: Path, address: str, key: str) -> str:
    """What the page shows after the form is submitted."""
    (page,) = (block.text for block in BLOCKS if block.language == "html")
    file = folder / "page.mjs"
    file.write_text(program(page, key).replace(ADDRESS, address))
    return subprocess.run(["node", file], capture_output=True, text=True, check=True).stdout


def test_the_page_shows_the_weights(protected: httpx.Client, tmp_path: Path) -> None:
    weights = json.loads(shown(tmp_path, protected.base_url.netloc.decode(), KEY))
    assert weights[0] == [1, 0], "the first token attends to itself only"
    assert sum(weights[1]) == pytest.approx(1)


@pytest.mark.parametrize("key", ["", "wrong"])
def test_the_page_shows_a_problem_with_its_request_id(key: str, protected: httpx.Client, tmp_path: Path) -> None:
    text = shown(tmp_path, protected.base_url.netloc.decode(), key)
    assert re.fullmatch(r"unauthorized: expected .* \(request [0-9a-f]{32}\)\n", text)


def test_the_page_says_that_there_is_no_response(tmp_path: Path) -> None:
    assert shown(tmp_path, f"127.0.0.1:{free_port()}", KEY) == "no response: fetch failed\n"
