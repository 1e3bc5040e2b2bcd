"""Hashes of API keys, in the form that `attention-service key` prints: sha256: and 64 hexadecimal digits."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

HASH = re.compile(r"sha256:([0-9a-f]{64})")


def parse_hashes(text: str) -> frozenset[bytes]:
    """The hashes in a comma-separated text; empty items are skipped.

    Errors: ValueError, which does not quote the text, as it might be a key.
    """
    hashes = _parse(text.split(","), "hash")
    if text.strip() and not hashes:
        raise ValueError("there is no hash between the commas")
    return hashes


def read_hashes(file: Path) -> frozenset[bytes]:
    """The hashes in a file, one a line; `#` begins a comment. Errors: OSError, and ValueError as above."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise ValueError("the file is not UTF-8 text") from None
    return _parse((line.partition("#")[0] for line in lines), "line")


def _parse(items: Iterable[str], kind: str) -> frozenset[bytes]:
    found = set()
    for number, item in enumerate(items, 1):
        if item.strip():
            match = HASH.fullmatch(item.strip())
            if match is None:
                expected = "sha256: and 64 hexadecimal digits, as `attention-service key` prints"
                raise ValueError(f"{kind} {number} is not the hash of a key ({expected})")
            found.add(bytes.fromhex(match[1]))
    return frozenset(found)
