"""Checks of a request head that not every HTTP parser makes (RFC 9112, sections 3.2 and 6.1)."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from service.errors import BadRequest, Fault, HeadTooLarge, ServiceError, quote
from service.http.problems import problem

# Bytes of a head: names and values of its headers, and its target. More than any client sends.
MAX_HEAD: Final = 2**16
VERSIONS: Final = ("1.0", "1.1", "2", "3")


class CheckHead:
    """Refuses requests whose head is too large, names no host or several, or frames its body in a doubtful way."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        error = check(scope) if scope["type"] == "http" else None
        if error is None:
            await self._app(scope, receive, send)
        else:
            await problem(error, Request(scope))(scope, receive, send)


def check(scope: Scope) -> ServiceError | None:
    """What is wrong with the head of a request."""
    size = len(scope.get("raw_path") or b"") + len(scope["query_string"])
    hosts = lengths = 0
    codings: bytes | None = None
    for name, value in scope["headers"]:
        size += len(name) + len(value) + 4  # colon, space, end of line
        if name == b"host":
            hosts += 1
        elif name == b"content-length":
            lengths += 1
        elif name == b"transfer-encoding":
            codings = value if codings is None else codings + b", " + value
    closing = {"Connection": "close"}
    if size > MAX_HEAD:
        return HeadTooLarge(Fault("", f"a request head of at most {MAX_HEAD} bytes", str(size)), headers=closing)
    if scope["http_version"] not in VERSIONS:
        return BadRequest(Fault("", f"HTTP in version {', '.join(VERSIONS)}", scope["http_version"]), headers=closing)
    if hosts != 1 and scope["http_version"] == "1.1":
        return BadRequest(Fault("", "one Host header", str(hosts)), headers=closing)
    if codings is not None and codings.strip().lower() != b"chunked":
        got = quote(codings.decode("latin-1"))
        return BadRequest(Fault("", "no Transfer-Encoding but chunked", got), headers=closing)
    if lengths > (codings is None):
        return BadRequest(Fault("", "one Content-Length, or chunked", "both, or several"), headers=closing)
    return None
