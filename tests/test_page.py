"""The page at /: its files, their headers, and what it may load. `make test-page` tests it in a browser."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from urllib.parse import urljoin

import httpx
import pytest

from attention_service.routes.page import FOLDER, MEDIA_TYPES, POLICY, page_files
from tests.cases import CASES
from tests.conftest import app, serving
from tests.test_auth import HASH

MODULES = sorted(FOLDER.glob("*.js"))
LARGEST = 92_200  # bytes of all modules, without comments on lines of their own
LARGEST_SENT = 60_000  # bytes of them that a browser receives, compressed


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
    assert client.get("/page/app.js", headers={"If-None-Match": "*"}).status_code == 304
    assert client.get("/page/app.js", headers={"If-None-Match": '"other"'}).status_code == 200
    stale = {"If-None-Match": '"other"', "If-Modified-Since": "Fri, 31 Dec 9999 23:59:59 GMT"}
    assert client.get("/page/app.js", headers=stale).status_code == 200, "RFC 9110, 13.1.3: the tag decides alone"


@pytest.mark.parametrize("path", ["/", "/page/app.js", "/openapi.json", "/docs-assets/swagger-ui.css"])
def test_head_has_the_headers_of_get_and_no_body(client: httpx.Client, path: str) -> None:
    head, whole = client.head(path), client.get(path)
    assert (head.status_code, head.content) == (200, b"")
    changing = ("date", "x-request-id")
    assert [one for one in head.headers.items() if one[0] not in changing] == [
        one for one in whole.headers.items() if one[0] not in changing
    ]
    assert int(head.headers["content-length"]) == whole.num_bytes_downloaded


def test_head_is_conditional_and_refused_where_get_is(client: httpx.Client, protected: httpx.Client) -> None:
    assert client.head("/", headers={"If-None-Match": "*"}).status_code == 304
    assert client.head("/page/no.js").status_code == 404
    refused = client.post("/page/app.js")
    assert (refused.status_code, set(refused.headers["allow"].split(", "))) == (405, {"GET", "HEAD"})
    assert protected.head("/page/app.js").status_code == 200


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
    modules = {f"/x/page/{module.name}" for module in MODULES}
    assert {urljoin("/x/", link) for link in links} == {
        "/x/page/page.css",
        "/x/page/examples.json",
        "/x/docs",
    } | modules
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


def test_the_page_names_its_modules_in_the_order_in_which_they_need_each_other() -> None:
    """A saved page joins them in this order; all but functions have to be there when a module runs."""
    page = (FOLDER / "index.html").read_text(encoding="utf-8")
    names = re.findall(r'rel="modulepreload" href="page/(.*)"', page)
    assert sorted(names) == [module.name for module in MODULES]
    for place, name in enumerate(names):
        imported = re.findall(r'from "\./(.*)";$', (FOLDER / name).read_text(encoding="utf-8"), re.MULTILINE)
        assert set(imported) <= set(names[:place]), name


def test_all_modules_together_are_small() -> None:
    lines = [line for module in MODULES for line in module.read_text(encoding="utf-8").splitlines(keepends=True)]
    assert sum(len(line.encode()) for line in lines if not re.match(r"\s*(//|/\*\*.*\*/$)", line)) <= LARGEST


@pytest.mark.parametrize("path", ["/", *(f"/page/{name}" for name in page_files())])
def test_every_file_is_compressed_for_clients_that_read_gzip(client: httpx.Client, path: str) -> None:
    packed = client.get(path, headers={"Accept-Encoding": "gzip, br"})
    plain = client.get(path, headers={"Accept-Encoding": "identity"})
    assert packed.headers["content-encoding"] == "gzip"
    assert "content-encoding" not in plain.headers
    assert packed.content == plain.content
    assert packed.num_bytes_downloaded < plain.num_bytes_downloaded
    assert packed.headers["vary"] == plain.headers["vary"] == "Accept-Encoding"
    assert packed.headers["etag"] != plain.headers["etag"]


def test_a_browser_receives_few_bytes_of_modules(client: httpx.Client) -> None:
    sent = [client.get(f"/page/{module.name}", headers={"Accept-Encoding": "gzip"}) for module in MODULES]
    assert sum(response.num_bytes_downloaded for response in sent) <= LARGEST_SENT


def test_the_examples_without_a_text_are_the_golden_cases() -> None:
    examples = json.loads((FOLDER / "examples.json").read_text(encoding="utf-8"))
    golden = {case.name: {"title": case.title, "source": case.source, "request": case.request} for case in CASES}
    assert {name: example for name, example in examples.items() if "text" not in example} == golden
