"""The page at /: its files, their headers, and what it may load. `make test-page` tests it in a browser."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from urllib.parse import urljoin

import httpx
import pytest

from service.routes.page import FOLDER, MEDIA_TYPES, POLICY, page_files
from tests.cases import CASES
from tests.conftest import app, serving
from tests.test_auth import HASH

MODULES = sorted(FOLDER.glob("*.js"))
LARGEST = 60 * 1024  # bytes of all modules


@pytest.fixture(scope="module")
def protected() -> Iterator[httpx.Client]:
    with serving(app(api_keys=HASH)) as client:
        yield client


@pytest.mark.parametrize("path", ["/", *(f"/page/{name}" for name in page_files())])
def test_every_file_has_its_type_and_strict_headers(client: httpx.Client, path: str) -> None:
    response = client.get(path)
    assert response.status_code == 200
    name = path.rpartition("/")[2] or "index.html"
    assert response.content == (FOLDER / name).read_bytes()
    assert response.headers["content-type"] == MEDIA_TYPES[f".{name.rpartition('.')[2]}"]
    assert response.headers.get_list("content-security-policy") == [POLICY]
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"
    assert response.headers["cache-control"] == "no-cache"


def test_a_file_that_the_client_has_is_not_sent_again(client: httpx.Client) -> None:
    tag = client.get("/page/app.js").headers["etag"]
    for sent in (tag, f'"other", W/{tag}'):
        again = client.get("/page/app.js", headers={"If-None-Match": sent})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    assert client.get("/page/app.js", headers={"If-None-Match": '"other"'}).status_code == 200


@pytest.mark.parametrize(
    "name", ["", "no.js", "types.d.ts", "..%2fversion.py", "%2e%2e%2fapp.py", "app.js%00", "APP.JS"]
)
def test_only_files_of_the_page_are_sent(client: httpx.Client, name: str) -> None:
    assert client.get(f"/page/{name}").status_code == 404


def test_the_page_needs_no_key_but_its_requests_do(protected: httpx.Client) -> None:
    for path in ("/", "/page/app.js", "/page/examples.json"):
        assert protected.get(path).status_code == 200
    assert protected.post("/attention", json={"input": [[1.0]]}).status_code == 401
    with serving(app(api_keys=HASH, protect_docs=True)) as client:
        for path in ("/", "/page/app.js"):
            assert client.get(path).status_code == 401


def test_the_page_is_not_in_the_api_document() -> None:
    assert not [path for path in app().openapi()["paths"] if path == "/" or path.startswith("/page")]


def test_addresses_are_relative_so_that_the_page_works_below_a_prefix() -> None:
    """Every file that the page or a module names exists."""
    page = (FOLDER / "index.html").read_text(encoding="utf-8")
    links = [link for link in re.findall(r'(?:src|href)="([^"]*)"', page) if not link.startswith("data:")]
    assert {urljoin("/x/", link) for link in links} == {"/x/page/page.css", "/x/page/app.js", "/x/docs"}
    for module in MODULES:
        text = module.read_text(encoding="utf-8")
        imported = re.findall(r'^import .* from "\./(.*)";$', text, re.MULTILINE)
        assert len(imported) == len(re.findall(r"^import\b", text, re.MULTILINE)), module.name
        assert all((FOLDER / name).is_file() for name in imported), module.name
        assert not re.search(r'(?:fetch|post|fetchText)\((?:"|`)(?:/|https?:)', text), module.name


def test_the_page_has_no_inline_scripts_and_styles_and_parses_no_html() -> None:
    page = (FOLDER / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<style|\bstyle=|\bon\w+=|<script(?![^>]*\bsrc=)", page)
    for module in MODULES:
        assert not re.search(r"innerHTML|insertAdjacentHTML|\beval\(|document\.write", module.read_text("utf-8")), (
            module
        )


def test_all_modules_together_are_small() -> None:
    assert sum(module.stat().st_size for module in MODULES) <= LARGEST


def test_the_examples_are_the_golden_cases() -> None:
    examples = json.loads((FOLDER / "examples.json").read_text(encoding="utf-8"))
    golden = {case.name: {"title": case.title, "source": case.source, "request": case.request} for case in CASES}
    assert examples == golden
