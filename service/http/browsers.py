"""Headers for browsers: which origins may call (CORS), and what the pages of the service may load."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

# The pages hold their scripts and styles, or load them from this server. They cannot be framed.
PAGE = [
    (b"content-security-policy",
     b"default-src 'self'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
     b"frame-ancestors 'none'; base-uri 'none'; form-action 'self'"),
    (b"referrer-policy", b"no-referrer"),
]  # fmt: skip


# Browsers must not guess the media type of a response.
NO_SNIFFING = (b"x-content-type-options", b"nosniff")


def security_headers(headers: Iterable[tuple[bytes, bytes]]) -> Sequence[tuple[bytes, bytes]]:
    """The security headers that a response with these headers gets."""
    for name, value in headers:
        if name == b"content-type":
            return (NO_SNIFFING, *PAGE) if value.startswith(b"text/html") else (NO_SNIFFING,)
    return (NO_SNIFFING,)


def cors(origins: str) -> Middleware:
    """CORS for pages of these origins, comma-separated. They may send a key; cookies are never used."""
    return Middleware(
        CORSMiddleware,
        allow_origins=[origin.strip() for origin in origins.split(",") if origin.strip()],
        allow_methods=["GET", "POST"],
        allow_headers=["Authorization", "Content-Type", "X-Request-ID"],
        expose_headers=["X-Request-ID", "Server-Timing", "Retry-After"],
    )
