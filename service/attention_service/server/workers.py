"""Knowing whether other workers accept connections at the socket that all of them share."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from attention_service.runtime.sockets import accept_connections, refuse_connections

with suppress(ImportError):  # Windows
    import fcntl


class Workers:
    """The workers of a service, seen from one of them, which accepts connections until it calls `refuse_connections`.

    Each holds a shared lock on the folder while it accepts; the system releases it if the worker crashes. The filter
    that refuses connections belongs to the socket, not to a worker. So it is attached under an exclusive lock, when all
    workers have come to their end, and a worker that starts detaches it after it got the shared lock.

    folder: one that only this service has; None for a single worker
    """

    def __init__(self, folder: Path | None) -> None:
        self._lock = None if folder is None or os.name == "nt" else os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        if self._lock is not None:
            fcntl.flock(self._lock, fcntl.LOCK_SH)
        accept_connections()

    def refuse_connections(self, except_port: int | None) -> bool:
        """Refuse connections from now on, other than to a port, if no other worker accepts; True if it did so.

        If it did not, this worker counts no longer as one that accepts: call again until the others have ended too.
        """
        if self._lock is None:
            refuse_connections(except_port)
            return True
        try:
            # This releases the shared lock even if it fails (flock(2)): of workers that end together one gets it.
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        refuse_connections(except_port)
        fcntl.flock(self._lock, fcntl.LOCK_UN)
        return True
