"""What browsers are told: which pages may call, and what the service's own pages may do."""

from __future__ import annotations

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# The pages hold their scripts and styles, or load them from here. Nobody frames them, nothing is loaded from elsewhere.
PAGE = [
    (b"content-security-policy",
     b"default-src 'self'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
     b"frame-ancestors 'none'; base-uri 'none'; form-action 'self'"),
    (b"referrer-policy", b"no-referrer"),
]  # fmt: skip


# No browser is to guess at what an answer is. Tensors are left out: they are of types that none guesses at.
NO_SNIFFING = (b"x-content-type-options", b"nosniff")


class SecurityHeaders:
    """Adds to pages what they may do."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""

        async def send_with_policy(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = message["headers"] = [*message["headers"], NO_SNIFFING]
                if any(name == b"content-type" and value.startswith(b"text/html") for name, value in headers):
                    message["headers"] = [*headers, *PAGE]
            await send(message)

        await self._app(scope, receive, send_with_policy)


def cors(app: ASGIApp, origins: str) -> ASGIApp:
    """Lets pages of these origins call, with a key if they have one; cookies are never used."""
    return CORSMiddleware(
        app,
        allow_origins=[origin.strip() for origin in origins.split(",") if origin.strip()],
        allow_methods=["GET", "POST"],
        allow_headers=["Authorization", "Content-Type", "X-Request-ID"],
        expose_headers=["X-Request-ID", "Server-Timing", "Retry-After"],
    )
