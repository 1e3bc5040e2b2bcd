"""Kinds of requests that uvicorn's httptools protocol frames wrongly, and that tests leave out; h11 has none.

In these cases bytes of one request become part of another, or of its response. So httptools is only for use behind a
proxy that forwards no upgrade requests, no trailers, and no malformed requests.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple


class Difference(NamedTuple):
    """A kind of request that is never sent, or only as the first of its connection."""

    sent: Literal["never", "first"]
    reason: str


UPGRADE: Final = "llhttp takes what follows the head for another protocol: the body is lost, or read as a request"
ERROR: Final = "uvicorn answers 400 at once, before the answers to earlier requests, or inside one of them"
DIFFERENCES: Final[dict[str, dict[str, Difference]]] = {
    "h11": {},
    "httptools": {
        "websocket": Difference("never", UPGRADE),
        "h2c": Difference("never", UPGRADE),
        "h2c-chunked": Difference("never", UPGRADE),
        "trailers": Difference("never", "uvicorn adds trailers to the headers of the request"),
        "early": Difference("never", "the 400 of the parser follows the answer of the application"),
        "large-head": Difference("never", "uvicorn aborts the connection instead of sending a 400"),
        **dict.fromkeys(
            ("bad-line", "bad-header", "bad-length", "two-lengths", "length-and-chunks", "bad-chunk"),
            Difference("first", ERROR),
        ),
    },
}
