"""The wire format of the Open Inference Protocol over HTTP: JSON, and behind it the bytes of tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from service.codecs import never
from service.codecs.chunks import Encoded
from service.codecs.decoded import Body, Decoded
from service.codecs.oip import http as oip
from service.codecs.oip.outputs import Wish
from service.errors import BadRequest, quote
from service.http.media import refuse_encoding
from service.pipeline.preparation import PreparedRequest
from service.schemas.inference import MODEL, VERSION

JSON: Final = "application/json"
OCTETS: Final = "application/octet-stream"
HEADER: Final = b"inference-header-content-length"
# Bytes of JSON that are read in well below a millisecond, and of tensors beside it, which are only looked at.
SMALL_JSON: Final = 2**18
SMALL_BODY: Final = 2**22


class InferenceFormats:
    """The formats of one inference. head: bytes of the body that are JSON; None if all of it is"""

    packed = False
    quick = staticmethod(never)

    __slots__ = ("_head", "_wish", "headers", "request_type", "response_type")

    def __init__(self, head: int | None) -> None:
        self._head = head
        self._wish: Wish | None = None
        self.request_type = JSON if head is None else OCTETS
        self.response_type = JSON
        self.headers: Iterable[tuple[bytes, bytes]] = ()

    @property
    def decoder(self) -> InferenceFormats:
        """Itself, as it keeps which outputs the request wants."""
        return self

    @property
    def inline(self) -> int:
        """Bytes of a body that is decoded in the event loop."""
        return SMALL_BODY if self._head is not None and self._head <= SMALL_JSON else SMALL_JSON

    def decode_bound(self, length: int, limit: int) -> int:
        """Bytes that a body of this length, and decoding it, take at most."""
        return oip.decode_bound(length, self._head)

    def decode_bytes(self, body: Body, limit: int) -> int:
        """The same for this body."""
        return oip.decode_bytes(body, self._head)

    def decode(self, body: Body, limit: int) -> Decoded:
        """The fields of the request."""
        decoded, self._wish = oip.decode(body, self._head)
        return decoded

    def encode(self, answer: Mapping[str, Any], request: PreparedRequest) -> Encoded:
        """The body of the response, with the outputs that the request wants."""
        assert self._wish is not None
        written = oip.encode(answer, self._wish, MODEL, VERSION)
        if written.json_length is not None:
            self.response_type = OCTETS
            self.headers = ((HEADER, b"%d" % written.json_length),)
        return written


def inference_formats(headers: Mapping[bytes, bytes]) -> InferenceFormats:
    """The formats that the headers name. Errors: UnsupportedEncoding, BadRequest."""
    if b"content-encoding" in headers:
        refuse_encoding(headers)
    length = headers.get(HEADER)
    if length is None:
        return InferenceFormats(None)
    if not length.isdigit() or len(length) > 18:
        raise BadRequest.at("", "Inference-Header-Content-Length to be a number", quote(length.decode("latin-1")))
    return InferenceFormats(int(length))
