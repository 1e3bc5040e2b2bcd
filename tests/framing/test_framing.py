"""Requests on one connection get the same responses as each of them alone, wherever their bytes are cut.

This is a sample: `python -m tests.framing.deep` tries many more.
"""

from __future__ import annotations

import json
import re
import socket
import ssl
from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from random import Random
from typing import Final

import pytest

from tests.attack.server import TIMEOUT, post, read_response, unverified
from tests.framing.client import Server
from tests.framing.run import PARSERS, Case, check, every_byte, random_cases, serving
from tests.framing.sequences import SMUGGLED, sequence

pytestmark = pytest.mark.slow

# A body in chunks before another request, and a malformed chunk after an upgrade request.
SHORT: Final = ("chunked+live", "h2c+bad-chunk")
# Large responses before the connection closes, consecutive large bodies, errors that parser and application both see.
LONG: Final = (
    "large-answer+bad-line+post", "large-answer+close+post", "large-close+post", "large-answer+large+live",
    "large+large-tensors+live", "post+early+post", "too-large+live", "long-11"
)  # fmt: skip


def attention_request(tokens: int) -> bytes:
    return post(json.dumps({"input": [[i % 7] for i in range(tokens)], "include": []}).encode())


SLOW_REQUEST: Final = attention_request(8000)  # its computation takes much longer than closing the connection


@pytest.fixture(
    scope="module", params=product(PARSERS, (False, True)), ids=lambda param: f"{param[0]}{'-tls' * param[1]}"
)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with serving(*request.param) as started:
        yield started


def assert_same_responses(server: Server, name: str, cases: list[Case]) -> None:
    failures = check(server, name, cases).failures
    assert not failures, "\n".join([f"{len(failures)} of {len(cases)} cases fail", *failures[:3]])


@pytest.mark.parametrize("name", SHORT)
def test_a_cut_at_any_byte_changes_no_response(server: Server, name: str) -> None:
    step = 3 if server.tls else 1  # handshakes take most of the time
    assert_same_responses(server, name, every_byte(server, name)[::-step])


@pytest.mark.parametrize("name", LONG)
def test_random_cuts_of_long_sequences_change_no_response(server: Server, name: str) -> None:
    assert_same_responses(server, name, random_cases(server, name, Random(name), 4))


def test_a_body_after_an_upgrade_request_is_not_served_as_a_request(server: Server) -> None:
    """httptools treats the body as another protocol, so that the body is lost and the connection closed."""
    offer = sequence("h2c", "h11")[0].data
    head, _, _ = offer.partition(b"\r\n\r\n")
    head = re.sub(rb"Content-Length: \d+", b"Content-Length: %d" % len(SMUGGLED), head)
    with connect(server) as connection:
        connection.sendall(head + b"\r\n\r\n")
        connection.sendall(SMUGGLED)
        assert read_response(connection)[0] == 400
        with suppress(ConnectionError):  # the connection may be closed already
            connection.sendall(b"GET /health/live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        rest = b""
        with suppress(ConnectionError):
            while part := connection.recv(2**16):
                rest += part
    assert b"smuggled" not in rest
    assert rest.count(b"HTTP/1.1") == (server.parser == "h11")


def connect(server: Server) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), TIMEOUT)
    return unverified().wrap_socket(connection) if server.tls else connection


def rest_after_half_close(connection: socket.socket) -> bytes:
    """The bytes that the client receives after it has closed its sending side."""
    with socket.fromfd(connection.fileno(), socket.AF_INET, socket.SOCK_STREAM) as same:
        same.shutdown(socket.SHUT_WR)  # the TLS socket's own shutdown would end decryption
    try:
        return connection.recv(2**16)
    except (ConnectionResetError, ssl.SSLError):
        return b""


@pytest.mark.parametrize(
    "sent", [SLOW_REQUEST, SLOW_REQUEST[:-1], SLOW_REQUEST[:20]], ids=["computing", "within a body", "within a head"]
)
def test_a_client_that_closes_its_sending_side_counts_as_disconnected(server: Server, sent: bytes) -> None:
    """uvicorn's protocols return nothing from `eof_received`, so that asyncio closes the transport.

    A request without a complete response is then cancelled.
    """
    with connect(server) as connection:
        connection.sendall(sent)
        assert rest_after_half_close(connection) == b""


def test_a_response_before_the_client_closes_its_sending_side_is_complete(server: Server) -> None:
    with connect(server) as connection:
        connection.sendall(attention_request(500))
        assert read_response(connection)[0] == 200
        assert rest_after_half_close(connection) == b""
