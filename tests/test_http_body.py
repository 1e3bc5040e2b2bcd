"""Receiving bodies, checking request heads, discarding unread bodies: ASGI in virtual time, without a server."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from attention_service.errors import BodyTooLarge, Busy, TooSlow
from attention_service.http.body import BodyLimits, content_length, receive_body
from attention_service.http.entry import ANNOUNCED, PAUSE, UNKNOWN, Entry, discarded_bytes
from attention_service.http.head import MAX_HEAD, check_host, parse_length, read_head
from attention_service.pipeline.admission import AdmissionController, Lease
from attention_service.pipeline.deadline import Deadline
from attention_service.pipeline.engine import Engine
from attention_service.pipeline.execution import Execution
from attention_service.settings import Settings
from tests.helpers.virtual_time import run

MB = 2**20
LIMITS = BodyLimits(size=64 * MB, grace=30, rate=MB)


class Sender:
    """An ASGI receive callable that returns `count` chunks, one every so many seconds.

    disconnects, silent: how it goes on instead of ending the body; sent: bytes of chunks that were received
    """

    def __init__(
        self, chunk: int, count: int, every: float = 0, *, disconnects: bool = False, silent: bool = False
    ) -> None:
        self._chunks = self._make(chunk, count, every, disconnects, silent)
        self.sent = 0

    async def _make(
        self, chunk: int, count: int, every: float, disconnects: bool, silent: bool
    ) -> AsyncIterator[dict[str, Any]]:
        for number in range(count):
            await asyncio.sleep(every)
            self.sent += chunk
            yield {
                "type": "http.request",
                "body": bytes([number % 256]) * chunk,
                "more_body": disconnects or silent or number < count - 1,
            }
        if disconnects:
            yield {"type": "http.disconnect"}
        await asyncio.get_running_loop().create_future()

    async def receive(self) -> Any:
        return await anext(self._chunks)


def execution(memory: int = 256 * MB, queue: int = 9) -> Execution:
    return Execution(AdmissionController(2, memory, queue, asyncio.get_running_loop().time), 1000)


def received(sender: Sender, length: int | None = None, limits: BodyLimits = LIMITS) -> tuple[bytes, int, float]:
    """The received body, the memory of its lease, and the seconds it took."""

    async def main() -> tuple[bytes, int, float]:
        running = execution()
        body = await receive_body(sender.receive, length, limits, running)
        held = running.lease.memory
        return bytes(body), held, asyncio.get_running_loop().time()

    return run(main())


@pytest.mark.parametrize("length", [None, 5 * MB])
def test_the_lease_of_a_body_grows_as_it_arrives(length: int | None) -> None:
    body, held, _ = received(Sender(MB, 5), length)
    assert body == b"".join(bytes([number]) * MB for number in range(5))
    assert held == 5 * MB


def test_many_small_chunks_take_little_more_memory_than_they_hold() -> None:
    count, size = 10_000, 10
    sender = Sender(size, count)

    async def main() -> tuple[int, int]:
        running = execution()
        tracemalloc.start()
        try:
            body = await receive_body(sender.receive, None, LIMITS, running)
            return len(body), tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    length, peak = run(main())
    assert length == count * size
    assert peak < 2 * length  # as objects of their own, the chunks would take five times their bytes


def test_a_small_body_needs_no_memory_of_admission_control() -> None:
    assert received(Sender(1000, 3)) == (b"\0" * 1000 + b"\1" * 1000 + b"\2" * 1000, 0, 0)


@pytest.mark.parametrize(("chunk", "length"), [(MB, None), (60 * MB, 64 * MB)])
def test_a_body_beyond_the_limit_is_not_read_further(chunk: int, length: int | None) -> None:
    sender = Sender(chunk, 100)
    with pytest.raises(BodyTooLarge):
        received(sender, length)
    assert sender.sent <= LIMITS.size + chunk


def test_a_body_with_a_content_length_beyond_the_limit_is_not_read() -> None:
    for text in (b"%d" % (LIMITS.size + 1), b"9" * 30):
        with pytest.raises(BodyTooLarge):
            content_length({b"content-length": text}, LIMITS)
    assert content_length({b"content-length": b"17"}, LIMITS) == 17
    assert content_length({}, LIMITS) is None


def test_a_slow_but_steady_body_is_received() -> None:
    """Sixty megabytes at the minimum rate take twice the grace period."""
    body, _, took = received(Sender(MB, 60, every=1))
    assert (len(body), took) == (60 * MB, 60)


@pytest.mark.parametrize(
    ("sender", "after"),
    [
        (Sender(1, 0), 30),
        (Sender(1, 1000, every=1), 30),
        (Sender(MB, 60, every=3), 45),
        (Sender(63 * MB, 1, every=1, silent=True), 31),
        (Sender(5 * MB, 4, every=10, silent=True), 50),
    ],
    ids=["nothing", "single bytes", "a third of the rate", "silence after many bytes", "bursts, then silence"],
)
def test_a_body_below_the_minimum_rate_is_refused(sender: Sender, after: float) -> None:
    """Bytes sent fast buy no silence beyond the 30 seconds that each sender has."""

    async def main() -> float:
        with pytest.raises(TooSlow, match="at most 30 s behind"):
            await receive_body(sender.receive, None, LIMITS, execution())
        return asyncio.get_running_loop().time()

    assert run(main()) == pytest.approx(after, abs=1)


@pytest.mark.parametrize("first", [1, 4 * MB, 63 * MB])
def test_a_large_body_that_is_announced_and_not_sent_keeps_no_other_waiting(first: int) -> None:
    """At a budget of 1 GiB, JSON of 64 MiB might need all of it to be decoded. Half of it is there for others."""

    async def main() -> float:
        others = [execution(1024 * MB)]
        others += [Execution(others[0].admission, 1000) for _ in range(8)]
        silent = [
            asyncio.create_task(receive_body(Sender(first, 1, silent=True).receive, 64 * MB, LIMITS, other))
            for other in others[:-1]
        ]
        await asyncio.sleep(1)
        await receive_body(Sender(MB, 5).receive, 5 * MB, LIMITS, others[-1])
        await others[-1].grow(500 * MB, slot=True)
        assert not any(task.done() for task in silent)
        others[-1].lease.release()
        took = asyncio.get_running_loop().time()
        assert all(isinstance(end, TooSlow) for end in await asyncio.gather(*silent, return_exceptions=True))
        return took

    assert run(main()) == 1


def test_waiting_for_memory_does_not_count_against_the_sender() -> None:
    async def main() -> None:
        waiting = execution(4 * MB)
        holder = Lease(waiting.admission)
        await holder.grow(4 * MB, Deadline(1000))
        asyncio.get_running_loop().call_later(500, holder.release)
        sender = Sender(MB, 3, every=1)
        assert len(await receive_body(sender.receive, 3 * MB, LIMITS, waiting)) == 3 * MB
        assert asyncio.get_running_loop().time() == pytest.approx(502)

    run(main())


def test_a_client_that_disconnects_ends_receiving() -> None:
    with pytest.raises(ClientDisconnect):
        received(Sender(1000, 3, disconnects=True))


def test_a_large_body_is_refused_before_it_is_read_if_the_queue_is_full() -> None:
    async def main() -> int:
        running = execution(queue=0)
        others = [Lease(running.admission) for _ in range(2)]
        for other in others:
            other.begin()
        sender = Sender(MB, 5)
        with pytest.raises(Busy):
            await receive_body(sender.receive, 5 * MB, LIMITS, running)
        assert len(others) == 2
        return sender.sent

    assert run(main()) == 0


def scope(*headers: tuple[bytes, bytes], **more: Any) -> dict[str, Any]:
    return {
        "type": "http", "http_version": "1.1", "method": "POST", "path": "/", "raw_path": b"/", "query_string": b"",
        "headers": list(headers),
    } | more  # fmt: skip


HOST = (b"host", b"x")


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (scope(HOST), None),
        (scope(http_version="1.0"), None),
        (scope(http_version="2"), None),
        (scope(HOST, (b"transfer-encoding", b"chunked")), None),
        (scope(HOST, (b"transfer-encoding", b"Chunked ")), None),
        (scope(HOST, (b"content-length", b"5")), None),
        (scope(HOST, (b"a", b"b" * (MAX_HEAD - 100))), None),
        (scope(), 400),
        (scope(HOST, http_version="9.9"), 400),
        (scope(HOST, HOST), 400),
        (scope(HOST, (b"transfer-encoding", b"gzip, chunked")), 400),
        (scope(HOST, (b"transfer-encoding", b"gzip"), (b"transfer-encoding", b"chunked")), 400),
        (scope(HOST, (b"transfer-encoding", b"identity")), 400),
        (scope(HOST, (b"content-length", b"5"), (b"content-length", b"5")), 400),
        (scope(HOST, (b"content-length", b"5"), (b"transfer-encoding", b"chunked")), 400),
        (scope(HOST, (b"a", b"b" * MAX_HEAD)), 431),
        (scope(HOST, *[(b"a", b"b")] * (MAX_HEAD // 6)), 431),
        (scope(HOST, raw_path=b"/" * MAX_HEAD), 431),
        (scope(HOST, query_string=b"a" * MAX_HEAD), 431),
    ],
)
def test_request_heads_are_checked(request_: dict[str, Any], status: int | None) -> None:
    _, error = read_head(request_)
    assert (None if error is None else error.status) == status
    assert error is None or error.headers == {"Connection": "close"}


@pytest.mark.parametrize(
    ("hosts", "is_allowed"),
    [([b"localhost", b"localhost"], True), ([b"evil.example", b"a.inner.example"], False), ([b"a,b"], False)],
)
def test_each_of_several_hosts_is_checked(hosts: list[bytes], is_allowed: bool) -> None:
    """HTTP/1.0 may have several."""
    request_ = scope(*((b"host", host) for host in hosts), http_version="1.0")
    headers, error = read_head(request_)
    assert error is None
    assert (check_host(headers[b"host"], request_, ("*.inner.example",)) is None) == is_allowed


async def refuse(scope: Any, receive: Any, send: Any) -> None:
    """An ASGI application that responds without reading the body."""
    await send({"type": "http.response.start", "status": 413, "headers": []})
    await send({"type": "http.response.body", "body": b"no"})


async def read_all(scope: Any, receive: Any, send: Any) -> None:
    while (await receive()).get("more_body"):
        pass
    await refuse(scope, receive, send)


def response_of(
    app: Callable[[Any, Any, Any], Coroutine[Any, Any, None]], sender: Sender, *headers: tuple[bytes, bytes]
) -> tuple[list[Any], float]:
    """The messages that an application sends, and the time at which the response ends."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append({name: value for name, value in message.items() if name != "headers"})

    async def main() -> float:
        await Entry(app, Engine(Settings(read_timeout=30)))(scope(HOST, *headers), sender.receive, send)
        return asyncio.get_running_loop().time()

    return sent, run(main())


START = {"type": "http.response.start", "status": 413}
LENGTH = (b"content-length", b"%d" % (10 * MB))
CHUNKED = (b"transfer-encoding", b"chunked")


@pytest.mark.parametrize("framing", [LENGTH, CHUNKED])
def test_the_rest_of_a_body_is_discarded_between_the_response_and_its_end(framing: tuple[bytes, bytes]) -> None:
    sender = Sender(MB, 10, every=1)
    sent, ended = response_of(refuse, sender, framing)
    assert sent == [
        START,
        {"type": "http.response.body", "body": b"no", "more_body": True},
        {"type": "http.response.body", "body": b""},
    ]
    assert sender.sent == 10 * MB
    assert ended == pytest.approx(10 + 80 * PAUSE, abs=0.1)  # for each 128 KiB


@pytest.mark.parametrize("app", [refuse, read_all])
def test_nothing_is_discarded_after_a_complete_body(app: Any) -> None:
    framing = [LENGTH] if app is read_all else []
    sent, _ = response_of(app, Sender(MB, 10), *framing)
    assert sent == [START, {"type": "http.response.body", "body": b"no"}]


def test_a_path_to_a_file_is_passed_on() -> None:
    """Servers that send files themselves get the path of one in the place of a body."""

    async def send_path(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 413, "headers": []})
        await send({"type": "http.response.pathsend", "path": "/page.css"})

    sent, ended = response_of(send_path, Sender(MB, 10, every=1), LENGTH)
    assert sent == [START, {"type": "http.response.pathsend", "path": "/page.css"}]
    assert ended == 0


@pytest.mark.parametrize(
    ("sender", "framing", "bytes_", "seconds"),
    [
        (Sender(MB, 1000), CHUNKED, UNKNOWN, 128 * PAUSE),
        (Sender(MB, 1000), (b"content-length", b"%d" % 2**40), UNKNOWN, 128 * PAUSE),
        (Sender(1, 1000, every=1), CHUNKED, 30, 30),
    ],
)
def test_discarding_has_limits(sender: Sender, framing: tuple[bytes, bytes], bytes_: int, seconds: float) -> None:
    sent, ended = response_of(refuse, sender, framing)
    assert len(sent) == 3
    assert sender.sent == pytest.approx(bytes_, abs=MB)
    assert ended == pytest.approx(seconds, abs=0.1)


def test_discarded_bytes_are_counted() -> None:
    assert discarded_bytes({b"content-length": b"5000000"}) == 5_000_000
    for length in (b"%d" % ANNOUNCED, b"9" * 30, b"x"):
        assert discarded_bytes({b"content-length": length}) == UNKNOWN
    assert discarded_bytes({}) == UNKNOWN


@pytest.mark.parametrize(
    ("value", "length"),
    [
        (b"0", 0), (b"0017", 17), (b"9" * 18, 10**18 - 1), (b"1" + b"0" * 18, 10**18), (b"9" * 60_000, 10**18),
        (b"", None), (b"-1", None), (b"+1", None), (b"1_0", None), (b"1, 1", None), ("\u0663".encode(), None),
    ],
)  # fmt: skip
def test_content_lengths_are_parsed_the_same_everywhere(value: bytes, length: int | None) -> None:
    assert parse_length(value) == length
