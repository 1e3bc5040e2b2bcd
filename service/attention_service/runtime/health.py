"""Asking a running server whether it takes requests, with nothing but the standard library."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from http.client import HTTPConnection, HTTPException, HTTPSConnection

TIMEOUT = 4  # seconds; less than the timeouts of orchestrators
# A server on every address is asked on the machine's own.
OWN = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  # nothing listens here


def address(environment: Mapping[str, str]) -> tuple[str, int]:
    """Where the server is that the environment configures: as in settings.py, which takes half a second to import."""
    host = environment.get("ATTENTION_HOST", "127.0.0.1")
    return OWN.get(host, host), int(environment.get("ATTENTION_PORT", "8000"))


def check(host: str, port: int, *, encrypted: bool = False) -> str:
    """The failure of a health check of the server at this address; "" if it is ready. encrypted: True for HTTPS"""
    if encrypted:
        context = ssl.create_default_context()
        # Whose certificate it has does not matter, as nothing but its health is asked.
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        connection: HTTPConnection = HTTPSConnection(host, port, timeout=TIMEOUT, context=context)
    else:
        connection = HTTPConnection(host, port, timeout=TIMEOUT)
    try:
        connection.request("GET", "/health/ready")
        status = connection.getresponse().status
    except (OSError, HTTPException) as error:
        return f"{host}:{port}: {error}"
    return "" if status == 200 else f"{host}:{port}: status {status}"
