"""One request and its answer: the two callables of ASGI, for bodies and answers of megabytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from starlette.requests import ClientDisconnect
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from service.codecs.decoded import Body
from service.http.aside import Filling

CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
# Of `scope["extensions"]`: an async function from the length that was announced to the body.
WHOLE_BODY: Final = "attention.whole_body"
# Of the same: the tasks of all requests that have begun and are not answered yet.
AT_WORK: Final = "attention.at_work"


class Cycle(RequestResponseCycle):
    """uvicorn's, but a body is received where it stays, and an answer sent from where it lies, with its head."""

    body: Any  # bytes, as long as none were added to the first, then a bytearray
    fill: Callable[[int], Filling]  # begins to receive the rest of a body of this length
    _head: bytes | None = None
    _left: int | None = None  # bytes of the answer, where their number is known

    async def whole(self, length: int) -> Body:
        """The body, whose length was announced, in place of all calls to `receive` up to its end.

        Errors: ClientDisconnect.
        """
        if self.waiting_for_100_continue and not self.transport.is_closing():
            self.waiting_for_100_continue = False
            self.transport.write(CONTINUE)
        body: Body = self.body
        if self.more_body and not self.disconnected:
            body = await self._filled(length)
        self.body = b""
        if self.disconnected:
            raise ClientDisconnect
        self.message_event.clear()
        return body

    async def _filled(self, length: int) -> memoryview:
        filling = self.fill(length)
        while self.more_body and not self.disconnected:
            self.message_event.clear()
            await self.message_event.wait()
        return filling.body

    def forget(self) -> None:
        """Let go of the body, and of what refers to this in turn: memory is not to wait until cycles are looked for."""
        self.body = b""
        self.scope.pop("extensions", None)

    async def send(self, message: Any) -> None:
        """Part of the answer. The head is kept until something follows, as ASGI has servers do.

        Errors: RuntimeError, for an application that breaks the rules.
        """
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        if message["type"] == "http.response.body":
            self._send_body(message.get("body", b""), message.get("more_body", False))
        else:
            self._send_head(message["status"], message.get("headers", ()))

    def _send_head(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        if self.response_started:
            raise RuntimeError("an answer has one head")
        lines = [STATUS_LINE[status]]
        length = None
        closed = False
        for name, value in (*self.default_headers, *headers):
            if name == b"content-length":
                length = int(value)
            elif name == b"connection":
                closed = b"close" in value
            lines += name, b": ", value, b"\r\n"
        ends = len(lines) // 4 + 1
        if status in (204, 304) or self.scope["method"] == "HEAD":
            length = 0
        self._left = length
        # An answer of unknown length goes in chunks, or to clients of HTTP/1.0 until the connection ends.
        self.chunked_encoding = length is None and self.scope["http_version"] != "1.0"
        if self.chunked_encoding:
            lines.append(b"transfer-encoding: chunked\r\n")
            ends += 1
        if closed:
            self.keep_alive = False
        elif not self.keep_alive:
            lines.append(b"connection: close\r\n")
            ends += 1
        head = b"".join(lines)
        if head.count(b"\n") != ends or head.count(b"\r") != ends:
            raise RuntimeError("a header is one line")
        self._head = head + b"\r\n"
        self.response_started = True
        self.waiting_for_100_continue = False

    def _send_body(self, body: bytes | memoryview, more: bool) -> None:
        if not self.response_started or self.response_complete:
            raise RuntimeError("a body comes after a head, and ends once")
        parts = [*self._framed(b"" if self.scope["method"] == "HEAD" else body, more)]
        if self._head is not None:
            parts.insert(0, self._head)
            self._head = None
        if len(parts) == 1:
            self.transport.write(parts[0])
        elif parts:
            self.transport.writelines(parts)
        if not more:
            self.response_complete = True
            self.message_event.set()
            self.forget()
            if not self.keep_alive:
                self.transport.close()
            self.on_response()

    def _framed(self, body: bytes | memoryview, more: bool) -> Iterable[bytes | memoryview]:
        """What is written for a part of the body."""
        if self.chunked_encoding:
            chunk = (b"%x\r\n" % len(body), body, b"\r\n") if body else ()
            return chunk if more else (*chunk, b"0\r\n\r\n")
        if self._left is not None:
            self._left -= len(body)
            if self._left < 0 or not (more or self._left == 0):
                raise RuntimeError("an answer is as long as it says")
        return (body,) if body else ()
