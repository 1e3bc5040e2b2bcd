"""Requests on one connection get the answers that each of them gets alone, wherever their bytes are cut.

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

# A body in chunks before another request, and a malformed chunk after an offer to upgrade.
SHORT: Final = ("chunked+live", "h2c+bad-chunk")
# Large answers before what closes the connection, large bodies behind each other, errors that are seen twice.
LONG: Final = (
    "large-answer+bad-line+post", "large-answer+close+post", "large-close+post", "large-answer+large+live",
    "large+large-tensors+live", "post+early+post", "too-large+live", "long-11"
)  # fmt: skip


def attention(tokens: int) -> bytes:
    return post(json.dumps({"input": [[i % 7] for i in range(tokens)], "include": []}).encode())


SLOW: Final = attention(8000)  # takes much longer to compute than the end of the connection takes to arrive


@pytest.fixture(
    scope="module", params=product(PARSERS, (False, True)), ids=lambda param: f"{param[0]}{'-tls' * param[1]}"
)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with serving(*request.param) as started:
        yield started


def verify(server: Server, name: str, cases: list[Case]) -> None:
    failures = check(server, name, cases).failures
    assert not failures, "\n".join([f"{len(failures)} of {len(cases)} cases fail", *failures[:3]])


@pytest.mark.parametrize("name", SHORT)
def test_a_cut_at_any_byte_changes_no_answer(server: Server, name: str) -> None:
    step = 3 if server.tls else 1  # a handshake takes longer than the rest
    verify(server, name, every_byte(server, name)[::-step])


@pytest.mark.parametrize("name", LONG)
def test_random_cuts_of_long_sequences_change_no_answer(server: Server, name: str) -> None:
    verify(server, name, random_cases(server, name, Random(name), 4))


def test_no_part_of_a_body_is_a_request_after_an_offer_to_upgrade(server: Server) -> None:
    """httptools takes the body for another protocol, so that it is lost, and the connection is closed."""
    offer = sequence("h2c", "h11")[0].data
    head, _, _ = offer.partition(b"\r\n\r\n")
    head = re.sub(rb"Content-Length: \d+", b"Content-Length: %d" % len(SMUGGLED), head)
    with connect(server) as connection:
        connection.sendall(head + b"\r\n\r\n")
        connection.sendall(SMUGGLED)
        assert read_response(connection)[0] == 400
        with suppress(ConnectionError):  # it may be closed already
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
    """What comes after the client has closed its sending side."""
    with socket.fromfd(connection.fileno(), socket.AF_INET, socket.SOCK_STREAM) as same:
        same.shutdown(socket.SHUT_WR)  # by itself, TLS would forget to decrypt
    try:
        return connection.recv(2**16)
    except (ConnectionResetError, ssl.SSLError):
        return b""


@pytest.mark.parametrize("sent", [SLOW, SLOW[:-1], SLOW[:20]], ids=["computing", "within a body", "within a head"])
def test_a_client_that_closes_its_sending_side_is_taken_for_disconnected(server: Server, sent: bytes) -> None:
    """As with uvicorn alone: its protocols return nothing from `eof_received`, so that asyncio closes the transport.

    A request that is not answered by then is cancelled, and gets no answer.
    """
    with connect(server) as connection:
        connection.sendall(sent)
        assert rest_after_half_close(connection) == b""


def test_an_answer_before_the_client_closes_its_sending_side_is_whole(server: Server) -> None:
    with connect(server) as connection:
        connection.sendall(attention(500))
        assert read_response(connection)[0] == 200
        assert rest_after_half_close(connection) == b""
