"""Authentication by API keys. The service knows only their hashes."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from service.errors import Unauthorized
from service.http.problems import problem
from service.settings import Settings
from service.settings.keys import Keys

# Paths that need no key: orchestrators that ask for health have none.
OPEN = frozenset({"/health/live", "/health/ready"})
METRICS = "/metrics"


class Guard:
    """Refuses requests without a valid API key, except to open paths."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._keys = Keys(settings.api_keys, settings.api_keys_file)
        self._open = OPEN if settings.protect_metrics else OPEN | {METRICS}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "http" and scope["path"] not in self._open:
            authorization = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
            if not self._keys.accept(authorization):
                expected, got = "Authorization: Bearer and a key", "another key" if authorization else "none"
                error = Unauthorized.at("", expected, got, headers={"WWW-Authenticate": "Bearer"})
                await problem(error, Request(scope))(scope, receive, send)
                return
        await self._app(scope, receive, send)
