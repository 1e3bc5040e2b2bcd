"""Asking a running server whether it takes requests, with nothing but the standard library."""

from __future__ import annotations

import http.client
from collections.abc import Mapping

TIMEOUT = 4  # seconds; less than whoever runs the check waits for it
# A server on every address is asked on the machine's own.
OWN = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  # nothing listens here


def address(environment: Mapping[str, str]) -> tuple[str, int]:
    """Where the server is that the environment configures: as in settings.py, which takes half a second to import."""
    host = environment.get("ATTENTION_HOST", "127.0.0.1")
    return OWN.get(host, host), int(environment.get("ATTENTION_PORT", "8000"))


def check(host: str, port: int, *, encrypted: bool = False) -> str:
    """What is wrong with the server at this address; "" if it takes requests.

    encrypted: whether it serves HTTPS; whose certificate it has does not matter, as nothing but its health is asked
    """
    try:
        connection = _connection(host, port, encrypted)
        connection.request("GET", "/health/ready")
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        return f"{host}:{port}: {error}"
    return "" if status == http.client.OK else f"{host}:{port}: status {status}"


def _connection(host: str, port: int, encrypted: bool) -> http.client.HTTPConnection:
    if not encrypted:
        return http.client.HTTPConnection(host, port, timeout=TIMEOUT)
    import ssl

    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return http.client.HTTPSConnection(host, port, timeout=TIMEOUT, context=context)
