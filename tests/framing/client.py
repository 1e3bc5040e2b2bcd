"""A client that sends bytes in given pieces, and receives all bytes of the responses."""

from __future__ import annotations

import asyncio
import fcntl
import socket
import ssl
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final, NamedTuple

from tests.attack.server import unverified

TIMEOUT: Final = 120.0  # seconds
SIOCOUTQNSD: Final = 0x894B  # Linux: bytes that the kernel has yet to send
HEALTH: Final = b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n"


class Server(NamedTuple):
    """The port of a server, its HTTP parser, and whether it uses TLS."""

    port: int
    parser: str
    tls: bool


class Barrier:
    """Waits until the server has read what the kernel holds for it, by health checks on a separate connection.

    The event loop of the server handles events in the order of their arrival, so that it has read all earlier bytes
    of other connections when it responds, except where it paused reading. Concurrent callers share a health check.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._waiting: list[asyncio.Future[None]] = []
        self._asking: asyncio.Task[None] | None = None
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def __aenter__(self) -> Barrier:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._streams is not None:
            self._streams[1].close()
            with suppress(OSError):
                await self._streams[1].wait_closed()

    async def wait(self) -> None:
        """Return when the server has read all bytes that were sent before."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask())
        await future

    async def _ask(self) -> None:
        while self._waiting:
            waiting, self._waiting = self._waiting, []
            try:
                await self._health()
            except (ConnectionError, asyncio.IncompleteReadError):  # idle for too long
                self._streams = None
                await self._health()
            for future in waiting:
                if not future.done():
                    future.set_result(None)
            await asyncio.sleep(0)  # so that the callers can wait again
        self._asking = None

    async def _health(self) -> None:
        if self._streams is None:
            tls = unverified() if self._server.tls else None
            self._streams = await asyncio.open_connection("127.0.0.1", self._server.port, ssl=tls)
        self._streams[1].write(HEALTH)
        await self._streams[0].readuntil(b'{"status":"ok"}')


class Connection:
    """One connection. TLS is a layer over the socket, so that each piece is sent separately."""

    def __init__(self, server: Server, barrier: Barrier) -> None:
        self.received = bytearray()
        self._server = server
        self._barrier = barrier
        self._loop = asyncio.get_running_loop()
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = unverified().wrap_bio(self._incoming, self._outgoing) if server.tls else None
        self._may_receive = asyncio.Event()

    async def exchange(
        self, pieces: Iterable[bytes], complete: Callable[[bytearray], bool], late: bool = False
    ) -> None:
        """Send the pieces, each after the server has read the one before, and receive until the server closes.

        complete: True if the received bytes are enough; late: receive nothing until all is sent, or the
        kernel's buffers are full. Errors: TimeoutError, OSError.
        """
        with socket.socket() as self._socket:
            self._socket.setblocking(False)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            async with asyncio.timeout(TIMEOUT):
                await self._loop.sock_connect(self._socket, ("127.0.0.1", self._server.port))
                await self._handshake()
                receiving = asyncio.create_task(self._receive(complete))
                try:
                    if not late:
                        self._may_receive.set()
                    with suppress(ConnectionError):  # the server may have closed the connection already
                        for piece in pieces:
                            await self._send(piece, receiving)
                    self._may_receive.set()
                    await receiving
                finally:
                    receiving.cancel()

    async def _handshake(self) -> None:
        done = self._tls is None
        while self._tls is not None and not done:
            with suppress(ssl.SSLWantReadError):
                self._tls.do_handshake()
                done = True
            await self._loop.sock_sendall(self._socket, self._outgoing.read())
            if not done:
                if not (data := await self._loop.sock_recv(self._socket, 2**16)):
                    raise ConnectionResetError
                self._incoming.write(data)

    async def _send(self, piece: bytes, receiving: asyncio.Task[None]) -> None:
        if self._tls is not None:
            self._tls.write(piece)
            piece = self._outgoing.read()
        sent = 0
        with suppress(BlockingIOError):
            sent = self._socket.send(piece)
        if sent < len(piece):
            self._may_receive.set()
            await self._loop.sock_sendall(self._socket, memoryview(piece)[sent:])
        while any(fcntl.ioctl(self._socket, SIOCOUTQNSD, bytes(4))) and not receiving.done():
            self._may_receive.set()
            await self._barrier.wait()
        await self._barrier.wait()

    async def _receive(self, complete: Callable[[bytearray], bool]) -> None:
        await self._may_receive.wait()
        with suppress(ConnectionResetError, ssl.SSLError):  # a server may close with bytes unread
            while not complete(self.received) and (data := await self._loop.sock_recv(self._socket, 2**20)):
                if self._tls is None:
                    self.received += data
                    continue
                self._incoming.write(data)
                with suppress(ssl.SSLWantReadError):
                    while plain := self._tls.read(2**20):
                        self.received += plain
                    return  # TLS is closed
