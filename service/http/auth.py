"""Keys: who may call. Only their hashes are known here."""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import time
from pathlib import Path

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from service.errors import Fault, Unauthorized
from service.http.problems import problem
from service.keys import parse_hashes, read_hashes
from service.settings import Settings

# Seconds between two looks at the file.
RELOAD = 1.0
# Whoever watches over the service has no key.
OPEN = frozenset({"/health/live", "/health/ready"})
METRICS = "/metrics"

logger = logging.getLogger("attention")


def new_key() -> tuple[str, str]:
    """A random key of 256 bits, and its hash to be given to the service.

    Keys are random, not chosen by people, so that one round of SHA-256 is enough: there is nothing to guess from.
    """
    key = secrets.token_urlsafe(32)
    return key, f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


class Keys:
    """The hashes of all keys, those of a file read again when it changes. Errors: ValueError for what is no hash."""

    def __init__(self, hashes: str, file: Path | None) -> None:
        self._given = parse_hashes(hashes)
        self._file = file
        self._changed: float | None = None
        self._looked = time.monotonic()
        self._hashes = self._given
        if file is not None:
            self._read(file)

    def admit(self, authorization: bytes) -> bool:
        """Whether an Authorization header holds one of the keys.

        The time that this takes depends on the number of keys only: hashes are compared, each as a whole, all of them.
        """
        self._reload()
        scheme, _, key = authorization.partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        found = scheme.lower() == b"bearer"
        matches = [hmac.compare_digest(digest, known) for known in self._hashes]
        return found and any(matches)

    def _reload(self) -> None:
        now = time.monotonic()
        if self._file is None or now - self._looked < RELOAD:
            return
        self._looked = now
        try:
            self._read(self._file)
        except (OSError, ValueError):
            logger.exception("the keys cannot be read again; those known go on to be valid")

    def _read(self, file: Path) -> None:
        changed = file.stat().st_mtime
        if changed != self._changed:
            self._hashes = self._given | read_hashes(file)
            self._changed = changed


class Guard:
    """Lets pass who has a key, and anybody to what is open."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._keys = Keys(settings.api_keys, settings.api_keys_file)
        self._open = OPEN if settings.protect_metrics else OPEN | {METRICS}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "http" and scope["path"] not in self._open:
            authorization = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
            if not self._keys.admit(authorization):
                fault = Fault("", "Authorization: Bearer and a key", "another key" if authorization else "none")
                error = Unauthorized(fault, headers={"WWW-Authenticate": "Bearer"})
                await problem(error, Request(scope))(scope, receive, send)
                return
        await self._app(scope, receive, send)


def has_keys(settings: Settings) -> bool:
    """Whether callers need a key."""
    return bool(settings.api_keys.strip(" ,")) or settings.api_keys_file is not None
