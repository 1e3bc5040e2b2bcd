"""How a request of the Open Inference Protocol is read and its answer written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from starlette.types import Scope

from service.codecs import JSON_GROWTH, never, oip
from service.codecs.decoded import Body, Decoded, Part
from service.codecs.oip_outputs import Wish
from service.errors import BadRequest, quote
from service.http.media import refuse_encoding
from service.jobs import Job
from service.schemas.inference import MODEL, VERSION, check_model

JSON: Final = "application/json"
OCTETS: Final = "application/octet-stream"
HEADER: Final = b"inference-header-content-length"
# Bytes of JSON that are read in well below a millisecond, and of tensors beside it, which are only looked at.
SMALL_JSON: Final = 2**18
SMALL_BODY: Final = 2**22


class Inference:
    """One inference: its JSON is the first `head` bytes of the body, all of it where that is None."""

    packed = False
    quick = staticmethod(never)

    __slots__ = ("_head", "_wish", "headers", "media_type", "own")

    def __init__(self, head: int | None) -> None:
        self._head = head
        self._wish: Wish | None = None
        self.own = JSON if head is None else OCTETS
        self.media_type = JSON
        self.headers: Iterable[tuple[bytes, bytes]] = ()

    @property
    def reader(self) -> Inference:
        """Itself, as it remembers how the answer is wanted."""
        return self

    @property
    def _is_binary(self) -> bool:
        return self._head is not None and self._head <= SMALL_JSON

    @property
    def inline(self) -> int:
        """Up to which length a body is read at once."""
        return SMALL_BODY if self._is_binary else SMALL_JSON

    @property
    def effort(self) -> int:
        """How many times the memory of a body is used while it is read."""
        return 1 if self._is_binary else 16

    def memory(self, length: int, limit: int) -> int:
        """Bytes for a body of this length and its arrays."""
        text = length if self._head is None else min(self._head, length)
        return 2 * length + JSON_GROWTH * text

    def decode(self, body: Body, limit: int) -> Decoded:
        """The fields of the request."""
        decoded, self._wish = oip.decode(body, self._head)
        return decoded

    def write(self, answer: Mapping[str, Any], job: Job) -> Iterable[Part]:
        """The answer, as the request wants it."""
        assert self._wish is not None
        written = oip.encode(answer, self._wish, MODEL, VERSION)
        if written.head is not None:
            self.media_type = OCTETS
            self.headers = ((HEADER, b"%d" % written.head),)
        return written.parts


def begin(headers: Mapping[bytes, bytes], scope: Scope) -> Inference:
    """What headers and path say. Errors: NotFound, UnsupportedEncoding, BadRequest."""
    check_model(**scope.get("path_params", {}))
    if b"content-encoding" in headers:
        refuse_encoding(headers)
    length = headers.get(HEADER)
    if length is None:
        return Inference(None)
    if not length.isdigit() or len(length) > 18:
        raise BadRequest.at("", "Inference-Header-Content-Length to be a number", quote(length.decode("latin-1")))
    return Inference(int(length))
