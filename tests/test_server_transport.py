"""The transport that measures the progress of sending."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop

from attention_service.server.transport import MeasuredTransport
from tests.helpers.waiting import TIMEOUT, until_async
from tests.test_server import Client

CERTIFICATE = Path(__file__).parent / "tls" / "localhost.pem"
LOOPS = pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])


@LOOPS
@pytest.mark.parametrize("tls", [False, True])
def test_a_lost_connection_has_no_unsent_bytes(new_loop: Callable[[], Any], tls: bool) -> None:
    """A check of the limits may come between the loss of a connection and the call that reports it."""

    made: list[Any] = []
    lost: Any = None

    class Protocol(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            self.transport = MeasuredTransport(transport, lambda: True)
            made.append(self)

        def connection_lost(self, exc: Exception | None) -> None:
            lost.set_result(None)

    async def main() -> Any:
        nonlocal lost
        loop = asyncio.get_running_loop()
        lost = loop.create_future()
        ours = theirs = None
        if tls:
            ours, theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl._create_unverified_context()
            ours.load_cert_chain(CERTIFICATE)
        server = await loop.create_server(Protocol, "127.0.0.1", 0, ssl=ours)
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname(), ssl=theirs)
        await until_async(lambda: made)
        made[0].transport.abort()
        await lost
        writer.transport.abort()
        server.close()
        return made[0].transport.unsent()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(main()) == (0, 0)


@LOOPS
@pytest.mark.parametrize("size", [0, 100, 2**20])
def test_what_is_held_comes_before_what_is_written_next(new_loop: Callable[[], Any], size: int) -> None:
    """Also if nothing is written any more."""

    async def main() -> tuple[int, bytes]:
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        inner, _ = await asyncio.get_running_loop().connect_accepted_socket(asyncio.Protocol, ours)
        transport, received = MeasuredTransport(inner, lambda: True), b""
        transport.hold()
        transport.write(b"head")
        before = transport.written
        if size:
            transport.write(memoryview(bytes(size)))
        transport.close()
        with theirs:
            async with asyncio.timeout(TIMEOUT):
                while data := await Client(theirs).receive():
                    received += data
        return before, received

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(main()) == (0, b"head" + bytes(size))


@LOOPS
@pytest.mark.parametrize("parts", [[b""], [b"head", b""], [b"", b"head", b"", memoryview(b"body"), b""]])
def test_empty_parts_are_not_sent(new_loop: Callable[[], Any], parts: list[bytes | memoryview]) -> None:
    """h11 ends a message by an empty part."""

    async def main() -> bytes:
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        inner, _ = await asyncio.get_running_loop().connect_accepted_socket(asyncio.Protocol, ours)
        transport, received = MeasuredTransport(inner, lambda: True), b""
        for part in parts:
            transport.write(part)
        transport.close()  # which waits until the system has taken all parts
        with theirs:
            async with asyncio.timeout(TIMEOUT):
                while data := await Client(theirs).receive():
                    received += data
        assert transport.written == len(received)
        return received

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(main()) == b"".join(parts)
