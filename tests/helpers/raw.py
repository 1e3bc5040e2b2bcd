"""Raw connections to a server, for requests that no HTTP library would send."""

from __future__ import annotations

import socket

import httpx

from tests.helpers.waiting import TIMEOUT

HEAD = b"POST /attention HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
HEALTH = b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n"


def connect(client: httpx.Client) -> socket.socket:
    """A new TCP connection to the server of an HTTP client."""
    return socket.create_connection((client.base_url.host, client.base_url.port or 0), timeout=TIMEOUT)


def with_length(length: int, more: bytes = b"") -> bytes:
    """A request head with this Content-Length."""
    return HEAD + more + b"Content-Length: %d\r\n\r\n" % length


def receive_all(connection: socket.socket) -> bytes:
    """All bytes until the server closes the connection."""
    parts = []
    while part := connection.recv(2**16):
        parts.append(part)
    return b"".join(parts)
