"""Files that are written as a whole: a full disk or Ctrl-C leaves the file of before, or none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final
from uuid import uuid4

# They lead to a file where a shell sends the output there, and the shell may write on to it.
STREAMS: Final = ("/dev/stdout", "/dev/stderr")


@contextmanager
def whole_file(path: str | Path, *, stored: bool = False) -> Iterator[BinaryIO]:
    """A file to write to, which takes the place of `path` at the end; after an error `path` is as it was before.

    stored: True for a file that the service keeps: it outlives a loss of power, takes the place of a symbolic link, and
    can be read by the service, which may be another user

    Other links stay, and the file that they lead to is replaced. A pipe, a terminal, and a file that cannot be replaced
    are written in place. A file keeps its mode; that of a new one follows from the umask. Errors: OSError.
    """
    target = Path(path) if stored else Path(os.path.realpath(path))
    if not stored and _is_in_place(path, target):
        with open(path, "wb") as file:
            yield file
        return
    temporary = target.with_name(f".{uuid4().hex}.part")  # with a dot at its start it is no layer's
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            with suppress(FileNotFoundError):
                os.chmod(temporary, 0o644 if stored else target.stat().st_mode & 0o7777)
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
        with suppress(OSError):  # not every system opens directories
            descriptor = os.open(target.parent, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _is_in_place(path: str | Path, target: Path) -> bool:
    """True for what is no regular file, or cannot be replaced by another. target: `path` without symbolic links"""
    is_kept = os.path.exists(path) and not (os.path.isfile(path) and os.access(path, os.W_OK))
    return is_kept or not os.access(target.parent, os.W_OK) or str(target) in map(os.path.realpath, STREAMS)
