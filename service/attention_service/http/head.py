"""Checks of a request head that not every HTTP parser makes (RFC 9112, sections 3.2 and 6.1)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from ipaddress import ip_address
from typing import Final

from starlette.types import Scope

from attention_service.errors import BadRequest, HeadTooLarge, ServiceError, quote

# Bytes of a head: names and values of its headers, and its target. More than any client sends.
MAX_HEAD: Final = 2**16
MAX_LENGTH_DIGITS: Final = 18
MAX_LENGTH: Final = 10**MAX_LENGTH_DIGITS
CODING: Final = b"transfer-encoding"
CLOSE: Final = {"Connection": "close"}
# Bytes of the longest Host: a name of 253, a colon and a port.
MAX_HOST: Final = 259
PORT: Final = re.compile(r":\d*$")
VERSIONS: Final = ("1.0", "1.1", "2", "3")  # of which 2 and 3 come from other servers than uvicorn


def read_head(scope: Scope) -> tuple[dict[bytes, bytes], ServiceError | None]:
    """The headers of a request by name, and the error for an invalid head; None if the head is valid.

    The values of a header that comes several times are joined by commas (RFC 9110, section 5.3).
    """
    size = len(scope.get("raw_path") or b"") + len(scope["query_string"])
    values: dict[bytes, bytes] = {}
    repeated: list[tuple[bytes, bytes]] = []
    for name, value in scope["headers"]:  # the one pass over all headers
        size += len(name) + len(value) + 4  # a colon, a space and the end of the line
        if name in values:
            repeated.append((name, value))
        else:
            values[name] = value
    version = scope["http_version"]
    if size <= MAX_HEAD and version == "1.1" and not repeated and CODING not in values and b"host" in values:
        return values, None  # nearly all heads
    if size > MAX_HEAD:
        expected = f"a request head of at most {MAX_HEAD} bytes"
        return values, HeadTooLarge.at("", expected, str(size), headers=CLOSE)
    parts: dict[bytes, list[bytes]] = {}
    for name, value in repeated:
        parts.setdefault(name, [values[name]]).append(value)
    values |= {name: b", ".join(several) for name, several in parts.items()}
    return values, _error(version, values, {name: len(several) for name, several in parts.items()})


def _error(version: str, headers: Mapping[bytes, bytes], repeated: Mapping[bytes, int]) -> ServiceError | None:
    """The error for an unusual head. repeated: how often headers came that came several times"""
    if version not in VERSIONS:
        return BadRequest.at(
            "", "HTTP/1.1 or HTTP/1.0", f"HTTP/{version}", "put a proxy in front for others", headers=CLOSE
        )
    hosts = repeated.get(b"host", int(b"host" in headers))
    if hosts != 1 and version == "1.1":
        return BadRequest.at("", "one Host header", str(hosts), headers=CLOSE)
    coding = headers.get(CODING)
    if coding is not None and coding.strip().lower() != b"chunked":
        return BadRequest.at("", "no Transfer-Encoding but chunked", quote(coding.decode("latin-1")), headers=CLOSE)
    if b"content-length" in headers and (coding is not None or b"content-length" in repeated):
        return BadRequest.at("", "one Content-Length, or chunked", "both, or several", headers=CLOSE)
    return None


def check_host(given: bytes | None, scope: Scope, allowed: tuple[str, ...]) -> ServiceError | None:
    """The error for a Host that is not allowed: a page of that name would read what no other origin may read."""
    if given is None or (len(given) <= MAX_HOST and _is_allowed(given, (scope.get("server") or ("",))[0], allowed)):
        return None
    expected = "Host: localhost, an address of this machine, or a name in ATTENTION_ALLOWED_HOSTS"
    return BadRequest.at("", expected, quote(given.decode("latin-1").lower()))


@lru_cache(maxsize=64)  # as parsing an address takes as long as all other checks of a head
def _is_allowed(given: bytes, server: str, allowed: tuple[str, ...]) -> bool:
    """True if each of the hosts, of which HTTP/1.0 may have several, names this machine or is allowed."""
    hosts = [PORT.sub("", name) for name in given.decode("latin-1").lower().split(", ")]
    return all(names_this_machine(host, server) or any(is_covered(host, name) for name in allowed) for host in hosts)


def names_this_machine(host: str, server: str) -> bool:
    """True for localhost, loopback addresses, and the address that the connection of the request was made to."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ip_address(host.strip("[]"))
    except ValueError:
        return False
    address = getattr(address, "ipv4_mapped", None) or address  # is_loopback knows these from Python 3.13 on
    return address.is_loopback or str(address) == server


def is_covered(host: str, pattern: str) -> bool:
    """True if a pattern is the host, `*`, or `*.` and a name that the host is below."""
    return pattern in ("*", host) or (pattern.startswith("*.") and host.endswith(pattern[1:]))


def parse_length(value: bytes) -> int | None:
    """The number of a Content-Length header, or of one like it; None if it is no number.

    One of more than 18 digits counts as MAX_LENGTH, so that it is above every limit, and quickly parsed.
    """
    if not value.isdigit():
        return None
    return int(value) if len(value) <= MAX_LENGTH_DIGITS else MAX_LENGTH


def closes(version: str, connection: bytes | None) -> bool:
    """True if no request may follow one with this Connection header on its connection (RFC 9112, section 9.6)."""
    if connection is None or connection == b"keep-alive":
        return version == "1.0"
    return version == "1.0" or b"close" in map(bytes.strip, connection.lower().split(b","))
