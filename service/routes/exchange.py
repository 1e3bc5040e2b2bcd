"""How one request is read and its answer written: what of a wire format is known only when a request comes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, Protocol

from starlette.types import Scope

from service.codecs import CODECS, Codec
from service.codecs.decoded import Part
from service.http.media import answer_type, refuse_encoding, request_type
from service.jobs import Job
from service.reading import Reader


class Exchange(Protocol):
    """One request and its answer.

    own: the media type of the request; media_type, headers: of the answer, once it is written
    """

    own: str
    media_type: str
    headers: Iterable[tuple[bytes, bytes]]

    @property
    def reader(self) -> Reader:
        """What reads the request."""
        ...

    def write(self, answer: Mapping[str, Any], job: Job) -> Iterable[Part]:
        """The body of the answer. Errors: NotAcceptable."""
        ...


# From the headers and the scope of a request. Errors: UnsupportedMediaType, NotAcceptable, NotFound, BadRequest.
Begin = Callable[[Mapping[bytes, bytes], Scope], Exchange]


class ByMediaType:
    """The codec of the request's media type reads, that of the answer's writes. The same for all requests alike."""

    __slots__ = ("_encode", "headers", "media_type", "own", "reader")

    def __init__(self, own: str, media_type: str) -> None:
        self.own = own
        self.reader: Codec = CODECS[own]
        self.media_type = media_type
        self.headers: Iterable[tuple[bytes, bytes]] = ()
        self._encode = CODECS[media_type].encode

    def write(self, answer: Mapping[str, Any], job: Job) -> Iterable[Part]:
        """The answer by its codec."""
        return self._encode(answer, base64=job.body.encoding == "base64")


def by_media_type(headers: Mapping[bytes, bytes], scope: Scope) -> ByMediaType:
    """As Content-Type and Accept say. Errors: UnsupportedEncoding, UnsupportedMediaType, NotAcceptable."""
    if b"content-encoding" in headers:
        refuse_encoding(headers)
    return _by_names(headers.get(b"content-type", b""), headers.get(b"accept", b""))


@lru_cache(maxsize=64)
def _by_names(content_type: bytes, accept: bytes) -> ByMediaType:
    own = request_type(content_type.decode("latin-1"), CODECS)
    return ByMediaType(own, answer_type(accept.decode("latin-1"), own, CODECS))
