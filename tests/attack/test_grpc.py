"""The gRPC server receives hostile messages, and connections that do not speak gRPC."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest

from benchmarks.serving import free_port
from tests.attack.bounds import MB
from tests.attack.corpus import GRPC, hostile_bodies
from tests.attack.server import Live, live
from tests.attack.test_sockets import LIMIT, SLACK, Growth
from tests.helpers.messages import request
from tests.helpers.rpc import connected

INFER = "/inference.GRPCInferenceService/ModelInfer"
SMALL = request({"input": np.eye(2, dtype=np.float32)}).SerializeToString()


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[Live, int]]:
    port = free_port()
    with live(grpc_port=port, max_body_bytes=LIMIT, memory_limit="256MiB", read_timeout=1, time_limit=20) as found:
        yield found, port


def status_of(channel: grpc.Channel, message: bytes) -> str:
    """The name of the gRPC status of the response to a message."""
    call: Any = channel.unary_unary(INFER)
    try:
        call(message, timeout=60)
    except grpc.RpcError as error:
        assert len(error.details() or "") < 1000
        return str(error.code().name)
    return "OK"


def test_hostile_messages_are_refused(server: tuple[Live, int]) -> None:
    running, port = server
    growth = Growth(running)
    with connected(port) as channel:
        for name, make in hostile_bodies(GRPC).items():
            status = status_of(channel, make())
            assert status in ("INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED"), (name, status)
        assert status_of(channel, SMALL) == "OK"
    assert growth.now() < 32 * LIMIT / MB + 64 + SLACK


def test_connections_that_do_not_speak_grpc_do_not_disturb_others(server: tuple[Live, int]) -> None:
    """Other protocols, half a handshake, random bytes, and many silent connections."""
    running, port = server
    before = running.running.descriptors()
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    settings = b"\0\0\0\4\0\0\0\0\0"
    noises = [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\3\1" + b"\0" * 500, preface[:10], preface + b"\xff" * 10_000,
              preface + settings + os.urandom(10_000), preface + settings * 10_000, b""]  # fmt: skip
    connections = []
    for noise in noises * 20:
        connection = replace(running, port=port).connect()
        with suppress(OSError):  # the server may have closed the connection
            connection.sendall(noise)
        connections.append(connection)
    with connected(port) as channel:
        assert status_of(channel, SMALL) == "OK"
    running.healthy()
    for connection in connections:
        connection.close()
    assert running.descriptors_fall_to(before)


def test_calls_that_send_no_message_end_after_the_read_timeout(server: tuple[Live, int]) -> None:
    """One connection opens as many calls as it may have; each waits for memory no longer than its deadline."""
    running, port = server
    before = running.running.descriptors()
    sent = threading.Event()

    def nothing() -> Iterator[bytes]:
        sent.wait(60)
        yield from ()

    with connected(port) as channel:
        call: Any = channel.stream_unary(INFER)
        calls = [call.future(nothing()) for _ in range(100)]
        codes = {call.exception().code().name for call in calls}
        sent.set()
    assert codes <= {"DEADLINE_EXCEEDED", "UNAVAILABLE"}
    with connected(port) as channel:
        assert status_of(channel, SMALL) == "OK"
    assert running.descriptors_fall_to(before)
