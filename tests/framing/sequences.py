"""Sequences of HTTP/1.1 requests for one connection, made from a seed: valid, refused and malformed ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from random import Random
from typing import Any, Final

import numpy as np

from tests.framing.differences import DIFFERENCES

# The servers under test refuse larger bodies.
MAX_BODY: Final = 2_000_000


@dataclass(frozen=True)
class Request:
    """The bytes of a request, and the expected response by RFC 9110, RFC 9112 and the service's contract."""

    data: bytes
    status: int = 200
    other_status: int = 0  # also allowed, as either the parser or the application may find the error first
    head: bool = False  # the response has no body
    closes: bool = False  # the server serves no further request on this connection
    parsed: bool = True  # the application gets the request, so that the response has its id
    expects: bool = False  # 100 Continue may precede the response
    kind: str = ""
    id: str = ""


Make = Callable[[Random, str], Request]
Body = bytes | Callable[[Random], bytes]


def sequence(name: str, parser: str) -> list[Request]:
    """The requests of a name: short-SEED, long-SEED, or kinds joined by +. The last request closes the connection."""
    rng = Random(name)
    kinds = name.split("+")
    if name.startswith(("short-", "long-")):
        good, fatal = [*GOOD], [*FATAL]
        if name.startswith("long-"):
            good, fatal = [*GOOD, *LARGE, *LARGE, *LARGE], [*FATAL, *LARGE_FATAL]
        kinds = [rng.choice(fatal if rng.random() < 0.25 else good) for _ in range(rng.randint(1, 5))]
    requests: list[Request] = []
    for index, kind in enumerate([*kinds, "close"]):
        request_id = f"{rng.getrandbits(32):08x}.{index}"
        request = replace(KINDS[kind](rng, request_id), kind=kind, id=request_id)
        difference = DIFFERENCES[parser].get(kind)
        if difference is not None:
            requests.clear()
        if difference is None or difference.sent == "first":
            requests.append(request)
    return requests


def _request(line: str, *headers: str, body: Body | None = None, chunks: Body | None = None, trailers: bytes = b"",
             tail: Body = b"", host: tuple[str, ...] = ("Host: x",), **fields: Any) -> Make:  # fmt: skip
    """A kind of request. body: of announced length; chunks: a body in chunks; tail: bytes that follow."""

    def make(rng: Random, request_id: str) -> Request:
        lines = [*host, f"X-Request-ID: {request_id}", *headers]
        content = _bytes(tail, rng)
        if body is not None:
            content = _bytes(body, rng) + content
            lines.append(f"Content-Length: {len(content)}")
        if chunks is not None:
            lines.append("Transfer-Encoding: chunked")
            content = _in_chunks(rng, _bytes(chunks, rng)) + trailers + b"\r\n"
        rng.shuffle(lines)
        head = "".join(f"{text}\r\n" for text in [line, *lines, ""]).encode("latin-1")
        return Request(head + content, **fields)

    return make


def _malformed(*variants: tuple[str, ...], tail: Body = b"", **fields: Any) -> Make:
    """A kind of request that the parser refuses, as one of several variants of request line and headers."""
    makes = [_request(*lines, tail=tail, status=400, closes=True, parsed=False, **fields) for lines in variants]
    return lambda rng, request_id: rng.choice(makes)(rng, request_id)


def _bytes(body: Body, rng: Random) -> bytes:
    return body if isinstance(body, bytes) else body(rng)


def _in_chunks(rng: Random, body: bytes) -> bytes:
    """A body in chunks of random sizes, some with extensions."""
    parts, start = [], 0
    while start < len(body):
        chunk = body[start : start + rng.randint(1, max(20, len(body) // 5))]
        extension = rng.choice([b"", b"", b";a", b";a=b", b';a="b;c"'])
        parts.append(b"%x%s\r\n%s\r\n" % (len(chunk), extension, chunk))
        start += len(chunk)
    return b"".join([*parts, b"0\r\n"])


def _small(rng: Random) -> bytes:
    """JSON with random numbers, which contains the bytes that end a request head."""
    rows = [[rng.randint(-9, 9) for _ in range(2)] for _ in range(rng.randint(1, 3))]
    return json.dumps({"input": rows}).replace(" ", "\r\n\r\n").encode()


@cache
def _json() -> bytes:
    """A JSON body of 200 kB."""
    numbers = np.random.default_rng(0).integers(-999, 999, (350, 72)) / 256
    return json.dumps({"input": numbers.tolist(), "include": []}).encode()


@cache
def _safetensors() -> bytes:
    """A safetensors body of 1.5 MB."""
    numbers = np.random.default_rng(1).integers(-9, 9, (1500, 256)).astype("<f4").tobytes()
    tensor = {"dtype": "F32", "shape": [1500, 256], "data_offsets": [0, len(numbers)]}
    head = json.dumps({"__metadata__": {"request": '{"include":[]}'}, "input": tensor}).encode()
    return len(head).to_bytes(8, "little") + head + numbers


def _wide(rng: Random) -> bytes:
    """A JSON body of 2 kB with a response of 2 MB or more, which is more than sockets buffer."""
    return json.dumps({"input": [[i % 7] for i in range(430)], "encoding": rng.choice(["base64", "list"])}).encode()


def _bad_chunk(rng: Random) -> bytes:
    """A valid chunk and a malformed one."""
    bad = [b"zz\r\n", b"-1\r\n", b"0x5\r\n", b"1\r\n[[\r\n", b"1\r\n\r\n\r\n", b"f" * 25 + b"\r\n", b"\r\n"]
    return b"2\r\n[[\r\n" + rng.choice(bad)


LIVE: Final = "GET /health/live HTTP/1.1"
POST: Final = "POST /attention HTTP/1.1"
NOWHERE: Final = "POST /nowhere HTTP/1.1"
JSON: Final = "Content-Type: application/json"
TEXT: Final = "Content-Type: text/plain"
CHUNKED: Final = "Transfer-Encoding: chunked"
EXPECT: Final = "Expect: 100-continue"
CLOSE: Final = "Connection: close"
H2C: Final = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAEAAEAAAAIAAAAAAAMAAAAA")
WEBSOCKET: Final = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13",
                    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==")  # fmt: skip
TRAILERS: Final = b"Accept: text/html\r\nContent-Type: text/html\r\nX-Request-ID: trailer\r\n"
# Inside bodies, and behind request heads without a body: no server may respond to it.
SMUGGLED: Final = b"GET /health/live HTTP/1.1\r\nHost: x\r\nX-Request-ID: smuggled\r\n\r\n"

# Requests after which the connection stays open.
GOOD: Final[dict[str, Make]] = {
    "live": _request(LIVE),
    "document": _request("GET /openapi.json HTTP/1.1"),
    "head": _request("HEAD /openapi.json HTTP/1.1", head=True),
    "options": _request("OPTIONS /attention HTTP/1.1", status=405),
    "no-path": _request("GET /nowhere HTTP/1.1", status=404),
    "post": _request(POST, JSON, body=_small),
    "chunked": _request(POST, JSON, chunks=_small, trailers=b"X-Trailer: a\r\n"),
    "trailers": _request(POST, JSON, chunks=_small, trailers=TRAILERS),
    "expect": _request(POST, JSON, EXPECT, body=_small, expects=True),
    "expect-chunked": _request(POST, JSON, EXPECT, chunks=_small, expects=True),
    "websocket": _request(LIVE, *WEBSOCKET),
    "h2c": _request(POST, JSON, *H2C, body=_small),
    "h2c-chunked": _request(POST, JSON, *H2C, chunks=_small),
    "bad-json": _request(POST, JSON, body=SMUGGLED, status=400),
    "bad-json-chunked": _request(POST, JSON, chunks=SMUGGLED, status=400),
    "bad-shapes": _request(POST, JSON, body=b'{"query":[[1,2]],"key":[[1]],"value":[[1]]}', status=422),
    "bad-type": _request(POST, TEXT, body=SMUGGLED, status=415),
    "bad-type-chunked": _request(POST, TEXT, chunks=SMUGGLED, status=415),
    "bad-accept": _request(POST, JSON, "Accept: text/html", body=SMUGGLED, status=406),
    "bad-path": _request(NOWHERE, JSON, body=SMUGGLED, status=404),
    "bad-method": _request("PUT /attention HTTP/1.1", JSON, body=SMUGGLED, status=405),
}
# Requests after which the server closes the connection.
FATAL: Final[dict[str, Make]] = {
    "close": _request(LIVE, CLOSE, closes=True),
    "close-after-body": _request(POST, JSON, CLOSE, body=_small, closes=True),
    "http-1.0": _request("GET /health/live HTTP/1.0", closes=True),
    "http-1.0-keep-alive": _request("GET /health/live HTTP/1.0", "Connection: keep-alive", closes=True),
    "http-1.0-body": _request("POST /attention HTTP/1.0", JSON, body=_small, closes=True),
    "bad-line": _malformed(("GET /health/live",), (f"{LIVE}x",), ("G@T / HTTP/1.1",), ("\x16\x03\x01",), tail=SMUGGLED),
    "bad-header": _malformed(
        *((LIVE, bad) for bad in ("A b: c", ": a", "A: \0", "no colon", "A : b", "A: b\rc")), tail=SMUGGLED
    ),
    "bad-length": _malformed(
        *((POST, f"Content-Length: {bad}") for bad in ("1x", "-1", "+5", "0x5", "1 2", "", "9" * 30)), tail=SMUGGLED
    ),
    "two-lengths": _malformed((POST, "Content-Length: 5", "Content-Length: 64"), tail=SMUGGLED),
    "length-and-chunks": _malformed((POST, JSON, "Content-Length: 5"), chunks=_small),
    "no-host": _malformed((LIVE,), host=()),
    "two-hosts": _malformed((LIVE, "Host: y")),
    "gzip": _malformed((POST, JSON, "Transfer-Encoding: gzip, chunked"), tail=b"2\r\n{}\r\n0\r\n\r\n"),
    "bad-chunk": _malformed((POST, JSON, CHUNKED), tail=_bad_chunk),
    # 404 does not depend on the body.
    "early": _malformed((NOWHERE, JSON, CHUNKED), tail=_bad_chunk, other_status=404),
}
LARGE: Final[dict[str, Make]] = {
    "large": _request(POST, JSON, body=lambda _: _json()),
    "large-chunked": _request(POST, JSON, chunks=lambda _: _json()),
    "large-tensors": _request(POST, "Content-Type: application/vnd.safetensors", body=lambda _: _safetensors()),
    "large-answer": _request(POST, JSON, body=_wide),
    "large-bad-type": _request(POST, TEXT, body=lambda _: _safetensors(), status=415),
}
LARGE_FATAL: Final[dict[str, Make]] = {
    "large-close": _request(POST, JSON, CLOSE, body=_wide, closes=True),
    "too-large": _request(POST, JSON, body=SMUGGLED * (MAX_BODY // 50), status=413, closes=True),
    "too-large-chunked": _request(POST, JSON, chunks=SMUGGLED * (MAX_BODY // 50), status=413, closes=True),
    "large-head": _malformed((LIVE, "A: " + 400_000 * "a"), other_status=431),
}
KINDS: Final = GOOD | FATAL | LARGE | LARGE_FATAL
