"""Checks of a request head that not every HTTP parser makes (RFC 9112, sections 3.2 and 6.1)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from ipaddress import ip_address
from typing import Final

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from attention_service.errors import BadRequest, HeadTooLarge, ServiceError, quote
from attention_service.http.problems import problem

# Bytes of a head: names and values of its headers, and its target. More than any client sends.
MAX_HEAD: Final = 2**16
MAX_LENGTH_DIGITS: Final = 18
MAX_LENGTH: Final = 10**MAX_LENGTH_DIGITS
CLOSE: Final = {"Connection": "close"}
PORT: Final = re.compile(r":\d*$")
VERSIONS: Final = ("1.0", "1.1", "2", "3")  # of which 2 and 3 come from other servers than uvicorn


class CheckHead:
    """Refuses requests whose head is too large, has no, several or foreign hosts, or frames the body ambiguously.

    allowed_hosts: names in the Host header of requests that are answered; all are if there are none
    close_after_upgrade: close the connection after a request with an Upgrade header. The header is ignored (RFC 9110,
    section 7.8), but httptools stops parsing after it, as if the protocol had changed, and uvicorn then parses later
    bytes of the body as a new request.
    """

    def __init__(self, app: ASGIApp, close_after_upgrade: bool, allowed_hosts: Sequence[str] = ()) -> None:
        self._app = app
        self._close_after_upgrade = close_after_upgrade
        self._allowed_hosts = allowed_hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        error = (check(scope) or self._check_host(scope)) if scope["type"] == "http" else None
        if error is not None:
            await problem(error, Request(scope))(scope, receive, send)
        elif self._close_after_upgrade and any(name == b"upgrade" for name, _ in scope.get("headers", ())):
            await self._app(scope, receive, with_close(send))
        else:
            await self._app(scope, receive, send)

    def _check_host(self, scope: Scope) -> ServiceError | None:
        """The error for a Host that is not allowed: a page of that name would read what no other origin may read."""
        given = next((value for name, value in scope["headers"] if name == b"host"), None)
        if not self._allowed_hosts or given is None:
            return None
        host = PORT.sub("", given.decode("latin-1").lower())
        if names_this_machine(host, scope) or any(is_covered(host, pattern) for pattern in self._allowed_hosts):
            return None
        expected = "Host: localhost, an address of this machine, or a name in ATTENTION_ALLOWED_HOSTS"
        return BadRequest.at("", expected, quote(host))


def names_this_machine(host: str, scope: Scope) -> bool:
    """True for localhost, loopback addresses, and the address that the connection of the request was made to."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ip_address(host.strip("[]"))
    except ValueError:
        return False
    address = getattr(address, "ipv4_mapped", None) or address  # is_loopback knows these from Python 3.13 on
    return address.is_loopback or str(address) == (scope.get("server") or ("",))[0]


def is_covered(host: str, pattern: str) -> bool:
    """True if a pattern is the host, `*`, or `*.` and a name that the host is below."""
    return pattern in ("*", host) or (pattern.startswith("*.") and host.endswith(pattern[1:]))


def check(scope: Scope) -> ServiceError | None:
    """The error for an invalid head; None if the head is valid."""
    version = scope["http_version"]
    size = len(scope.get("raw_path") or b"") + len(scope["query_string"])
    hosts = lengths = 0
    codings = []
    for name, value in scope["headers"]:  # one pass: a generator for each question takes as long as small products
        size += len(name) + len(value) + 4  # a colon, a space and the end of the line
        if name == b"host":
            hosts += 1
        elif name == b"content-length":
            lengths += 1
        elif name == b"transfer-encoding":
            codings.append(value)
    if size > MAX_HEAD:
        return HeadTooLarge.at("", f"a request head of at most {MAX_HEAD} bytes", str(size), headers=CLOSE)
    if version not in VERSIONS:
        return BadRequest.at(
            "", "HTTP/1.1 or HTTP/1.0", f"HTTP/{version}", "put a proxy in front for others", headers=CLOSE
        )
    if hosts != 1 and version == "1.1":
        return BadRequest.at("", "one Host header", str(hosts), headers=CLOSE)
    if codings and (coding := b", ".join(codings)).strip().lower() != b"chunked":
        return BadRequest.at("", "no Transfer-Encoding but chunked", quote(coding.decode("latin-1")), headers=CLOSE)
    if lengths + len(codings) > 1:
        return BadRequest.at("", "one Content-Length, or chunked", "both, or several", headers=CLOSE)
    return None


def parse_length(value: bytes) -> int | None:
    """The number of a Content-Length header, or of one like it; None if it is no number.

    One of more than 18 digits counts as MAX_LENGTH, so that it is above every limit, and quickly parsed.
    """
    if not value.isdigit():
        return None
    return int(value) if len(value) <= MAX_LENGTH_DIGITS else MAX_LENGTH


def joined(headers: Iterable[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Headers by name; the values of one that comes several times are joined by commas (RFC 9110, section 5.3)."""
    values: dict[bytes, bytes] = {}
    for name, value in headers:
        values[name] = values[name] + b", " + value if name in values else value
    return values


def closes(scope: Scope) -> bool:
    """True if no request may follow this one on its connection (RFC 9112, section 9.6)."""
    if scope["http_version"] == "1.0":
        return True
    options = b",".join(value for name, value in scope["headers"] if name == b"connection").lower()
    return b"close" in map(bytes.strip, options.split(b","))


def with_close(send: Send) -> Send:
    """A function that adds `Connection: close` to the response."""

    async def send_with_close(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
        await send(message)

    return send_with_close
