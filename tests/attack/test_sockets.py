"""Hostile, slow, endless and disconnecting clients, on raw connections to a server in a separate process."""

from __future__ import annotations

import io
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest
from safetensors.numpy import save

from attention_service.codecs.oip.http import OCTETS
from tests.attack.corpus import GRPC, NO_HEAD, OIP, TARGETS, hostile_bodies
from tests.attack.server import HEALTH, TIMEOUT, Live, ResponseReader, live, post, read_response, within
from tests.helpers.oip import HEADER, INFER
from tests.helpers.wire import NPZ, SAFETENSORS

MB = 2**20
READ_TIMEOUT = 1.0
KEEP_ALIVE = 3
LIMIT = 8 * MB
# Megabytes of resident memory for threads and arenas of the allocator.
SLACK = 32
SMALL = json.dumps({"input": [[1, 0], [0, 1]]}).encode()
GOOD = post(SMALL)
CHUNKED = b"POST /attention HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(
        read_timeout=READ_TIMEOUT, keep_alive=KEEP_ALIVE, max_body_bytes=LIMIT, memory_limit="256MiB", time_limit=20
    ) as server:
        warm_up(server)
        yield server


def warm_up(server: Live) -> None:
    """Send requests that load modules and fill caches, so that these do not count as leaks."""
    large = json.dumps({"input": np.zeros((400, 64)).tolist()}).encode()
    for request in (GOOD, post(large), post(json.dumps({"input": []}).encode())):
        server.ask(request)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(server.ask, [post(large)] * 16))


@pytest.fixture(autouse=True)
def server_recovers(server: Live) -> Iterator[None]:
    """After each test the server responds, and its file descriptors are closed."""
    assert server.descriptors_fall_to(base := server.running.descriptors())
    yield
    server.healthy()
    assert server.ask(GOOD)[0] == 200
    assert server.descriptors_fall_to(base)


class Growth:
    """Measures the growth of the server's peak memory, in MB."""

    def __init__(self, server: Live) -> None:
        self._running = server.running
        self._running.forget_peak()
        self._before = self._running.resident()

    def now(self) -> float:
        return self._running.peak() - self._before

    def left(self) -> float:
        """What has not been returned to the system."""
        return self._running.resident() - self._before


def send_until_refused(connection: socket.socket, size: int) -> int:
    """Sends so many bytes, or fewer if the server closes the connection; returns the number of sent bytes."""
    piece, sent = b" " * MB, 0
    with suppress(ConnectionError, TimeoutError):
        while sent < size:
            connection.sendall(piece)
            sent += len(piece)
    return sent


# Hostile bodies.


def inference_request(body: bytes) -> bytes:
    """An HTTP request of the inference protocol, from a body of the corpus, whose first eight bytes are its header."""
    head = int.from_bytes(body[:8], "little")
    return post(body[8:], OCTETS, INFER, "" if head == NO_HEAD else f"{HEADER}: {head}\r\n")


@pytest.mark.parametrize("target", sorted(TARGETS.keys() - {GRPC}))
def test_hostile_bodies_are_refused_over_http(server: Live, target: str) -> None:
    growth = Growth(server)
    for name, make in hostile_bodies(target).items():
        body = make()
        status, answer = server.ask(inference_request(body) if target == OIP else post(body, target))
        assert status in (400, 413, 422), (name, status)
        assert len(answer) < 8000, name
    assert growth.now() < 20 * LIMIT / MB + 64 + SLACK


@pytest.mark.parametrize(("name", "status"), [("bomb of 1 GB", 413), ("200 members, 2 GB in one place", 413)])
def test_zip_bombs_are_not_decompressed(server: Live, name: str, status: int) -> None:
    body = hostile_bodies(NPZ)[name]()
    growth = Growth(server)
    assert server.ask(post(body, NPZ))[0] == status
    assert growth.now() < SLACK


def test_weights_of_a_terabyte_are_refused_before_memory_is_allocated(server: Live) -> None:
    tall = np.zeros((2**18 * 7 // 5, 1))  # its square in float64: a terabyte
    assert 8 * len(tall) ** 2 > 10**12
    body = save({"input": tall.astype(np.float64)})
    assert server.ask(post(body, SAFETENSORS))[0] == 413
    growth = Growth(server)
    start = time.perf_counter()
    status, answer = server.ask(post(body, SAFETENSORS))
    print(f"refused after {(time.perf_counter() - start) * 1e3:.1f} ms, {len(body) / MB:.1f} MB sent")
    assert (status, json.loads(answer)["code"]) == (413, "memory_limit")
    assert growth.now() < SLACK


# Slow senders.


@pytest.mark.parametrize("beginning", [b"POST /att", GOOD[:60]])
def test_slow_request_heads_close_the_connection(server: Live, beginning: bytes) -> None:
    with server.connect() as connection:
        start = time.monotonic()
        connection.sendall(beginning)
        assert read_response(connection) == (0, b"")
        assert time.monotonic() - start >= READ_TIMEOUT * 0.9


@pytest.mark.parametrize("beginning", [GOOD[:-1], CHUNKED, CHUNKED + b"5\r\n{"])
def test_slow_bodies_get_a_408(server: Live, beginning: bytes) -> None:
    with server.connect() as connection:
        start = time.monotonic()
        connection.sendall(beginning)
        status, answer = read_response(connection)
        took = time.monotonic() - start
    assert (status, json.loads(answer)["code"]) == (408, "too_slow")
    assert took >= READ_TIMEOUT * 0.9


@pytest.mark.parametrize("request_", [post(b" " * 4000), CHUNKED + b"1\r\n{\r\n" * 700], ids=["counted", "chunked"])
def test_sending_single_bytes_does_not_extend_the_read_timeout(server: Live, request_: bytes) -> None:
    """A tenth of the bytes takes many times the timeout; a slow machine sends fewer in the same time."""
    with server.connect() as connection:
        sent = 0
        with suppress(ConnectionError):
            for sent in range(len(request_)):
                connection.sendall(request_[sent : sent + 1])
                time.sleep(0.05)
        assert sent < len(request_) / 10
        with suppress(ConnectionError):
            assert read_response(connection)[0] in (0, 408)


def test_many_silent_connections_are_closed(server: Live) -> None:
    connections = [server.connect() for _ in range(200)]
    server.healthy()
    for connection in connections:
        assert connection.recv(1) == b""
        connection.close()


def test_idle_connections_do_not_keep_others_out() -> None:
    """More than the process has descriptors for, and each might be idle for ten minutes."""
    with live(descriptors=256) as server:
        held = []
        for _ in range(600):
            connection = server.connect()
            connection.sendall(HEALTH)
            held.append(connection)
        assert within(TIMEOUT, lambda: answers(server))
        for connection in held:
            connection.close()


def answers(server: Live) -> bool:
    """True if a new connection gets a response."""
    with suppress(OSError):
        return server.ask(HEALTH)[0] == 200
    return False


# Connections that end early.


@pytest.mark.parametrize("part", [GOOD, GOOD[:-5], GOOD[:30], CHUNKED + b"3\r\n{"])
def test_half_closed_connections_are_answered_or_closed(server: Live, part: bytes) -> None:
    for _ in range(20):
        with server.connect() as connection:
            connection.sendall(part)
            connection.shutdown(socket.SHUT_WR)
            status, _ = read_response(connection)
            assert status in ((0, 200) if part == GOOD else (0, 408))


def test_clients_may_disconnect_at_any_byte(server: Live) -> None:
    for at in range(0, len(GOOD), 3):
        with server.connect() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # reset
            connection.sendall(GOOD[:at])
        assert server.ask(GOOD)[0] == 200


# Bytes that are not HTTP, and messages that are too long.


GARBAGE = [
    b"\0" * 100,
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\xaa" * 200,  # a TLS greeting
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET /" + b"\xff" * 20 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /attention HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    b"POST /attention HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
    b"POST /attention HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST /attention HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999999\r\n\r\n",
    CHUNKED + b"-1\r\n",
    CHUNKED + b"fffffffffffffffff\r\n{",
    CHUNKED + b"xyz\r\n{",
    CHUNKED + b"2\r\n{}3\r\n",
]


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_is_refused(server: Live, garbage: bytes) -> None:
    status, _ = server.ask(garbage)
    assert status in (400, 404, 405, 408)  # h11 accepts a chunk size of 17 digits, and waits for the chunk


@pytest.mark.parametrize("garbage", [b"\0\1\2\3", b"GET\r\n\r\n", b"POST /attention HTTP/9.9\r\n\r\n"])
def test_garbage_after_valid_requests_does_not_change_their_responses(server: Live, garbage: bytes) -> None:
    """The requests before the garbage get complete responses, then the connection ends."""
    large = post(json.dumps({"input": np.ones((500, 64)).tolist()}).encode())
    for good, pause in ((GOOD, 0.0), (GOOD, 0.2), (large, 0.0), (large, 0.05), (large, 0.2)):
        with server.connect() as connection:
            connection.sendall(good)
            time.sleep(pause)
            connection.sendall(garbage)
            answers = ResponseReader(connection)
            assert answers.next()[0] == 200
            assert answers.next()[0] in (0, 400)
            assert answers.next()[0] == 0


def test_pipelined_requests_are_answered_in_order(server: Live) -> None:
    bodies = [json.dumps({"input": [[1.0]], "scale": 1.0 + n}).encode() for n in range(100)]
    with server.connect() as connection:
        connection.sendall(b"".join(map(post, bodies)))
        answers = ResponseReader(connection)
        for number in range(100):
            status, body = answers.next()
            assert (status, json.loads(body)["metadata"]["scale"]) == (200, 1.0 + number)


@pytest.mark.parametrize(
    "head", [b"GET / HTTP/1.1\r\nX: ", b"GET /", b"POST /attention HTTP/1.1\r\n" + b"A: b\r\n" * 100_000, b"A" * 10**6]
)
def test_very_long_request_heads_are_refused(server: Live, head: bytes) -> None:
    growth = Growth(server)
    with server.connect() as connection:
        with suppress(ConnectionError):
            connection.sendall(head)
        sent = send_until_refused(connection, 100 * MB)
        with suppress(ConnectionError):
            assert read_response(connection)[0] in (0, 400)
    assert sent < 100 * MB
    assert growth.now() < SLACK


@pytest.mark.parametrize("end", [b"0\r\nX: ", b"1;", b"0\r\n" + b"A: b\r\n" * 100_000])
def test_endless_trailers_and_chunk_extensions_are_cut_off(server: Live, end: bytes) -> None:
    """Trailers and chunk extensions have no announced length."""
    growth = Growth(server)
    with server.connect() as connection:
        with suppress(ConnectionError):
            connection.sendall(CHUNKED + b"2\r\n{}\r\n" + end)
        sent = send_until_refused(connection, 2000 * MB)
    assert sent < 100 * MB
    assert growth.now() < SLACK


def test_a_body_of_a_gigabyte_with_content_length_is_refused(server: Live) -> None:
    growth = Growth(server)
    head = GOOD.partition(b"Content-Length")[0] + b"Content-Length: %d\r\n\r\n" % 2**30
    with server.connect() as connection:
        connection.sendall(head)
        assert read_response(connection)[0] == 413
        assert send_until_refused(connection, 2**30) < 100 * MB
    assert growth.now() < SLACK


def test_a_body_of_a_gigabyte_in_chunks_is_refused(server: Live) -> None:
    growth = Growth(server)
    chunk = b"10000\r\n" + b" " * 2**16 + b"\r\n"
    with server.connect() as connection:
        connection.sendall(CHUNKED)
        sent = 0
        with suppress(ConnectionError):
            while sent < 2**30:
                connection.sendall(chunk)
                sent += 2**16
        with suppress(ConnectionError):
            assert read_response(connection)[0] in (0, 413)
    assert sent < LIMIT + 64 * MB  # the rest is in socket buffers
    assert growth.now() < LIMIT / MB + SLACK


# Many requests at once.


def test_concurrent_large_requests_stay_within_the_memory_limit(server: Live) -> None:
    body = io.BytesIO()
    random = np.random.default_rng(0)
    query, key, value = random.normal(size=(3, 2000, 64))
    np.savez(body, query=query, key=key, value=value)
    request = post(body.getvalue(), NPZ)
    growth = Growth(server)
    waits, done, start = list[float](), threading.Event(), time.monotonic()

    def watch() -> None:
        while not done.is_set():
            waits.append(server.healthy())
            time.sleep(0.05)

    watcher = threading.Thread(target=watch)
    watcher.start()
    with ThreadPoolExecutor(80) as pool:
        statuses = [status for status, _ in pool.map(lambda _: server.ask(request), range(160))]
    took = time.monotonic() - start
    done.set()
    watcher.join()
    counts = {status: statuses.count(status) for status in set(statuses)}
    slowest = max(waits)
    print(f"statuses {counts} in {took:.1f} s, {growth.now():.0f} MB more, health within {slowest:.3f} s")
    assert set(counts) <= {200, 413, 503, 504}
    assert counts[200] >= 1
    assert growth.now() < 256 + SLACK + 160 * 0.4  # a sixteenth of a megabyte of each body, and buffers of sockets
    assert within(TIMEOUT, lambda: growth.left() < 256 / 16 + SLACK)
    assert slowest < took / 2, "liveness waits for large requests"


def test_a_client_that_disconnects_cancels_its_computation(server: Live) -> None:
    """The whole computation takes many times the processor time that is allowed after the disconnect."""
    request = post(save({"input": np.ones((120_000, 16), np.float32)}, {"request": '{"include": []}'}), SAFETENSORS)
    with server.connect() as connection:
        connection.sendall(request)
        used = server.running.processor_seconds()
        assert within(TIMEOUT, lambda: server.running.processor_seconds() > used + 0.5), "it does not compute"
    used = server.running.processor_seconds()

    def is_idle() -> bool:
        before = server.running.processor_seconds()
        time.sleep(0.5)
        return server.running.processor_seconds() - before < 0.1

    assert within(TIMEOUT, is_idle)
    assert server.running.processor_seconds() - used < 5, "it still computes after the client disconnected"


def test_a_request_beyond_the_time_limit_gets_a_504() -> None:
    request = post(save({"input": np.ones((200_000, 64), np.float32)}, {"request": '{"include": []}'}), SAFETENSORS)
    with live(time_limit=1) as server:
        start = time.monotonic()
        status, answer = server.ask(request)
        took = time.monotonic() - start
    assert (status, json.loads(answer)["code"]) == (504, "time_limit")
    assert took >= 1  # the whole computation takes minutes


def test_requests_to_upgrade_the_protocol_are_ignored(server: Live) -> None:
    for kind in (b"websocket", b"h2c"):
        upgrade = HEALTH[:-2] + b"Connection: Upgrade\r\nUpgrade: " + kind + b"\r\n\r\n"
        with server.connect() as connection:
            connection.sendall(upgrade)
            answers = ResponseReader(connection)
            assert answers.next()[0] == 200
            with suppress(ConnectionError):
                connection.sendall(b"\x81\x85garbage" * 100)
                assert answers.next()[0] in (0, 400)


def test_decompressed_bodies_count_against_the_memory_limit(server: Live) -> None:
    """Valid bodies, compressed a thousand to one, that take long: their decompressed arrays wait in memory."""
    body = io.BytesIO()
    np.savez_compressed(body, input=np.zeros((15_000, 64)), request=np.array('{"include": []}'))
    assert len(body.getvalue()) < 2**14 < 7 * MB < 15_000 * 64 * 8 < LIMIT
    growth = Growth(server)
    with ThreadPoolExecutor(66) as pool:
        statuses = {status for status, _ in pool.map(lambda _: server.ask(post(body.getvalue(), NPZ)), range(66))}
    print(f"statuses {statuses}, {growth.now():.0f} MB more")
    assert statuses <= {200, 503, 504}
    assert growth.now() < 256 + SLACK
