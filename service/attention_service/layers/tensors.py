"""Files of safetensors: their headers, and single tensors of them, by reads. Nothing is mapped into memory.

A mapped file that another process truncates would end this one.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import numpy as np

from attention_service.codecs.named_tensors import whole_words
from attention_service.codecs.safetensors import (
    METADATA,
    Entry,
    checked_entries,
    dtype_of,
    header_length,
    parse_header,
    read_tensors,
)
from attention_service.errors import BadRequest, quote
from attention_service.schemas.request import AttentionRequest

# Bytes of the header of a stored layer, and of a checkpoint: the format allows no longer ones.
MAX_HEADER: Final = 2**20
MAX_CHECKPOINT_HEADER: Final = 100 * 10**6
# Bytes that are read at once.
CHUNK: Final = 2**24


class BadFile(Exception):
    """Raised if a file is not what it should be. The text is a sentence without its subject, the file."""


class Identity(NamedTuple):
    """What tells one state of a file from another, without reading it."""

    inode: int
    size: int
    modified: int  # in nanoseconds

    @classmethod
    def of(cls, status: os.stat_result) -> Identity:
        """The identity of a file with this status."""
        return cls(status.st_ino, status.st_size, status.st_mtime_ns)


class ReadFile:
    """A regular file, open for reading. A context manager.

    follow: True to follow symbolic links

    Errors: FileNotFoundError; BadFile for a symbolic link, a directory, a device or whatever else is no regular file,
    and where the system does not let it be read.
    """

    def __init__(self, path: Path, *, follow: bool = False) -> None:
        # A pipe would wait for a writer, were it not for O_NONBLOCK. Windows has neither flag.
        flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        if not follow:
            flags |= getattr(os, "O_NOFOLLOW", 0)
        try:
            descriptor = os.open(path, flags)
        except FileNotFoundError:
            raise
        except OSError as error:
            reason = "is a symbolic link" if error.errno == errno.ELOOP else f"cannot be read: {error.strerror}"
            raise BadFile(reason) from None
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(descriptor)
            raise BadFile("is no regular file")
        self._file = io.FileIO(descriptor)
        self.identity = Identity.of(status)

    @property
    def size(self) -> int:
        """The bytes of the file when it was opened."""
        return self.identity.size

    def read(self, begin: int, length: int) -> memoryview:
        """So many bytes from an offset. Errors: BadFile if there are fewer by now, or they cannot be read."""
        content = np.empty(length, np.uint8).data
        done = 0
        try:
            self._file.seek(begin)
            while done < length:
                count = self._file.readinto(content[done : done + CHUNK])
                if not count:
                    raise BadFile(f"is truncated: it has {begin + done} bytes of {begin + length}")
                done += count
        except OSError as error:
            raise BadFile(f"cannot be read: {error.strerror}") from None
        return content

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


class TensorFile(ReadFile):
    """A file of safetensors, of which single tensors are read.

    longest: bytes of its header at most; others as of ReadFile

    Errors: as of ReadFile, and BadFile for another format.
    """

    def __init__(self, path: Path, *, longest: int = MAX_HEADER, follow: bool = False) -> None:
        super().__init__(path, follow=follow)
        try:
            with as_bad_file():
                length = header_length(self.read(0, min(8, self.size)), self.size, longest)
                self._start = 8 + length
                is_layer = longest == MAX_HEADER
                self.entries = _entries(self.read(8, length), self.size - self._start, is_layer=is_layer)
        except BaseException:
            self.__exit__()
            raise

    def tensor(self, name: str, rows: slice | None = None) -> np.ndarray:
        """A tensor, or some of its rows, which alone are read. Errors: BadFile, also for a type that NumPy has not."""
        entry = self.entries[name]
        begin, shape = entry.begin, entry.shape
        with as_bad_file():
            dtype = dtype_of(name, entry.dtype)
        if rows is not None:
            first, last, _ = rows.indices(shape[0])
            row = math.prod(shape[1:]) * dtype.itemsize
            begin, shape = begin + first * row, (last - first, *shape[1:])
        content = self.read(self._start + begin, math.prod(shape) * dtype.itemsize)
        return np.frombuffer(content, dtype).reshape(shape)


def parse_json(text: bytes) -> Any:
    """A document of JSON in UTF-8. Errors: RecursionError; ValueError, also for what no answer could hold.

    That is NaN and infinity, a key that is given twice, and half of a surrogate pair.
    """
    found = json.loads(str(text, "utf-8"), object_pairs_hook=unique, parse_constant=_no_number)
    try:
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("half of a surrogate pair is no text") from None
    return found


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Errors: ValueError for a key that is given twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is given twice")
    return found


def arrays_of(content: memoryview) -> dict[str, np.ndarray]:
    """All tensors of a whole stored layer, as views of its bytes that cannot be written to. Errors: BadFile."""
    with as_bad_file():
        start = 8 + header_length(content[:8], len(content), MAX_HEADER)
        arrays = read_tensors(_entries(content[8:start], len(content) - start).values(), content[start:])
    arrays = {name: whole_words(array) for name, array in arrays.items()}
    for array in arrays.values():
        array.setflags(write=False)
    return arrays


def _entries(header: memoryview, available: int, *, is_layer: bool = True) -> dict[str, Entry]:
    """The tensors that a header names. Errors: as of `checked_entries`, BadFile for a field in a layer's metadata."""
    found = parse_header(header)
    metadata = found.pop(METADATA, None)
    for name in metadata if is_layer and isinstance(metadata, dict) else ():
        if name.partition(".")[0] in AttentionRequest.model_fields:
            raise BadFile(f"has {quote(name)} in {METADATA}; options of a layer are in its JSON")
    return {entry.name: entry for entry in checked_entries(found, available)}


@contextmanager
def as_bad_file() -> Iterator[None]:
    """Inside, an error of the format is a BadFile."""
    try:
        yield
    except BadRequest as error:
        fault = error.faults[0]
        reason = f"cannot be read: expected {fault.expected}, got {fault.got}"
    else:
        return
    raise BadFile(reason)


def identity_of(path: Path) -> Identity | None:
    """The identity of a file, or of a symbolic link itself; None if there is none. Errors: OSError."""
    try:
        return Identity.of(os.lstat(path))
    except FileNotFoundError:
        return None
