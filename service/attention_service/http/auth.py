"""Authentication by API keys. The service knows only their hashes."""

from __future__ import annotations

from collections.abc import Awaitable

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from attention_service.errors import Unauthorized
from attention_service.http.problems import problem
from attention_service.observability.requests import headers_of, record_of
from attention_service.settings import Settings
from attention_service.settings.keys import Keys

# Paths that need no key: orchestrators that ask for health have none.
OPEN = frozenset({"/health/live", "/health/ready"})
METRICS = "/metrics"
# The documentation and the page: paths, and starts of paths. A browser sends no key when it opens a page.
DOCS = frozenset({"/", "/docs", "/openapi.json"})
BELOW_DOCS = ("/docs-assets/", "/page/", "/problems/")


def needs_key(path: str, settings: Settings) -> bool:
    """True if requests for this path need a key, where requests need keys at all."""
    if path in OPEN:
        return False
    if path == METRICS:
        return settings.protect_metrics
    return settings.protect_docs or not (path in DOCS or path.startswith(BELOW_DOCS))


class Guard:
    """Refuses requests without a valid API key, except to open paths."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._settings = settings
        self._keys = Keys(settings.api_keys, settings.api_keys_file)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Answer one request."""
        if scope["type"] == "http" and needs_key(scope["path"], self._settings):
            authorization = headers_of(scope).get(b"authorization", b"")
            name = self._keys.find(authorization)
            if name is None:
                expected, got = "Authorization: Bearer and a key", "another key" if authorization else "none"
                error = Unauthorized.at("", expected, got, headers={"WWW-Authenticate": "Bearer"})
                return problem(error, Request(scope))(scope, receive, send)
            record_of(scope).key = name
        return self._app(scope, receive, send)
