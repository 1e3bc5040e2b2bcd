"""API keys: which operations require them, and how they are checked."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import httpx
import pytest
from fastapi import FastAPI

from attention_service.http.auth import BELOW_DOCS, DOCS, METRICS, OPEN
from attention_service.settings.certificate import Certificate
from attention_service.settings.checks import check_certificate, check_private_key
from attention_service.settings.keys import Keys, new_key, parse_hashes, read_hashes
from tests.conftest import app, serving
from tests.helpers.documents import ROOT

GOOD: dict[str, Any] = {"query": [[1.0]], "key": [[1.0]], "value": [[2.0]]}
KEY, HASH = "correct horse", f"sha256:{hashlib.sha256(b'correct horse').hexdigest()}"


@pytest.fixture(scope="module")
def client_of_protected() -> Iterator[httpx.Client]:
    with serving(app(api_keys=f" {HASH}, {new_key()[1]}", protect_metrics=True, protect_docs=True)) as client:
        yield client


@pytest.mark.parametrize(
    "header",
    [None, "Bearer", "Bearer wrong", f"Basic {KEY}", KEY, f"Bearer {HASH}", f"Bearer {KEY}x", "Bearer \xff"],
)
def test_requests_without_a_valid_key_get_a_401(client_of_protected: httpx.Client, header: str | None) -> None:
    headers = {} if header is None else {b"Authorization": header.encode("latin-1")}
    response = client_of_protected.post("/attention", json=GOOD, headers=headers)
    assert (response.status_code, response.json()["code"]) == (401, "unauthorized")
    assert response.headers["WWW-Authenticate"] == "Bearer"
    assert KEY not in response.text
    assert "wrong" not in response.text


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_requests_with_a_valid_key_are_answered(client_of_protected: httpx.Client, scheme: str) -> None:
    response = client_of_protected.post("/attention", json=GOOD, headers={"Authorization": f"{scheme} {KEY}"})
    assert response.json()["output"] == [[2.0]]


def without_security(service: FastAPI) -> set[str]:
    """The paths that need no key, as the API document of this service says."""
    paths = service.openapi()["paths"].items()
    return {path for path, item in paths if any(operation.get("security") == [] for operation in item.values())}


def test_every_route_except_health_needs_a_key(client_of_protected: httpx.Client) -> None:
    """The test lists all routes of the application, so that it covers new ones; the API document agrees."""
    documented = app().openapi()["paths"]
    assert without_security(app()) == OPEN
    assert without_security(app(api_keys=HASH, protect_metrics=True, protect_docs=True)) == OPEN
    paths = set(documented) | {"/", "/docs", "/openapi.json", "/docs-assets/x", "/page/app.js", "/no"}
    assert len(paths) >= 9
    for path in paths:
        for method in ("GET", "POST"):
            status = client_of_protected.request(method, path.replace("{code}", "busy")).status_code
            assert (status != 401) == path.startswith("/health/"), f"{method} {path}: {status}"


def test_metrics_and_documentation_need_no_key_by_default() -> None:
    """Nothing else is open, whatever its path begins with; the API document agrees."""
    assert without_security(app(api_keys=HASH)) == OPEN | {"/metrics", "/problems/{code}"}
    with serving(app(api_keys=HASH)) as client:
        for path in (
            "/",
            "/page/app.js",
            "/metrics",
            "/docs",
            "/openapi.json",
            "/docs-assets/swagger-ui.css",
            "/problems/busy",
        ):
            assert client.get(path).status_code == 200, path
        for path in ("/attention", "/docs/x", "/docsx", "/openapi.json/x", "/problems", "/v2", "/no"):
            assert client.get(path).status_code == 401, path
    with serving(app(api_keys=HASH, protect_metrics=True)) as client:
        assert client.get("/metrics").status_code == 401
        assert client.get("/docs").status_code == 200


def test_the_page_about_security_lists_the_open_paths() -> None:
    """The table has exactly the paths that the service leaves open; … stands for a rest."""
    text = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`/.*?) \|.*\|$", text.partition("## Guarantees")[0], re.MULTILINE)
    health, metrics, documentation = (set(re.findall(r"`(/[^`]*)`", row)) for row in rows)
    assert health == OPEN
    assert metrics == {METRICS}
    assert documentation == DOCS | {f"{start}…" for start in BELOW_DOCS}


def test_the_documentation_page_of_a_protected_server_works_in_a_browser() -> None:
    """The page, its scripts and the API document load without a key; the document says how operations get theirs."""
    with serving(app(api_keys=HASH)) as client:
        page = client.get("/docs")
        assert page.status_code == 200
        for asset in re.findall(r"""(?:src|href)=["']([^"']+)["']""", page.text):
            assert client.get(urljoin("/docs", asset)).status_code == 200, asset
        address = re.search(r"""url: ["']([^"']+)["']""", page.text)
        assert address is not None
        document = client.get(address[1]).json()
        ((name, scheme),) = document["components"]["securitySchemes"].items()
        assert (scheme["type"], scheme["scheme"]) == ("http", "bearer")
        assert document["security"] == [{name: []}]
        assert "security" not in document["paths"]["/attention"]["post"]
        refused = client.post("/attention", json=GOOD)
        assert refused.status_code == 401
        assert client.get(refused.json()["type"]).json()["code"] == "unauthorized", "the link of a problem opens"
        answer = client.post("/attention", json=GOOD, headers={"Authorization": f"{scheme['scheme']} {KEY}"})
        assert answer.json()["output"] == [[2.0]]


def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each known hash is compared by compare_digest, even after a match."""
    compared = []
    real = hmac.compare_digest

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return real(one, other)

    monkeypatch.setattr("hmac.compare_digest", compare)
    keys = Keys(",".join([HASH, *(new_key()[1] for _ in range(4))]), None)
    for header, admitted in ((f"Bearer {KEY}", True), ("Bearer x", False), ("", False)):
        compared.clear()
        assert (keys.find(header.encode()) is not None) == admitted
        assert compared == [(32, 32)] * 5


def test_a_changed_file_of_keys_is_read_again(tmp_path: Path) -> None:
    file, (key, hashed) = tmp_path / "keys", new_key()
    file.write_text(f"# people\n{HASH}  # Ada\n\n")
    keys = Keys("", file, reload=0)
    assert keys.find(f"Bearer {KEY}".encode()) == ""
    assert keys.find(f"Bearer {key}".encode()) is None
    file.write_text(hashed)
    os.utime(file, (1, 1))
    assert keys.find(f"Bearer {key}".encode()) == ""
    assert keys.find(f"Bearer {KEY}".encode()) is None
    file.write_text("nonsense")
    os.utime(file, (2, 2))
    assert keys.find(f"Bearer {key}".encode()) == "", "those known go on to be valid"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")
def test_a_pipe_in_place_of_the_file_of_keys_does_not_block(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The keys stay valid. A symbolic link to a file, as Kubernetes mounts secrets, is read."""
    (tmp_path / "secret").write_text(HASH)
    file = tmp_path / "keys"
    file.symlink_to("secret")
    keys = Keys("", file, reload=0)
    file.unlink()
    os.mkfifo(file)
    assert keys.find(f"Bearer {KEY}".encode()) == ""
    assert "cannot be read again" in caplog.text
    with pytest.raises(OSError, match="no regular file"):
        Keys("", file)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")
@pytest.mark.parametrize("name", ["certificate.pem", "key.pem"])
def test_a_pipe_in_place_of_a_certificate_or_key_does_not_block(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """The last certificate stays."""
    files = tmp_path / "certificate.pem", tmp_path / "key.pem"
    for file in files:
        file.symlink_to(Path(__file__).parent / "tls" / "localhost.pem")
    loaded = iter(["first", "second"])
    certificate = Certificate(*files, lambda: next(loaded), reload=0)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    assert certificate.current() == "first"
    assert "no regular file" in caplog.text
    with pytest.raises(ValueError, match="no regular file"):
        check_private_key(*files)
    if name == "certificate.pem":
        with pytest.raises(ValueError, match="no regular file"):
            check_certificate(files[0])


def test_text_that_is_not_a_hash_is_refused_without_quoting_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="hash 2 is not the hash of a key") as error:
        parse_hashes(f"{HASH}, my-secret")
    assert "my-secret" not in str(error.value)
    file = tmp_path / "keys"
    file.write_text(f"# people\n{HASH}  # Ada\n\nmy-secret")
    with pytest.raises(ValueError, match="line 4 is not the hash of a key") as error:
        read_hashes(file)
    assert "my-secret" not in str(error.value)


def test_a_hash_may_have_a_name(tmp_path: Path) -> None:
    """A name of a key, which the log shows; a comment is none."""
    other = f"sha256:{'0' * 64}"
    (tmp_path / "keys").write_text(f"{HASH}\t Ada Lovelace  # laboratory\n{other}  # Eve\n")
    names = [*read_hashes(tmp_path / "keys").values()]
    assert names == [*parse_hashes(f"{HASH} Ada Lovelace, {other}").values()] == ["Ada Lovelace", ""]
    assert Keys("", tmp_path / "keys").find(f"Bearer {KEY}".encode()) == "Ada Lovelace"
    assert Keys(f"{HASH} a", None).find(b"Bearer other") is None


@pytest.mark.parametrize("name", ["x" * 65, "a\x1b[31m", "é", "a\tb"])
def test_a_name_that_is_no_short_plain_text_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="hash 1 is not the hash of a key"):
        parse_hashes(f"{HASH} {name}")


def test_api_keys_of_commas_only_are_an_error() -> None:
    assert parse_hashes("") == parse_hashes(" ") == {}
    assert parse_hashes(f"{HASH},") == {hashlib.sha256(KEY.encode()).digest(): ""}
    with pytest.raises(ValueError, match="no hash between the commas"):
        parse_hashes(" , ")


def test_only_allowed_origins_get_cors_headers() -> None:
    preflight = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST",
                 "Access-Control-Request-Headers": "authorization"}  # fmt: skip
    with serving(app(cors_origins="https://a.example", api_keys=HASH)) as client:
        allowed = client.options("/attention", headers=preflight)
        assert allowed.headers["access-control-allow-origin"] == "https://a.example"
        other = client.options("/attention", headers=preflight | {"Origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers
        refused = client.post("/attention", json=GOOD, headers={"Origin": "https://a.example"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://a.example", "so that the page can read why"
    with serving(app()) as client:
        assert client.options("/attention", headers=preflight).status_code == 405


@pytest.mark.parametrize(
    "name", ["authorization", "content-type", "x-request-id", "traceparent", "tracestate", "x-other"]
)
def test_pages_may_send_ids_and_trace_contexts(name: str) -> None:
    preflight = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST",
                 "Access-Control-Request-Headers": name}  # fmt: skip
    with serving(app(cors_origins="*")) as client:
        response = client.options("/attention", headers=preflight)
        allowed = response.headers["access-control-allow-headers"].lower().split(", ")
        assert (response.status_code == 200) == (name in allowed) == (name != "x-other")


def test_responses_have_security_headers(client: httpx.Client) -> None:
    page = client.get("/docs")
    assert "frame-ancestors 'none'" in page.headers["content-security-policy"]
    for response in (page, client.get("/health/live"), client.get("/nothing")):
        assert response.headers["x-content-type-options"] == "nosniff"
