"""Which Host names are answered. On a loopback address these are the names of this machine only.

Otherwise a page of a stranger, whose name suddenly leads to 127.0.0.1 (DNS rebinding), could read stored layers.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from attention_service.server.run import is_loopback
from tests.attack.server import live
from tests.conftest import app, serving
from tests.helpers.waiting import TIMEOUT

LOCAL = (
    "localhost",
    "LOCALHOST",
    "a.localhost",
    "127.0.0.1",
    "127.9.8.7",
    "[::1]",
    "[0:0:0:0:0:0:0:1]",
    "[::ffff:127.0.0.1]",
)
FOREIGN = ("evil.example", "127.0.0.1.evil.example", "127.evil.example", "localhost.evil.example", "xlocalhost",
           "192.0.2.1", "[2001:db8::1]", "0.0.0.0", "2130706433", "", "localhost:80:80", "evil.example#localhost",
           "a@localhost", "\xff")  # fmt: skip
PATHS = ("/", "/layers", "/health/ready", "/metrics", "/docs", "/openapi.json", "/no")


def status(client: httpx.Client, host: str, path: str = "/health/live") -> int:
    return client.get(path, headers={b"Host": host.encode("latin-1")}).status_code


@pytest.fixture(scope="module")
def restricted() -> Iterator[httpx.Client]:
    with serving(app(allowed_hosts="Attention.example, *.inner.example,x-y")) as client:
        yield client


@pytest.mark.parametrize("host", [*LOCAL, "attention.example", "ATTENTION.EXAMPLE", "a.inner.example", "x-y"])
def test_names_of_this_machine_and_of_the_setting_are_answered(restricted: httpx.Client, host: str) -> None:
    assert status(restricted, host) == status(restricted, f"{host}:8000") == 200


@pytest.mark.parametrize("host", [*FOREIGN, "inner.example", "b.attention.example", "evilinner.example"])
def test_other_names_are_refused(restricted: httpx.Client, host: str) -> None:
    assert {status(restricted, host, path) for path in PATHS} == {400}
    assert status(restricted, f"{host}:8000") == 400


def test_a_refused_name_is_a_problem_that_says_the_way_out(restricted: httpx.Client) -> None:
    response = restricted.post("/attention", json={"input": [[1]]}, headers={"Host": "evil.example"})
    problem = response.json()
    assert (problem["code"], problem["errors"][0]["got"]) == ("bad_request", "'evil.example'")
    assert "ATTENTION_ALLOWED_HOSTS" in problem["errors"][0]["expected"]


def test_the_address_that_a_connection_is_made_to_is_of_this_machine() -> None:
    """As probes of Kubernetes name it, which know no other name of a pod."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        route.connect(("192.0.2.1", 9))  # nothing is sent
        own = route.getsockname()[0]
    with serving(app(allowed_hosts="attention.example"), host=own) as client:
        port = client.base_url.port
        with httpx.Client(base_url=f"http://{own}:{port}", timeout=TIMEOUT) as direct:
            assert direct.get("/health/ready").status_code == 200
            assert status(direct, "192.0.2.1") == 400


@pytest.mark.parametrize("allowed", ["", "*"])
def test_every_name_is_answered_without_a_restriction(allowed: str) -> None:
    with serving(app(allowed_hosts=allowed)) as client:
        assert {status(client, host) for host in (*LOCAL, *FOREIGN)} == {200}


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_serve_on_a_loopback_address_answers_names_of_this_machine_only(workers: int, tmp_path: Path) -> None:
    """With layers, which a page of a rebound name must not read; nginx on this machine needs the setting."""
    for given, answered, refused in (("", LOCAL, FOREIGN), ("a.example", ("a.example", *LOCAL), ("evil.example",))):
        with live(allowed_hosts=given, workers=workers, layers=tmp_path) as server:
            client = httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=TIMEOUT)
            assert {host: status(client, host, "/layers") for host in answered} == dict.fromkeys(answered, 200)
            assert {host: status(client, host, "/layers") for host in refused} == dict.fromkeys(refused, 400)
            client.close()


@pytest.mark.parametrize(
    ("host", "expected"), [("127.0.0.1", True), ("localhost", True), ("127.1.2.3", True), ("0.0.0.0", False)]
)
def test_loopback_addresses_are_known(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected
