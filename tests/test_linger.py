"""Clients that are refused while they still send find their whole answer; those that never stop are cut off."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import suppress

import httpx
import pytest

from service.http.auth import new_key
from service.http.linger import FEW, MANY, patience
from tests.conftest import app, serving

MB = 10**6
HEAD = b"POST /attention HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
CHUNK = b"10000\r\n" + b" " * 2**16 + b"\r\n"
READ_TIMEOUT = 2.0


@pytest.fixture(scope="module")
def small() -> Iterator[httpx.Client]:
    """A server that admits little, and waits for little."""
    with serving(app(max_body_bytes=1000, read_timeout=READ_TIMEOUT)) as client:
        yield client


def connect(client: httpx.Client) -> socket.socket:
    return socket.create_connection((client.base_url.host, client.base_url.port or 0), timeout=30)


def counted(length: int, more: bytes = b"") -> bytes:
    return HEAD + more + b"Content-Length: %d\r\n\r\n" % length


def send_on(connection: socket.socket, piece: bytes, pause: float = 0) -> int:
    """Until the other side has had enough, or did not within 20 seconds; how many bytes."""
    sent, end = 0, time.monotonic() + 20
    with suppress(ConnectionError):
        while time.monotonic() < end:
            connection.sendall(piece)
            sent += len(piece)
            time.sleep(pause)
    return sent


def rest(connection: socket.socket) -> bytes:
    """What comes until the other side has closed."""
    parts = []
    while part := connection.recv(2**16):
        parts.append(part)
    return b"".join(parts)


def whole(answer: bytes) -> tuple[int, str]:
    """Status and code of the one answer that this is, as long as it says."""
    head, _, body = answer.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)content-length: (\d+)", head)
    assert length is not None
    assert len(body) == int(length[1])
    return int(head.split(b" ")[1]), json.loads(body)["code"]


@pytest.mark.parametrize(
    ("head", "body", "refusal"),
    [
        (counted(64 * MB), b" " * (64 * MB), (413, "body_too_large")),
        (CHUNKED, CHUNK * 100 + b"0\r\n\r\n", (413, "body_too_large")),
        (counted(64 * MB, b"Accept: text/html\r\nConnection: close\r\n"), b" " * (64 * MB), (406, "not_acceptable")),
        (b"POST /no HTTP/1.0\r\nContent-Length: 64000000\r\n\r\n", b" " * (64 * MB), (404, "not_found")),
        (b"no HTTP\r\n\r\n", b" " * (8 * MB), (400, "bad_request")),
    ],
    ids=["announced", "chunked", "closing", "HTTP/1.0", "no HTTP"],
)
def test_who_sends_all_before_reading_finds_the_whole_refusal(
    head: bytes, body: bytes, refusal: tuple[int, str], small: httpx.Client
) -> None:
    """The other side takes all of it, and closes neither before nor without its answer."""
    with connect(small) as connection:
        connection.sendall(head)
        time.sleep(0.05)  # the refusal is out before the body comes
        connection.sendall(body)
        assert whole(rest(connection)) == refusal


def test_a_connection_that_is_kept_carries_the_next_request() -> None:
    """A refusal that leaves it open drops the body, and no more."""
    with serving(app(api_keys=new_key()[1])) as client, connect(client) as connection:
        connection.sendall(counted(64 * MB) + b" " * (64 * MB))
        connection.sendall(b"GET /health/live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answers = rest(connection)
    refusal, _, health = answers.partition(b"HTTP/1.1 200 ")
    assert whole(refusal) == (401, "unauthorized")
    assert health.endswith(b'{"status":"ok"}')


@pytest.mark.parametrize("head", [CHUNKED, counted(2**40)], ids=["chunked", "announced"])
def test_who_never_stops_is_cut_off(head: bytes, small: httpx.Client) -> None:
    with connect(small) as connection:
        connection.sendall(head)
        assert send_on(connection, CHUNK) < FEW + 32 * MB  # and what the buffers of both sides hold


def test_who_goes_on_slowly_is_cut_off(small: httpx.Client) -> None:
    with connect(small) as connection:
        connection.sendall(counted(64 * MB))
        start = time.monotonic()
        send_on(connection, b" ", pause=0.02)
    assert READ_TIMEOUT * 0.9 < time.monotonic() - start < 5 * READ_TIMEOUT


def test_a_server_that_stops_waits_for_nobody_who_is_refused() -> None:
    with serving(app(max_body_bytes=1000)) as client:
        connection = connect(client)
        connection.sendall(counted(64 * MB))
        assert connection.recv(100).startswith(b"HTTP/1.1 413")
        start = time.monotonic()
    assert time.monotonic() - start < 10
    connection.close()


def test_patience() -> None:
    assert patience([(b"content-length", b"5000000")]) == 5_000_000
    assert patience([(b"content-length", b"%d" % MANY)]) == patience([(b"content-length", b"9" * 30)]) == FEW
    assert patience([]) == patience([(b"content-length", b"x")]) == FEW
