"""Content negotiation: which codec decodes a request, and which one encodes its response.

By RFC 9110, sections 8.3 (Content-Type), 8.4 (Content-Encoding) and 12.5.1 (Accept).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Final

from service.codecs import CODECS, Codec
from service.codecs.oip import http as oip
from service.errors import BadRequest, Fault, NotAcceptable, UnsupportedEncoding, UnsupportedMediaType, quote
from service.http.head import parse_length

# Media ranges of an Accept header that are considered; more take longer than a small request.
MAX_RANGES: Final = 64

# Takes the headers of a request, and returns the codecs of its body and of the response.
Negotiate = Callable[[Mapping[bytes, bytes]], tuple[Codec, Codec]]


def negotiate(headers: Mapping[bytes, bytes]) -> tuple[Codec, Codec]:
    """The codecs that Content-Type and Accept name. Errors: UnsupportedMediaType, NotAcceptable."""
    own = request_type(headers.get(b"content-type", b"").decode("latin-1"), CODECS)
    return CODECS[own], CODECS[response_type(headers.get(b"accept", b"").decode("latin-1"), own, CODECS)]


def negotiate_inference(headers: Mapping[bytes, bytes]) -> tuple[Codec, Codec]:
    """The codec of an inference, by Inference-Header-Content-Length. Errors: BadRequest."""
    value = headers.get(oip.HEADER)
    length = None if value is None else parse_length(value)
    if value is not None and length is None:
        raise BadRequest.at("", "Inference-Header-Content-Length to be a number", quote(value.decode("latin-1")))
    codec = oip.HTTPCodec(length)
    return codec, codec


def refuse_content_encoding(headers: Mapping[bytes, bytes]) -> None:
    """Errors: UnsupportedEncoding for a compressed body, which could unpack to anything."""
    encoding = headers.get(b"content-encoding", b"").decode("latin-1").strip()
    if encoding and encoding.lower() != "identity":
        fault = Fault("", "a body without Content-Encoding", quote(encoding))
        raise UnsupportedEncoding(fault, headers={"Accept-Encoding": "identity"})


def request_type(content_type: str, known: Collection[str]) -> str:
    """The media type of a body, parameters dropped. Errors: UnsupportedMediaType."""
    if content_type in known:
        return content_type
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type not in known:
        got = quote(media_type) if media_type else "no Content-Type"
        raise UnsupportedMediaType.at("", f"Content-Type {' or '.join(known)}", got)
    return media_type


def response_type(accept: str, own: str, known: Collection[str]) -> str:
    """The known media type that `Accept` prefers; `own`, the type of the request, where it has no preference.

    Errors: NotAcceptable.
    """
    if not accept.strip() or accept == "*/*":
        return own
    ranges = [_range(part) for part in accept.split(",")[:MAX_RANGES]]
    candidates = [own, *(name for name in known if name != own)]
    quality = {name: _quality(name, ranges) for name in candidates}
    best = max(candidates, key=lambda name: quality[name])  # the first of equals, so `own` before others
    if quality[best] <= 0:
        raise NotAcceptable.at("", f"Accept to allow {' or '.join(known)}", quote(accept))
    return best


def _range(part: str) -> tuple[str, float]:
    """One media range and its quality, which is 0 if it cannot be parsed."""
    name, *parameters = (piece.strip().lower() for piece in part.split(";"))
    for parameter in parameters:
        if parameter.startswith("q="):
            try:
                return name, float(parameter[2:])
            except ValueError:
                return name, 0.0
    return name, 1.0


def _quality(name: str, ranges: list[tuple[str, float]]) -> float:
    """The quality of the most specific range that covers a media type."""
    for wanted in (name, name.partition("/")[0] + "/*", "*/*"):
        for given, quality in ranges:
            if given == wanted:
                return quality
    return 0.0
