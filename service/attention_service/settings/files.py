"""What holds for every file that a setting names and that is read again while the service runs."""

from __future__ import annotations

import stat
from pathlib import Path


def check_regular(file: Path) -> None:
    """Raise OSError if opening the file could wait, as for a pipe without a writer. Symbolic links are followed."""
    mode = file.stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # opening a directory says itself what is wrong
        raise OSError(0, "this is no regular file")
