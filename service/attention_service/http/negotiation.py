"""Content negotiation: which codec decodes a request, and which one encodes its response.

By RFC 9110, sections 8.3 (Content-Type), 8.4 (Content-Encoding) and 12.5.1 (Accept).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from attention_service.codecs.base import Codec
from attention_service.codecs.oip import http as oip
from attention_service.errors import BadRequest, NotAcceptable, UnsupportedEncoding, UnsupportedMediaType, quote
from attention_service.http.head import parse_length
from attention_service.pipeline.operation import E
from attention_service.version import MODEL

# Media ranges of an Accept header that are considered; more take longer than a small request.
MAX_RANGES: Final = 64


def negotiate(
    headers: Mapping[bytes, bytes], decoders: Mapping[str, Codec], encoders: Mapping[str, E]
) -> tuple[Codec, E]:
    """The decoder of the request, by Content-Type, and the encoder of the response, by Accept.

    Without Accept, or if it has no preference, the response has the media type of the request if it can have that, else
    the first of `encoders`.

    headers: with names in lower case; E: what encodes a response; decoders, encoders: by media types

    Errors: UnsupportedMediaType, also without Content-Type; NotAcceptable. For Content-Encoding see
    `refuse_content_encoding`.
    """
    own = request_type(headers.get(b"content-type", b"").decode("latin-1"), decoders)
    default = own if own in encoders else next(iter(encoders))
    return decoders[own], encoders[response_type(headers.get(b"accept", b"").decode("latin-1"), default, encoders)]


def negotiate_inference(headers: Mapping[bytes, bytes], model: str = MODEL) -> tuple[Codec, Codec]:
    """One codec as decoder and encoder of an inference, by Inference-Header-Content-Length. Errors: BadRequest.

    model: that the path names
    """
    value = headers.get(oip.HEADER)
    length = None if value is None else parse_length(value)
    if value is not None and length is None:
        raise BadRequest.at("", "Inference-Header-Content-Length to be a number", quote(value.decode("latin-1")))
    codec = oip.HTTPCodec(length, model)
    return codec, codec


def refuse_content_encoding(headers: Mapping[bytes, bytes]) -> None:
    """Errors: UnsupportedEncoding for a compressed body, which could unpack to anything."""
    if b"content-encoding" not in headers:
        return
    encoding = headers[b"content-encoding"].decode("latin-1").strip()
    if encoding and encoding.lower() != "identity":
        expected = "a body without Content-Encoding"
        raise UnsupportedEncoding.at("", expected, quote(encoding), headers={"Accept-Encoding": "identity"})


def request_type(content_type: str, known: Collection[str]) -> str:
    """The media type of a body, parameters dropped. Errors: UnsupportedMediaType."""
    if content_type in known:
        return content_type
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type not in known:
        got = quote(media_type) if media_type else "no Content-Type"
        raise UnsupportedMediaType.at("", f"Content-Type {' or '.join(known)}", got)
    return media_type


def response_type(accept: str, default: str, known: Collection[str]) -> str:
    """The known media type that `Accept` prefers; `default`, which is one of them, where it has no preference.

    Errors: NotAcceptable.
    """
    if not accept.strip() or accept == "*/*":
        return default
    ranges: dict[str, float] = {}
    for part in accept.split(",")[:MAX_RANGES]:
        name, *parameters = (piece.strip().lower() for piece in part.split(";"))
        ranges.setdefault(name, _quality(parameters))

    def preference(name: str) -> float:
        """The quality of the most specific range that covers a media type."""
        covering = (name, f"{name.partition('/')[0]}/*", "*/*")
        return next((ranges[wanted] for wanted in covering if wanted in ranges), 0.0)

    best = max([default, *known], key=preference)  # the first of equals, so `default` before others
    if preference(best) <= 0:
        raise NotAcceptable.at("", f"Accept to allow {' or '.join(known)}", quote(accept))
    return best


def _quality(parameters: list[str]) -> float:
    """The quality among the parameters of a media range; 0 if it is not a number."""
    for parameter in parameters:
        if parameter.startswith("q="):
            try:
                return float(parameter[2:])
            except ValueError:
                return 0.0
    return 1.0
