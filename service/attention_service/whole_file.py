"""Files that are written as a whole: a full disk or Ctrl-C leaves the file of before, or none."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4


@contextmanager
def whole_file(path: str | Path, *, stored: bool = False) -> Iterator[BinaryIO]:
    """A file to write to, which takes the place of `path` at the end; after an error `path` is as it was before.

    stored: True for a file that the service keeps: it outlives a loss of power, and takes the place of a symbolic link

    Other links stay, and the file that they lead to is replaced. A pipe, a terminal, and a file that cannot be replaced
    are written in place. A file keeps its mode; that of a new one follows from the umask.

    Errors: OSError, with the name of the file.
    """
    target = Path(path) if stored else Path(os.path.realpath(path))
    if not stored and _is_in_place(path, target.parent):
        with open(path, "wb") as file:
            yield file
        return
    # A name with a dot at its start is no layer's, and no case's.
    temporary = target.with_name(f".{uuid4().hex}.part")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            with suppress(FileNotFoundError):
                os.chmod(temporary, stat.S_IMODE(os.stat(target).st_mode))
            if stored:
                os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException as error:
        with suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError) and error.errno and error.filename in (None, str(temporary)):  # None: of `write`
            error.filename = str(path)
        raise
    if stored:
        _sync_folder(target.parent)


def _is_in_place(path: str | Path, folder: Path) -> bool:
    """True for what is no regular file, or cannot be replaced by another file in its folder."""
    try:
        status = os.stat(path)
    except OSError:
        return not os.access(folder, os.W_OK)  # opening it raises the error that names it
    is_kept = not (stat.S_ISREG(status.st_mode) and os.access(path, os.W_OK) and os.access(folder, os.W_OK))
    return is_kept or any(_is_open(descriptor, status) for descriptor in (1, 2))  # /dev/stdout may be a file


def _is_open(descriptor: int, status: os.stat_result) -> bool:
    """True if the descriptor is of the file with this status."""
    with suppress(OSError):  # it is closed
        return os.path.samestat(os.fstat(descriptor), status)
    return False


def _sync_folder(folder: Path) -> None:
    """Wait until the disk has the names of a folder."""
    with suppress(OSError):  # not every system opens directories
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
