"""Keys: who may call, and what is open to everybody."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.http.auth import OPEN
from service.settings.keys import Keys, new_key, parse_hashes, read_hashes
from tests.conftest import app, serving

GOOD: dict[str, Any] = {"query": [[1.0]], "key": [[1.0]], "value": [[2.0]]}
KEY, HASH = "correct horse", f"sha256:{hashlib.sha256(b'correct horse').hexdigest()}"


@pytest.fixture(scope="module")
def guarded() -> Iterator[httpx.Client]:
    with serving(app(api_keys=f" {HASH}, {new_key()[1]}", protect_metrics=True)) as client:
        yield client


@pytest.mark.parametrize(
    "header",
    [None, "Bearer", "Bearer wrong", f"Basic {KEY}", KEY, f"Bearer {HASH}", f"Bearer {KEY}x", "Bearer \xff"],
)
def test_without_a_key_nobody_computes(guarded: httpx.Client, header: str | None) -> None:
    headers = {} if header is None else {b"Authorization": header.encode("latin-1")}
    response = guarded.post("/attention", json=GOOD, headers=headers)
    assert (response.status_code, response.json()["code"]) == (401, "unauthorized")
    assert response.headers["WWW-Authenticate"] == "Bearer"
    assert KEY not in response.text
    assert "wrong" not in response.text


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_with_a_key(guarded: httpx.Client, scheme: str) -> None:
    response = guarded.post("/attention", json=GOOD, headers={"Authorization": f"{scheme} {KEY}"})
    assert response.json()["output"] == [[2.0]]


def test_every_route_but_health_needs_a_key(guarded: httpx.Client) -> None:
    """Walks the routes that there are, so that a new one cannot be forgotten; the API document says the same."""
    documented = app().openapi()["paths"]
    assert {path for path, item in documented.items() if item.get("get", {}).get("security") == []} == OPEN
    paths = set(documented) | {"/", "/docs", "/openapi.json", "/docs-assets/x", "/no"}
    assert len(paths) >= 9
    for path in paths:
        for method in ("GET", "POST"):
            status = guarded.request(method, path.replace("{code}", "busy")).status_code
            assert (status != 401) == path.startswith("/health/"), f"{method} {path}: {status}"


def test_metrics_are_open_by_default() -> None:
    with serving(app(api_keys=HASH)) as client:
        assert client.get("/metrics").status_code == 200
        assert client.get("/docs").status_code == 401


def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each known hash is compared, whether or not one before matched, by the function made for it."""
    compared = []
    real = hmac.compare_digest

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return real(one, other)

    monkeypatch.setattr("hmac.compare_digest", compare)
    keys = Keys(",".join([HASH, *(new_key()[1] for _ in range(4))]), None)
    for header, admitted in ((f"Bearer {KEY}", True), ("Bearer x", False), ("", False)):
        compared.clear()
        assert keys.admit(header.encode()) == admitted
        assert compared == [(32, 32)] * 5


def test_a_file_of_keys_is_read_again(tmp_path: Path) -> None:
    file, (key, hashed) = tmp_path / "keys", new_key()
    file.write_text(f"# people\n{HASH}  # Ada\n\n")
    keys = Keys("", file, reload=0)
    assert keys.admit(f"Bearer {KEY}".encode())
    assert not keys.admit(f"Bearer {key}".encode())
    file.write_text(hashed)
    os.utime(file, (1, 1))
    assert keys.admit(f"Bearer {key}".encode())
    assert not keys.admit(f"Bearer {KEY}".encode())
    file.write_text("nonsense")
    os.utime(file, (2, 2))
    assert keys.admit(f"Bearer {key}".encode()), "those known go on to be valid"


def test_text_that_is_no_hash_is_refused_without_being_quoted(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="hash 2 is not the hash of a key") as error:
        parse_hashes(f"{HASH}, my-secret")
    assert "my-secret" not in str(error.value)
    file = tmp_path / "keys"
    file.write_text(f"# people\n{HASH}  # Ada\n\nmy-secret")
    with pytest.raises(ValueError, match="line 4 is not the hash of a key") as error:
        read_hashes(file)
    assert "my-secret" not in str(error.value)


def test_commas_without_a_hash_are_a_mistake_and_no_open_door() -> None:
    assert parse_hashes("") == parse_hashes(" ") == frozenset()
    assert parse_hashes(f"{HASH},") == {hashlib.sha256(KEY.encode()).digest()}
    with pytest.raises(ValueError, match="no hash between the commas"):
        parse_hashes(" , ")


def test_pages_of_other_origins_call_only_if_they_may() -> None:
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


def test_security_headers(client: httpx.Client) -> None:
    page = client.get("/docs")
    assert "frame-ancestors 'none'" in page.headers["content-security-policy"]
    for response in (page, client.get("/health/live"), client.get("/nothing")):
        assert response.headers["x-content-type-options"] == "nosniff"
