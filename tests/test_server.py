"""The limits around uvicorn's protocol, with either parser, in virtual time."""

from __future__ import annotations

import asyncio
import gc
import socket
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from math import inf
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from attention_service.http.entry import Entry
from attention_service.pipeline.engine import Engine
from attention_service.server.drain import Drain
from attention_service.server.protocol import MAX_UNTAKEN, LimitedProtocol, Limits
from attention_service.server.workers import Workers
from attention_service.settings import Settings
from tests.helpers.virtual_time import run

LIMITS = Limits(idle=5, head=30, head_bytes=1000, write=20, write_rate=4000, connections=9, descriptors=inf)
LONG = LIMITS._replace(idle=620)
ENGINE = Engine(Settings.model_construct())
INTERVAL = 1.0  # seconds between two checks of the limits
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
PARSERS = pytest.mark.parametrize("parser", ["h11", "httptools"])

App = Callable[[Any, Any, Any], Any]


class Client:
    """The client's end of a connection."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._loop = asyncio.get_running_loop()

    async def send(self, data: bytes) -> None:
        await self._loop.sock_sendall(self._end, data)

    async def receive(self, size: int = 2**16) -> bytes:
        """The next bytes; b"" if the connection is closed or reset."""
        try:
            return await self._loop.sock_recv(self._end, size)
        except ConnectionResetError:
            return b""

    async def closed(self) -> float:
        """The time at which the server closes the connection; bytes before are discarded."""
        while await self.receive():
            pass
        return self._loop.time()


def protocol_of(
    app: App, parser: str, limits: Limits, others: ServerState | None = None, **state: Any
) -> LimitedProtocol:
    """What the server makes for a new connection.

    others: the server's account of its connections
    state: the lifespan state of the application
    """
    whole = Drain(Entry(app, ENGINE), 0, Workers(None), grpc_port=None)
    config = uvicorn.Config(whole, http=parser, ws="none", lifespan="off", access_log=False,
                            log_config=None, timeout_keep_alive=limits.idle)  # fmt: skip
    config.load()
    return LimitedProtocol(
        config.http_protocol_class, limits, config=config, server_state=others or ServerState(), app_state=state
    )


@asynccontextmanager
async def connection(app: App, parser: str, limits: Limits = LIMITS, **state: Any) -> AsyncIterator[Client]:
    """A client on a new connection to an application. state: the lifespan state of the application"""
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    transport, _ = await loop.connect_accepted_socket(lambda: protocol_of(app, parser, limits, **state), ours)
    try:
        yield Client(theirs)
    finally:
        theirs.close()
        transport.abort()
        await asyncio.sleep(0)


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """An ASGI application that responds with the body of the request."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@PARSERS
def test_a_connection_without_a_byte_is_closed_after_the_idle_time(parser: str) -> None:
    async def main() -> float:
        async with connection(echo, parser) as client:
            return await client.closed()

    assert 5 <= run(main()) <= 5 + INTERVAL


@PARSERS
def test_a_request_head_that_takes_too_long_closes_the_connection(parser: str) -> None:
    async def main() -> tuple[bytes, float]:
        async with connection(echo, parser) as client:
            for at in range(len(GET) - 1):
                await client.send(GET[at : at + 1])
                await asyncio.sleep(1)
            return await client.receive(), asyncio.get_running_loop().time()

    answer, closed = run(main())
    assert answer == b""
    assert 30 <= closed <= 30 + INTERVAL


@PARSERS
def test_each_request_of_a_connection_has_its_own_head_timeout(parser: str) -> None:
    async def main() -> tuple[list[bytes], float]:
        answers = []
        async with connection(echo, parser) as client:
            for _ in range(4):
                for part in (GET[:5], GET[5:]):
                    await client.send(part)
                    await asyncio.sleep(4)
                answers.append(await client.receive())
            await client.send(GET[:-1])
            return answers, await client.closed()

    answers, closed = run(main())
    assert [answer[:15] for answer in answers] == [b"HTTP/1.1 200 OK"] * 4
    assert 32 + 30 <= closed <= 32 + 30 + INTERVAL


@PARSERS
def test_a_pipelined_partial_request_head_has_a_timeout(parser: str) -> None:
    async def main() -> tuple[bytes, float]:
        async with connection(slow, parser) as client:
            await client.send(GET + GET[:10])
            answer = await client.receive()
            for _ in range(100):  # so that the connection is not idle
                await asyncio.sleep(1)
                try:
                    await client.send(b"a")
                except ConnectionError:
                    break
            return answer, asyncio.get_running_loop().time()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(3)
        await echo(scope, receive, send)

    answer, closed = run(main())
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert closed <= 3 + 30 + 2 * INTERVAL


@PARSERS
def test_what_follows_the_last_of_pipelined_requests_is_discarded(parser: str) -> None:
    """uvicorn begins with the last one when the response before has ended, not when its bytes arrive."""

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(3)
        await echo(scope, receive, send)

    async def main() -> bytes:
        async with connection(slow, parser) as client:
            await client.send(GET + GET[:-2] + b"Connection: close\r\n\r\n")
            await asyncio.sleep(4)
            await client.send(GET)
            answers = b""
            while part := await client.receive():
                answers += part
            return answers

    assert [line[9:12] for line in run(main()).split(b"\r\n") if line.startswith(b"HTTP/1.1 ")] == [b"200", b"200"]


@PARSERS
@pytest.mark.parametrize(
    "head", [GET[:-2] + b"A: " + b"a" * 3000, GET[:-2] + b"A: b\r\n" * 500, b"GET /" + b"a" * 3000]
)
def test_a_request_head_that_is_too_large_closes_the_connection(parser: str, head: bytes) -> None:
    async def main() -> int:
        sent = 0
        async with connection(echo, parser) as client:
            try:
                for at in range(0, len(head), 100):
                    await client.send(head[at : at + 100])
                    await asyncio.sleep(0.01)
                    sent += 100
            except ConnectionError:
                pass
        return sent

    assert 1000 <= run(main()) <= 1300


def test_trailers_and_chunk_extensions_have_a_limit() -> None:
    """h11 has its own limit; httptools keeps all trailers in memory."""

    async def main(start: bytes, endless: bytes) -> int:
        sent = 0
        async with connection(echo, "httptools") as client:
            await client.send(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n")
            try:
                await client.send(start)
                while sent < 2**24:
                    await client.send(endless)
                    await asyncio.sleep(0.001)
                    sent += len(endless)
            except ConnectionError:
                pass
        return sent

    for start, endless in ((b"0\r\n", b"A: b\r\n" * 1000), (b"2;", b"a" * 6000)):
        assert run(main(start, endless)) < 2 * MAX_UNTAKEN


@PARSERS
@pytest.mark.parametrize("chunked", [False, True])
def test_the_limit_of_request_heads_does_not_apply_to_bodies(parser: str, chunked: bool) -> None:
    body = b"x" * 3_000_000

    async def main() -> int:
        async with connection(echo, parser) as client:
            if chunked:
                head = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(body)
                data = head + body + b"\r\n0\r\n\r\n"
            else:
                data = b"Content-Length: %d\r\n\r\n" % len(body) + body
            sending = asyncio.create_task(client.send(b"POST / HTTP/1.1\r\nHost: x\r\n" + data))
            received = len((await client.receive()).partition(b"\r\n\r\n")[2])
            while received < len(body):
                received += len(await client.receive())
            await sending
        return received

    assert run(main()) == len(body)


async def endless(scope: Any, receive: Any, send: Any) -> None:
    """An ASGI application whose response never ends."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(2**12):
        await send({"type": "http.response.body", "body": b"x" * 2**16, "more_body": True})


@PARSERS
def test_a_client_that_reads_nothing_is_closed(parser: str) -> None:
    async def main() -> float:
        async with connection(endless, parser) as client:
            await client.send(GET)
            await asyncio.sleep(20 + 3 * INTERVAL)
            return await client.closed()

    assert run(main()) == 20 + 3 * INTERVAL  # the limits are checked at intervals


@PARSERS
@pytest.mark.parametrize("size", [2**16, 2**13])
def test_a_client_that_reads_slowly_is_closed_if_it_falls_too_far_behind(parser: str, size: int) -> None:
    """4,000 bytes a second are asked for."""

    async def main() -> float:
        loop = asyncio.get_running_loop()
        async with connection(endless, parser) as client:
            await client.send(GET)
            start = loop.time()
            while loop.time() < start + 1000 and await client.receive(size):
                await asyncio.sleep(10)
            return loop.time() - start

    seconds = run(main())
    assert seconds == 1000 if size == 2**16 else 20 < seconds < 400


@PARSERS
@pytest.mark.parametrize("more", [b"", GET, b"\0 malformed", GET[:10]])
def test_bytes_after_the_last_request_do_not_reach_the_parser(parser: str, more: bytes) -> None:
    async def main() -> tuple[bytes, float]:
        async with connection(slow_echo, parser) as client:
            await client.send(GET[:-2] + b"Connection: close\r\n\r\n")
            await client.send(more)
            await asyncio.sleep(0.5)
            await client.send(more)
            answer = await client.receive()
            return answer, await client.closed()

    answer, closed = run(main())
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert closed == 1


@PARSERS
@pytest.mark.parametrize(("framing", "size"), [(b"", 2**19), (b"Transfer-Encoding: chunked\r\n", 2**13)])
def test_only_bodies_of_known_length_come_in_large_pieces(parser: str, framing: bytes, size: int) -> None:
    """Chunks are slow to parse, also if a length is announced beside them, which h11 allows."""

    async def main() -> int:
        protocol = protocol_of(slow_echo, parser, LIMITS)
        ours, theirs = socket.socketpair()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, ours)
        theirs.send(b"POST / HTTP/1.1\r\nHost: x\r\n" + framing + b"Content-Length: 10000000\r\n\r\n")
        await asyncio.sleep(0.1)
        found = len(protocol.get_buffer(-1))
        transport.abort()
        theirs.close()
        await asyncio.sleep(2)
        return found

    assert run(main()) == size


async def slow_echo(scope: Any, receive: Any, send: Any) -> None:
    await asyncio.sleep(1)
    await echo(scope, receive, send)


@PARSERS
@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(GET, id="a request"),
        pytest.param(GET + GET, id="two requests at once"),
        pytest.param(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9999\r\n\r\n" + 5000 * b"x", id="part of a body"),
    ],
)
def test_a_lost_connection_is_freed_without_garbage_collection(parser: str, sent: bytes) -> None:
    """Garbage is collected rarely: aborted uploads would add up, half a megabyte each."""

    async def main() -> bool:
        ours, theirs = socket.socketpair()
        loop = asyncio.get_running_loop()
        _, protocol = await loop.connect_accepted_socket(lambda: protocol_of(echo, parser, LIMITS), ours)
        theirs.send(sent)
        await asyncio.sleep(0.1)
        left = weakref.ref(protocol)
        del protocol, _
        theirs.close()
        await asyncio.sleep(2)
        return left() is None

    gc.disable()
    try:
        assert run(main())
    finally:
        gc.enable()


@PARSERS
def test_bytes_after_closing_are_discarded_for_a_limited_time(parser: str) -> None:
    """Otherwise they would reset the connection, and the client would lose the response."""

    async def main() -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        async with connection(echo, parser) as client:
            await client.send(b"malformed\r\n\r\n")
            assert (await client.receive()).startswith(b"HTTP/1.1 400 Bad Request")
            ended = loop.time()
            try:
                while True:
                    await client.send(b"x" * 1000)
                    await asyncio.sleep(0.1)
            except ConnectionError:
                pass
            return ended, loop.time()

    ended, lost = run(main())
    assert 5 <= lost - ended <= 5 + 3 * INTERVAL


@PARSERS
def test_a_request_after_the_last_one_does_not_cut_its_response(parser: str) -> None:
    """Over TCP: closing a socket with unread bytes would reset the connection, and drop what is not yet delivered."""
    size = 2**24
    last = b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % size

    async def main() -> bytes:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: protocol_of(echo, parser, LIMITS), "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname(), limit=2**14)
        writer.write(last + bytes(size))
        await writer.drain()
        await asyncio.sleep(0.5)  # the response fills the buffers
        writer.write(GET)
        response = await reader.read(-1)
        writer.close()
        server.close()
        return response

    head, _, body = asyncio.run(main()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK")
    assert len(body) == size


@PARSERS
def test_an_idle_connection_is_closed_without_waiting_for_the_client(parser: str) -> None:
    async def main() -> float:
        async with connection(echo, parser) as client:
            await client.send(GET)
            assert (await client.receive()).startswith(b"HTTP/1.1 200 OK")
            closed = await client.closed()
            with pytest.raises(ConnectionError):
                await client.send(GET)
            return closed

    assert run(main()) == 5  # the keep-alive time


@PARSERS
@pytest.mark.parametrize("asked", [True, False])
def test_an_idle_connection_stays_as_long_as_the_setting_says(parser: str, asked: bool) -> None:
    """Proxies keep idle connections for 60 s and more, and some connect before they have a request."""

    async def main() -> float:
        async with connection(echo, parser, LONG) as client:
            if asked:
                await client.send(GET)
                await client.receive()
            await asyncio.sleep(600)
            await client.send(GET)
            assert (await client.receive()).startswith(b"HTTP/1.1 200 OK")
            return await client.closed()

    assert run(main()) == 600 + 620


@PARSERS
def test_a_silent_connection_is_closed_in_the_end(parser: str) -> None:
    async def main() -> float:
        async with connection(echo, parser, LONG) as client:
            return await client.closed()

    assert 620 <= run(main()) <= 620 + 5 + INTERVAL


@PARSERS
def test_a_slow_head_after_a_long_pause_has_its_timeout(parser: str) -> None:
    """An idle connection is looked at seldom, a connection with a part of a head often."""

    async def main() -> float:
        async with connection(echo, parser, LONG) as client:
            await client.send(GET)
            await client.receive()
            await asyncio.sleep(100)
            await client.send(GET[:10])
            return await client.closed()

    assert 130 <= run(main()) <= 130 + INTERVAL


@PARSERS
def test_idle_connections_make_room_when_there_are_too_many(parser: str) -> None:
    """Those that are idle for five seconds go; a busy one stays, and so do all where there are as many as may be."""

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(100)
        await echo(scope, receive, send)

    async def main(count: int) -> tuple[int, int, bytes]:
        others = ServerState()
        async with AsyncExitStack() as stack:
            busy, *_ = [
                await stack.enter_async_context(connection(slow, parser, LONG, others=others)) for _ in range(count)
            ]
            await busy.send(GET)
            await asyncio.sleep(4)
            before = len(others.connections)
            await asyncio.sleep(96 + INTERVAL)
            return before, len(others.connections), await busy.receive()

    many = LONG.connections + 3
    before, left, answer = run(main(many))
    assert before == many
    assert 1 <= left <= LONG.connections
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert run(main(LONG.connections))[:2] == (LONG.connections, LONG.connections)


async def closing(scope: Any, receive: Any, send: Any) -> None:
    """An ASGI application whose response ends the connection."""
    await send({"type": "http.response.start", "status": 204, "headers": [(b"connection", b"close")]})
    await send({"type": "http.response.body"})


@PARSERS
@pytest.mark.parametrize(
    ("app", "request_", "kept"),
    [
        (echo, GET, True),
        (echo, b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", False),
        (echo, b"GET / HTTP/1.0\r\nHost: x\r\nConnection: keep-alive\r\n\r\n", False),
        (closing, GET, False),
    ],
)
def test_responses_say_how_long_the_connection_is_kept(parser: str, app: App, request_: bytes, kept: bool) -> None:
    """RFC 9110, section 7.6.1: Connection lists the field. None on a connection that ends with the response."""

    async def main() -> bytes:
        async with connection(app, parser, LONG) as client:
            await client.send(request_)
            return (await client.receive()).lower()

    answer = run(main())
    assert (b"\r\nkeep-alive: timeout=620\r\n" in answer) is kept, answer
    assert (b"\r\nconnection: keep-alive\r\n" in answer) is kept, answer


def test_an_error_of_the_parser_within_a_response_closes_the_connection(caplog: pytest.LogCaptureFixture) -> None:
    """uvicorn would send a second response, which h11 refuses; the bytes that the application has sent still arrive."""

    async def early(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 404, "headers": [(b"content-length", b"4")]})
        await send({"type": "http.response.body", "body": b"none", "more_body": True})
        assert (await receive())["type"] == "http.disconnect"

    async def main() -> bytes:
        async with connection(early, "h11") as client:
            await client.send(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
            await asyncio.sleep(0.1)
            await client.send(b"zz\r\n")
            return b"".join([await client.receive(), await client.receive()])

    answer = run(main())
    assert answer.startswith(b"HTTP/1.1 404")
    assert answer.endswith(b"\r\n\r\nnone")
    assert [record for record in caplog.records if record.exc_info] == []


@PARSERS
@pytest.mark.parametrize("sent", [False, True])
def test_sending_to_a_closed_connection_is_not_an_error(
    parser: str, sent: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """uvicorn would log an error if a response is incomplete when the client disconnects."""

    async def aborted(scope: Any, receive: Any, send: Any) -> None:
        if sent:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
        scope["state"]["connection"].transport.abort()
        await echo(scope, receive, send)

    async def main() -> bytes:
        async with connection(aborted, parser) as client:
            await client.send(GET)
            return await client.receive()

    assert run(main())[:15] == (b"HTTP/1.1 200 OK" if sent else b"")
    assert caplog.records == []


@PARSERS
def test_a_client_that_disconnects_with_a_pipelined_request_ends_both(
    parser: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With httptools, uvicorn signals the disconnect only to the last of several requests."""
    ended: list[float] = []

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(1)
        await echo(scope, receive, send)
        ended.append(asyncio.get_running_loop().time())

    async def main() -> None:
        async with connection(slow, parser) as client:
            await client.send(GET + GET)
            await asyncio.sleep(0.1)
        await asyncio.sleep(10)

    run(main())
    assert ended[0] <= 3
    assert caplog.records == []


@PARSERS
@pytest.mark.parametrize("sent", [False, True])
def test_a_cancelled_request_closes_its_connection(parser: str, sent: bool, caplog: pytest.LogCaptureFixture) -> None:
    """uvicorn cancels requests after the grace period; it would send a 500, and log an error with a traceback."""

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        if sent:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"part", "more_body": True})
        asyncio.get_running_loop().call_soon(asyncio.current_task().cancel)  # type: ignore[union-attr]  # there is a current task
        await asyncio.sleep(1000)

    async def main() -> bytes:
        async with connection(endless, parser) as client:
            await client.send(GET)
            received = await client.receive()
            assert await client.receive() == b""
            return received

    assert (b"part" in run(main())) is sent
    assert caplog.records == []


@PARSERS
def test_response_head_and_body_are_sent_in_one_write(parser: str, monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[bytes] = []

    async def main() -> bytes:
        async with connection(echo, parser) as client:
            await client.send(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc")
            return await client.receive()

    send = socket.socket.send

    def recorded(self: socket.socket, data: bytes) -> int:
        writes.append(bytes(data))
        return send(self, data)

    monkeypatch.setattr(socket.socket, "send", recorded)
    answer = run(main())
    assert answer.endswith(b"\r\n\r\nabc")
    assert answer in writes


@PARSERS
@pytest.mark.parametrize(
    ("method", "length"), [(b"POST", b"9"), (b"HEAD", b"9"), (b"POST", None)], ids=["fails", "head", "stream"]
)
def test_a_head_does_not_wait_for_a_body_that_may_not_come(parser: str, method: bytes, length: bytes | None) -> None:
    """That of a HEAD request has none, one of unknown length may begin late, and that of a failed application never."""

    async def late(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        headers = [] if length is None else [(b"content-length", length)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if method == b"HEAD":
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        elif length is None:
            await asyncio.sleep(1000)
        else:
            raise ValueError

    async def main() -> bytes:
        async with connection(late, parser) as client:
            await client.send(method + b" / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc")
            return await client.receive()

    assert run(main()).startswith(b"HTTP/1.1 200 OK\r\n")


def test_requests_get_the_lifespan_state() -> None:
    """The state that the lifespan sets is in the scope of every request."""
    found: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        found.append(scope["state"])
        await echo(scope, receive, send)

    async def main() -> None:
        async with connection(app, "h11", own=1) as client:
            await client.send(GET)
            await client.receive()

    run(main())
    assert [{"connection", "own"} <= set(state) for state in found] == [True]
    assert found[0]["own"] == 1
