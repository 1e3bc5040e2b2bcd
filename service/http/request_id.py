"""Request ids: chosen by the client if harmless, else by the service; in the answer, its metadata and the log."""

from __future__ import annotations

import re
from secrets import token_hex

from starlette.types import Scope

HEADER = "X-Request-ID"
ACCEPTABLE = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


def assign_request_id(scope: Scope) -> str:
    """Give the request its id. A client's own is kept if it is harmless in logs and headers."""
    chosen = dict(scope["headers"]).get(HEADER.lower().encode())
    found = chosen.decode() if chosen and ACCEPTABLE.fullmatch(chosen) else token_hex(16)
    scope.setdefault("state", {})["request_id"] = found
    return found


def request_id(scope: Scope) -> str:
    """The id that the request was given."""
    return str(scope["state"]["request_id"])
