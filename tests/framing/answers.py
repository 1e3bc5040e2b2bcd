"""Parses responses with h11 as a client would, and checks them."""

from __future__ import annotations

from typing import Final, NamedTuple

import h11

from tests.framing.sequences import Request

# Headers that differ from run to run. Whether h11 sends an error in chunks depends on the requests before.
VOLATILE: Final = {b"date", b"server-timing", b"transfer-encoding"}


class Answer(NamedTuple):
    """The final response to a request."""

    status: int
    headers: dict[bytes, bytes]
    body: bytes

    def __repr__(self) -> str:
        body = self.body if len(self.body) < 400 else self.body[:400] + b"... %d bytes" % len(self.body)
        return f"{self.status} {self.headers} {body!r}"


class Mismatch(Exception):
    """Raised when a response is not the expected one."""


def parse(received: bytearray, requests: list[Request], ended: bool) -> list[Answer]:
    """The complete responses to the requests in all bytes that a server sent. Errors: Mismatch, h11.ProtocolError.

    ended: the server has closed the connection, so that no bytes may follow the last response
    """
    connection = h11.Connection(h11.CLIENT)
    connection.receive_data(bytes(received))
    if ended:
        connection.receive_data(b"")
    answers: list[Answer] = []
    for request in requests:
        if not connection.trailing_data[0]:
            return answers
        connection.send(h11.Request(method="HEAD" if request.head else "GET", target="/", headers=[("Host", "x")]))
        connection.send(h11.EndOfMessage())
        answer = _next(connection, request)
        if answer is None:
            return answers
        answers.append(answer)
        if connection.their_state is not h11.DONE:
            break
        connection.start_next_cycle()
    if rest := connection.trailing_data[0]:
        raise Mismatch(f"after {len(answers)} answers come {len(rest)} bytes: {rest[:400]!r}")
    return answers


def _next(connection: h11.Connection, request: Request) -> Answer | None:
    """The next response; None if it is not complete yet."""
    final: h11.Response | None = None
    body, interim = b"", 0
    while not isinstance(event := connection.next_event(), h11.EndOfMessage):
        if event is h11.NEED_DATA:
            return None
        if isinstance(event, h11.InformationalResponse):
            interim += 1
        elif isinstance(event, h11.Response):
            final = event
        elif isinstance(event, h11.Data):
            body += event.data
    if final is None or interim > request.expects:
        raise Mismatch(f"{request.kind} is answered by {final} after {interim} interim responses")
    headers = {name: value for name, value in final.headers if name not in VOLATILE}
    return Answer(final.status_code, headers, body)


def violation(request: Request, answer: Answer) -> str:
    """A description of what the response violates of HTTP or of the service's contract; empty if nothing."""
    request_id = request.id.encode()
    if answer.status not in (request.status, request.other_status):
        return f"expected status {request.status}"
    if answer.headers.get(b"x-request-id", b"" if request.parsed else request_id) != request_id:
        return f"expected id {request.id}"
    if answer.body.startswith(b'{"output"') and request_id not in answer.body:
        return f"expected id {request.id} in the metadata"
    if answer.status == request.status and (b"close" in answer.headers.get(b"connection", b"")) is not request.closes:
        return f"expected {'Connection: close' if request.closes else 'an open connection'}"
    return ""
