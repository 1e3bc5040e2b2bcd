"""The TLS certificate and its key, loaded again when their files have changed."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from attention_service.settings.checks import check_private_key

T = TypeVar("T")

logger = logging.getLogger("attention")


class Certificate(Generic[T]):
    """What `load` makes of the files of a certificate and its key. Errors: those of `load`, when it is made.

    reload: seconds between two times that the files are looked at
    """

    def __init__(self, certificate: Path, key: Path | None, load: Callable[[], T], reload: float = 1.0) -> None:
        self._certificate = certificate
        self._key = key
        self._load = load
        self._interval = reload
        self._lock = threading.Lock()  # gRPC asks in threads of its own
        self._looked_at, self._state = time.monotonic(), self._state_of_files()
        self._loaded = load()

    def current(self) -> T:
        """What `load` made of the files last. Files that cannot be used change nothing, but cause a warning."""
        with self._lock:
            if time.monotonic() - self._looked_at >= self._interval:
                self._look()
            return self._loaded

    def _look(self) -> None:
        before, self._state = self._state, self._state_of_files()
        self._looked_at = time.monotonic()
        if self._state == before:
            return
        try:
            check_private_key(self._certificate, self._key)
            self._loaded = self._load()
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                self._state = []  # they could be read later: look again
            logger.warning("the changed TLS certificate cannot be used, the last one remains: %s", error)
        else:
            logger.info("the TLS certificate has been loaded again")

    def _state_of_files(self) -> list[tuple[int, int, int] | None]:
        """What differs when the files were written or replaced; None for a file that is not there."""
        return [_state_of(file) for file in (self._certificate, self._key or self._certificate)]


def _state_of(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
