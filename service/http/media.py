"""Which media type a request is in, and which its answer is to be in (RFC 9110, sections 8.3, 8.4 and 12.5.1)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from service.errors import Fault, NotAcceptable, UnsupportedEncoding, UnsupportedMediaType, quote

# Media ranges of an Accept header that are considered; more take longer than a small request.
MAX_RANGES: Final = 64


def request_type(content_type: str, known: Collection[str]) -> str:
    """The media type of a body, parameters dropped. Errors: UnsupportedMediaType."""
    if content_type in known:
        return content_type
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type not in known:
        got = quote(media_type) if media_type else "no Content-Type"
        raise UnsupportedMediaType.at("", f"Content-Type {' or '.join(known)}", got)
    return media_type


def refuse_encoding(headers: Mapping[bytes, bytes]) -> None:
    """Take a body only as it is: what is compressed could unpack to anything. Errors: UnsupportedEncoding."""
    encoding = headers.get(b"content-encoding", b"").decode("latin-1").strip()
    if encoding and encoding.lower() != "identity":
        fault = Fault("", "a body without Content-Encoding", quote(encoding))
        raise UnsupportedEncoding(fault, headers={"Accept-Encoding": "identity"})


def answer_type(accept: str, own: str, known: Collection[str]) -> str:
    """The known media type that `Accept` likes best; `own`, the type of the request, where it has no preference.

    Errors: NotAcceptable.
    """
    if not accept.strip():
        return own
    ranges = [_range(part) for part in accept.split(",")[:MAX_RANGES]]
    candidates = [own, *(name for name in known if name != own)]
    quality = {name: _quality(name, ranges) for name in candidates}
    best = max(candidates, key=lambda name: quality[name])  # the first of equals, so `own` before others
    if quality[best] <= 0:
        raise NotAcceptable.at("", f"Accept to allow {' or '.join(known)}", quote(accept))
    return best


def _range(part: str) -> tuple[str, float]:
    """One media range and its quality; one that cannot be read counts 0."""
    name, *parameters = (piece.strip().lower() for piece in part.split(";"))
    for parameter in parameters:
        if parameter.startswith("q="):
            try:
                return name, float(parameter[2:])
            except ValueError:
                return name, 0.0
    return name, 1.0


def _quality(name: str, ranges: list[tuple[str, float]]) -> float:
    """What the most specific range that covers a media type says of it."""
    for wanted in (name, name.partition("/")[0] + "/*", "*/*"):
        for given, quality in ranges:
            if given == wanted:
                return quality
    return 0.0
