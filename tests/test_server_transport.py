"""The transport that joins writes: what it holds back, what it sends, and when it pauses its protocol."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from attention_service.server.transport import CorkedTransport
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
            self.transport = CorkedTransport(transport, lambda: True)
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


class Pausing(asyncio.Protocol):
    """Keeps whether its transport has asked it to pause."""

    paused = False

    def pause_writing(self) -> None:
        self.paused = True


@asynccontextmanager
async def corked() -> AsyncIterator[tuple[CorkedTransport, Pausing, Client]]:
    """A corked transport, its protocol, and the other end."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    transport, protocol = await asyncio.get_running_loop().connect_accepted_socket(Pausing, ours)
    with theirs:
        held = CorkedTransport(transport, lambda: True)
        held.cork()
        yield held, protocol, Client(theirs)
        held.abort()


@LOOPS
@pytest.mark.parametrize("parts", [[b""], [b"head", b""], [b"", b"head", b"", memoryview(b"body"), b""]])
def test_empty_parts_are_not_sent(new_loop: Callable[[], Any], parts: list[bytes | memoryview]) -> None:
    """h11 ends a message by an empty part, which `writelines` of asyncio would try to send for ever."""

    async def main() -> bytes:
        async with corked() as (transport, _, client):
            for part in parts:
                transport.write(part)
            transport.uncork()
            transport.write(b"")
            transport.close()  # which waits until the system has taken all parts
            received = b""
            async with asyncio.timeout(TIMEOUT):
                while data := await client.receive():
                    received += data
            return received

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(main()) == b"".join(parts)


@LOOPS
def test_held_parts_pause_the_protocol_of_a_client_that_does_not_read(new_loop: Callable[[], Any]) -> None:
    """`writelines` of asyncio would let any number of bytes wait, unnoticed."""

    async def main() -> bool:
        async with corked() as (transport, protocol, _):
            for _ in range(2):
                transport.write(bytes(2**22))
            transport.uncork()
            return protocol.paused

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(main())
