"""The TLS context of the server, which presents a renewed certificate without a restart."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path

from uvicorn import Config

from attention_service.settings.certificate import Certificate


def renewing_context(
    certificate: Path, key: Path | None, config: Config, default: Callable[[], ssl.SSLContext]
) -> ssl.SSLContext:
    """The context that uvicorn would make, but each handshake uses the files as they are now.

    A further context holds a renewed certificate: loading files that do not match would break this one.
    """
    context = default()
    contexts = Certificate(certificate, key, default)

    def choose(connection: ssl.SSLObject, name: str | None, listening: ssl.SSLContext) -> None:
        connection.context = contexts.current()

    context.sni_callback = choose  # called without a server name, too
    return context
