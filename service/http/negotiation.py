"""Content negotiation: which codec decodes a request, and which one encodes its response."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, Protocol

from service.codecs import CODECS, Codec
from service.codecs.chunks import Encoded
from service.http.media import answer_type, refuse_encoding, request_type
from service.pipeline.preparation import Decoder, PreparedRequest


class Formats(Protocol):
    """The wire formats of one request and its response.

    request_type: media type of the request; response_type, headers: of the response, once it is encoded
    """

    request_type: str
    response_type: str
    headers: Iterable[tuple[bytes, bytes]]

    @property
    def decoder(self) -> Decoder:
        """Decodes the request."""
        ...

    def encode(self, answer: Mapping[str, Any], request: PreparedRequest) -> Encoded:
        """The body of the response. Errors: NotAcceptable."""
        ...


class MediaTypes:
    """One codec for the request and one for the response. The same object for all requests with the same headers."""

    __slots__ = ("_encode", "decoder", "headers", "request_type", "response_type")

    def __init__(self, request_type: str, response_type: str) -> None:
        self.request_type = request_type
        self.decoder: Codec = CODECS[request_type]
        self.response_type = response_type
        self.headers: Iterable[tuple[bytes, bytes]] = ()
        self._encode = CODECS[response_type].encode

    def encode(self, answer: Mapping[str, Any], request: PreparedRequest) -> Encoded:
        """The body of the response."""
        return self._encode(answer, base64=request.body.encoding == "base64")


def negotiate(headers: Mapping[bytes, bytes]) -> MediaTypes:
    """The formats that Content-Type and Accept name.

    Errors: UnsupportedEncoding, UnsupportedMediaType, NotAcceptable.
    """
    if b"content-encoding" in headers:
        refuse_encoding(headers)
    return _media_types(headers.get(b"content-type", b""), headers.get(b"accept", b""))


@lru_cache(maxsize=64)
def _media_types(content_type: bytes, accept: bytes) -> MediaTypes:
    own = request_type(content_type.decode("latin-1"), CODECS)
    return MediaTypes(own, answer_type(accept.decode("latin-1"), own, CODECS))
