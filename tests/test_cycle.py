"""Bodies that are received where they stay, and answers as they stand on the wire."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load, save

from service.gate import KEPT
from tests.conftest import app, serving
from tests.test_linger import connect, rest, send_on

CERTIFICATE = Path(__file__).parent / "tls" / "localhost.pem"
SAFETENSORS = "application/vnd.safetensors"
LAST = b"GET /health/live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
LARGE = 2**16  # from which on bodies are received where they stay
Headers = list[tuple[bytes, bytes]]


@pytest.fixture(scope="module")
def server() -> Iterator[httpx.Client]:
    with serving(app()) as client:
        yield client


def large(rows: int = 2000) -> tuple[bytes, np.ndarray]:
    """A body, and the output that it must have: what nobody else is seen by comes back as it is."""
    value = np.random.default_rng(0).normal(size=(rows, 64)).astype(np.float32)
    position = np.zeros_like(value[:, :4])
    mask = np.eye(rows, dtype=bool)
    body = save({"query": position, "key": position, "value": value, "mask": mask})
    assert len(body) > 16 * LARGE
    return body, value


def posted(body: bytes, more: bytes = b"") -> bytes:
    head = b"POST /attention HTTP/1.1\r\nHost: x\r\nContent-Type: " + SAFETENSORS.encode() + b"\r\n" + more
    return head + b"Content-Length: %d\r\n\r\n" % len(body)


def split(answer: bytes) -> tuple[bytes, bytes]:
    """Head and body of the first answer, and the bytes behind it."""
    head, _, rest = answer.partition(b"\r\n\r\n")
    found = re.search(rb"content-length: (\d+)", head)
    assert found is not None
    length = int(found[1])
    return rest[:length], rest[length:]


@pytest.mark.parametrize("first", [0, 1, 1000, 2**16, 2**18, 10**6], ids=lambda first: f"{first} bytes with the head")
def test_a_large_body_is_all_there(first: int, server: httpx.Client) -> None:
    """Wherever the network divides it, and the request behind it is one by itself."""
    body, value = large()
    with connect(server) as connection:
        connection.sendall(posted(body) + body[:first])
        time.sleep(0.05)
        connection.sendall(body[first:] + LAST)
        answer, behind = split(rest(connection))
    assert np.array_equal(load(answer)["output"], value)
    assert behind.startswith(b"HTTP/1.1 200 ")
    assert behind.endswith(b'{"status":"ok"}')


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_each_loop_receives_where_it_is_told(loop: str) -> None:
    body, value = large()
    with serving(app(), loop=loop) as client:
        for _ in range(2):
            reply = client.post("/attention", content=body, headers={"Content-Type": SAFETENSORS})
            assert np.array_equal(load(reply.content)["output"], value)


def resident() -> int:
    """Bytes of memory that this process, and so the server in it, really has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_who_announces_much_and_sends_little_takes_little(server: httpx.Client) -> None:
    before = resident()
    with connect(server) as connection:
        connection.sendall(posted(bytes(60 * 2**20)) + bytes(3 * LARGE))
        deadline = time.monotonic() + 10
        while b"attention_requests_in_flight 2" not in server.get("/metrics").content:  # the other asks for them
            assert time.monotonic() < deadline
        time.sleep(0.1)
        assert resident() - before < 20 * 2**20


def test_large_bodies_one_after_the_other_in_one_go(server: httpx.Client) -> None:
    body, value = large()
    with connect(server) as connection, ThreadPoolExecutor(1) as thread:
        thread.submit(connection.sendall, (posted(body) + body) * 3 + LAST)
        behind = rest(connection)
    for _ in range(3):
        answer, behind = split(behind)
        assert np.array_equal(load(answer)["output"], value)
    assert behind.endswith(b'{"status":"ok"}')


def test_a_large_body_over_tls() -> None:
    body, value = large()
    with serving(app(), ssl_certfile=str(CERTIFICATE), ssl_keyfile=str(CERTIFICATE)) as client:
        for _ in range(2):
            reply = client.post("/attention", content=body, headers={"Content-Type": SAFETENSORS})
            assert np.array_equal(load(reply.content)["output"], value)


def test_a_large_body_is_asked_for(server: httpx.Client) -> None:
    body, value = large()
    with connect(server) as connection:
        connection.sendall(posted(body, b"Expect: 100-continue\r\nConnection: close\r\n"))
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        answer, _ = split(rest(connection))
    assert np.array_equal(load(answer)["output"], value)


def test_who_hangs_up_within_a_large_body_holds_nothing(server: httpx.Client) -> None:
    """All memory for bodies would be gone by now."""
    body, value = large()
    for _ in range(300):
        with connect(server) as connection:
            connection.sendall(posted(body) + body[: 2 * LARGE])
    reply = server.post("/attention", content=body, headers={"Content-Type": SAFETENSORS})
    assert np.array_equal(load(reply.content)["output"], value)
    assert 'attention_memory_bytes{pool="bodies"} 0.0\n' in server.get("/metrics").text


def test_a_large_body_that_does_not_arrive_is_given_up() -> None:
    body, _ = large()
    with serving(app(read_timeout=0.5)) as client, connect(client) as connection:
        connection.sendall(posted(body) + body[:-1])
        assert rest(connection).startswith(b"HTTP/1.1 408 ")


def answering(status: int = 200, headers: Headers | None = None, *parts: bytes) -> Any:
    """An application that reads nothing, and answers everybody the same."""

    async def answers(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        await send({"type": "http.response.start", "status": status, "headers": headers or []})
        for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body"})

    return answers


def asked(application: Any, request: bytes) -> bytes:
    """All that comes back."""
    options = {"date_header": False, "server_header": False, "lifespan": "off"}
    with serving(application, **options) as client, connect(client) as connection:
        connection.sendall(request)
        return rest(connection)


CLOSE = b"Host: x\r\nConnection: close\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    ("application", "request_", "answer"),
    [
        (answering(200, [], b"ab", b"", b"c"), b"GET / HTTP/1.1\r\n" + CLOSE,
         OK + b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n"),
        (answering(200, [(b"content-length", b"3")], b"ab", b"", b"c"), b"GET / HTTP/1.1\r\n" + CLOSE,
         OK + b"content-length: 3\r\nconnection: close\r\n\r\nabc"),
        (answering(200, [(b"connection", b"close")]), b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
         OK + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"),
        (answering(200, [], b"ab", b"c"), b"GET / HTTP/1.0\r\n\r\n", OK + b"connection: close\r\n\r\nabc"),
        (answering(200, [(b"content-length", b"3")], b"abc"), b"HEAD / HTTP/1.1\r\n" + CLOSE,
         OK + b"content-length: 3\r\nconnection: close\r\n\r\n"),
        (answering(200, [], b"abc"), b"HEAD / HTTP/1.1\r\n" + CLOSE, OK + b"connection: close\r\n\r\n"),
        (answering(204, []), b"GET / HTTP/1.1\r\n" + CLOSE, b"HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n"),
    ],
    ids=["chunks", "length", "closed by the application", "HTTP/1.0", "HEAD", "HEAD, no length", "no content"],
)  # fmt: skip
def test_answers_on_the_wire(application: Any, request_: bytes, answer: bytes) -> None:
    """As RFC 9112 has them."""
    assert asked(application, request_) == answer


@pytest.mark.parametrize("value", [b"a\r\nB: c", b"a\nB: c", b"a\rB: c"])
def test_a_header_cannot_hold_another(value: bytes) -> None:
    answer = asked(answering(200, [(b"a", value)]), b"GET / HTTP/1.1\r\n" + CLOSE)
    assert answer.startswith(b"HTTP/1.1 500 ")
    assert b"B: c" not in answer


@pytest.mark.parametrize("parts", [[b"ab"], [b"abc", b"d"]], ids=["too short", "too long"])
def test_an_answer_is_as_long_as_it_says(parts: list[bytes]) -> None:
    """Or breaks off, which is all that still tells."""
    answer = asked(answering(200, [(b"content-length", b"3")], *parts), b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    assert answer.partition(b"\r\n\r\n")[2] == parts[0]


def test_a_connection_that_nobody_uses_is_closed() -> None:
    with serving(app(), timeout_keep_alive=1) as client, connect(client) as connection:
        for _ in range(3):  # again and again, it is kept
            connection.sendall(b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n")
            assert connection.recv(2**16).endswith(b'{"status":"ok"}')
            time.sleep(0.6)
        start = time.monotonic()
        assert connection.recv(1) == b""
        assert time.monotonic() - start < 2


def test_a_body_that_nobody_wanted_keeps_its_connection() -> None:
    """It is dropped to its last byte, and the next request is read; by whom takes longer than connections are kept."""
    with serving(app(), timeout_keep_alive=1) as client, connect(client) as connection:
        connection.sendall(b"POST /no HTTP/1.1\r\nHost: x\r\nContent-Length: 3000000\r\n\r\n")
        assert json.loads(split(connection.recv(2**16))[0])["status"] == 404
        for _ in range(3):
            connection.sendall(b" " * 1_000_000)
            time.sleep(0.6)
        connection.sendall(LAST)
        assert rest(connection).endswith(b'{"status":"ok"}')


def test_nothing_is_dropped_for_ever() -> None:
    """Of a body that was refused, however its length was announced."""
    with serving(app(read_timeout=1)) as client, connect(client) as connection:
        connection.sendall(b"POST /no HTTP/1.1\r\nHost: x\r\nContent-Length: 3000000\r\n\r\n")
        start = time.monotonic()
        send_on(connection, b" ", pause=0.05)
        assert time.monotonic() - start < 5


def test_nobody_sends_in_vain() -> None:
    """Who could have no place when the body is here is refused before; for who is slow, room is not kept for long."""
    body, value = large()
    with serving(app(concurrency=1, queue=1)) as client:
        connections = [connect(client) for _ in range(3)]
        for connection in connections:
            connection.sendall(posted(body))
            time.sleep(0.05)
        assert connections[2].recv(100).startswith(b"HTTP/1.1 503 ")
        time.sleep(KEPT)
        with connect(client) as late:
            late.sendall(posted(body) + body)
            assert np.array_equal(load(split(receive(late))[0])["output"], value)
        for connection in connections[:2]:  # who sends at last finds a place, if there is one
            connection.sendall(body)
            assert np.array_equal(load(split(receive(connection))[0])["output"], value)
        for connection in connections:
            connection.close()


def receive(connection: socket.socket) -> bytes:
    """One answer, whose length is announced."""
    answer = b""
    while True:
        part = connection.recv(2**20)
        assert part
        answer += part
        length = re.search(rb"content-length: (\d+)", answer)
        if length is not None and len(answer.partition(b"\r\n\r\n")[2]) == int(length[1]):
            return answer
