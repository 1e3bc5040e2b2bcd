"""API keys, known to the service by their SHA-256 hashes: `sha256:`, 64 hexadecimal digits, and maybe a name."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import Iterable
from pathlib import Path

from attention_service.settings.files import check_regular

# A hash, and the name that the log gives to requests with its key.
HASH = re.compile(r"sha256:([0-9a-f]{64})(?:\s+([!-~][ -~]{0,63}))?")

logger = logging.getLogger("attention")


def parse_hashes(text: str) -> dict[bytes, str]:
    """The hashes in a comma-separated text, each with its name, "" if it has none; empty items are skipped.

    Errors: ValueError, which does not quote the text, as it might be a key.
    """
    hashes = _parse(text.split(","), "hash")
    if text.strip() and not hashes:
        raise ValueError("there is no hash between the commas")
    return hashes


def read_hashes(file: Path) -> dict[bytes, str]:
    """The hashes in a file with their names, one a line; `#` begins a comment. Errors: OSError, ValueError as above."""
    check_regular(file)
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise ValueError("the file is not UTF-8 text") from None
    return _parse((line.partition("#")[0] for line in lines), "line")


def _parse(items: Iterable[str], kind: str) -> dict[bytes, str]:
    found = {}
    for number, item in enumerate(items, 1):
        if item.strip():
            match = HASH.fullmatch(item.strip())
            if match is None:
                expected = "sha256: and 64 hexadecimal digits, as `attention-service key` prints"
                raise ValueError(f"{kind} {number} is not the hash of a key ({expected})")
            found[bytes.fromhex(match[1])] = match[2] or ""
    return found


def new_key() -> tuple[str, str]:
    """A random key of 256 bits, and its hash to be given to the service.

    Keys are random, not chosen by people, so that one round of SHA-256 is enough: there is nothing to guess from.
    """
    key = secrets.token_urlsafe(32)
    return key, f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


class Keys:
    """The hashes of all keys; a file of hashes is read again every second. Errors: ValueError for a wrong hash.

    reload: seconds between two times that the file is read
    """

    def __init__(self, hashes: str, file: Path | None, reload: float = 1.0) -> None:
        self._given = parse_hashes(hashes)
        self._file = file
        self._interval = reload
        self._read()

    def find(self, authorization: bytes) -> str | None:
        """The name of the key that an Authorization header holds, "" if it has none; None if it holds no valid key.

        The time that this takes depends on the number of keys only: hashes are compared, each as a whole, all of them.
        """
        if self._file is not None and time.monotonic() - self._read_at >= self._interval:
            try:
                self._read()
            except (OSError, ValueError):
                logger.exception("the keys cannot be read again; those known go on to be valid")
        scheme, _, key = authorization.partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        found = None
        for known, name in self._hashes.items():
            if hmac.compare_digest(digest, known):
                found = name
        return found if scheme.lower() == b"bearer" else None

    def _read(self) -> None:
        self._read_at = time.monotonic()
        self._hashes = self._given if self._file is None else self._given | read_hashes(self._file)
