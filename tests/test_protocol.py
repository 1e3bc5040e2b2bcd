"""What a connection is held to: time for a request to arrive, bytes before its body, HTTP and nothing else."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.conftest import app, serving
from tests.test_linger import CHUNKED, HEAD, connect, counted, rest, whole

READ_TIMEOUT = 0.5
HEALTH = b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture(scope="module")
def hasty() -> Iterator[httpx.Client]:
    """A server that waits for little."""
    with serving(app(read_timeout=READ_TIMEOUT)) as client:
        yield client


def ask(client: httpx.Client, content: bytes) -> bytes:
    """All that comes back for these bytes, until the connection ends."""
    with connect(client) as connection:
        connection.sendall(content)
        return rest(connection)


@pytest.mark.parametrize("part", [b"POST /att", HEAD, counted(10) + b"{", CHUNKED, CHUNKED + b"5\r\n{"])
def test_a_request_that_does_not_arrive_is_given_up(part: bytes, hasty: httpx.Client) -> None:
    start = time.monotonic()
    assert whole(ask(hasty, part)) == (408, "too_slow")
    assert time.monotonic() - start > READ_TIMEOUT * 0.9


def test_who_says_nothing_is_sent_away(hasty: httpx.Client) -> None:
    assert ask(hasty, b"") == b""


@pytest.mark.parametrize("head", [b"GET /" + b"a" * 40_000, HEALTH[:-2] + b"A: b\r\n" * 10_000])
def test_a_head_has_a_length(head: bytes, hasty: httpx.Client) -> None:
    assert whole(ask(hasty, head)) == (400, "bad_request")


def test_what_comes_behind_a_body_has_a_length(hasty: httpx.Client) -> None:
    """Trailers: nobody asks for them."""
    assert whole(ask(hasty, CHUNKED + b"2\r\n{}\r\n0\r\n" + b"A: b\r\n" * 200_000)) == (400, "bad_request")


def test_garbage_behind_a_good_request_spoils_no_answer(hasty: httpx.Client) -> None:
    """Whether that is answered already, or at work."""
    body = json.dumps({"input": [[0.5] * 64] * 600}).encode()
    good = counted(len(body)) + body
    for pause in (0.0, 0.3):
        with connect(hasty) as connection:
            connection.sendall(good)
            time.sleep(pause)
            connection.sendall(b"\0\1\2\3")
            answer = rest(connection)
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert answer.count(b'"metadata"') == 1
        assert answer.endswith((b"}", b"0\r\n\r\n", b'"errors":[]}'))
