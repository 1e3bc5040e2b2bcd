"""Request ids: chosen by the client if harmless, else by the service; in the answer, its metadata and the log."""

from __future__ import annotations

import re
from itertools import count
from secrets import token_hex

from starlette.types import Scope

HEADER = "X-Request-ID"
LOWER = HEADER.lower().encode()
# Ids of this process begin so, and then count: what they are good for is being found in a log.
PROCESS = token_hex(10)
_number = count()
ACCEPTABLE = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


def assign_request_id(scope: Scope) -> str:
    """Give the request its id. A client's own is kept if it is harmless in logs and headers."""
    for name, value in scope["headers"]:
        if name == LOWER and ACCEPTABLE.fullmatch(value):
            found = str(value, "ascii")
            break
    else:
        found = new_id()
    scope.setdefault("state", {})["request_id"] = found
    return found


def new_id() -> str:
    """One that no other request has."""
    return f"{PROCESS}{next(_number):012x}"


def request_id(scope: Scope) -> str:
    """The id that the request was given."""
    return str(scope["state"]["request_id"])
