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
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import numpy as np

from attention_service.codecs.safetensors import DTYPES, METADATA
from attention_service.codecs.shapes import shape_of
from attention_service.errors import quote

# Bytes of the header of a stored layer, and of a checkpoint: the format allows no longer ones.
MAX_HEADER: Final = 2**20
MAX_CHECKPOINT_HEADER: Final = 100 * 10**6
# Bytes that are read at once.
CHUNK: Final = 2**24


class BadFile(Exception):
    """Raised if a file is not what it should be. The text is a sentence without its subject, the file."""


class Entry(NamedTuple):
    """A tensor in a file. dtype: its code in the format; begin, end: bytes after the header"""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


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
            length = header_length(self.read(0, min(8, self.size)), self.size, longest)
            self._start = 8 + length
            self.entries = parse_header(bytes(self.read(8, length)), self.size - self._start)
        except BaseException:
            self.__exit__()
            raise

    def tensor(self, name: str, rows: slice | None = None) -> np.ndarray:
        """A tensor, or some of its rows, which alone are read. Errors: BadFile, also for a type that NumPy has not."""
        entry = self.entries[name]
        if entry.dtype not in DTYPES:
            raise unknown_type(name, entry.dtype)
        begin, shape = entry.begin, entry.shape
        if rows is not None:
            first, last, _ = rows.indices(shape[0])
            row = math.prod(shape[1:]) * DTYPES[entry.dtype].itemsize
            begin, shape = begin + first * row, (last - first, *shape[1:])
        dtype = DTYPES[entry.dtype]
        content = self.read(self._start + begin, math.prod(shape) * dtype.itemsize)
        return np.frombuffer(content, dtype).reshape(shape)


def header_length(start: memoryview, size: int, longest: int) -> int:
    """The length of the header, from the first 8 bytes of a file of `size` bytes. Errors: BadFile."""
    if len(start) < 8:
        raise BadFile("is no file of safetensors: it has fewer than 8 bytes")
    length = int.from_bytes(start[:8], "little")
    if length > longest:
        raise BadFile(f"has a header of {length} bytes; expected at most {longest}")
    if length > size - 8:
        raise BadFile(f"is truncated: its header has {length} bytes, the file {size}")
    return length


def parse_header(text: bytes, available: int) -> dict[str, Entry]:
    """The tensors that a header names, of any type, without its metadata.

    available: bytes after the header, which the tensors fill without gaps

    Errors: BadFile.
    """
    try:
        header = json.loads(str(text, "utf-8"), object_pairs_hook=unique)
    except RecursionError:
        raise BadFile("has a header that is nested too deeply") from None
    except ValueError as error:
        raise BadFile(f"has a header that is not valid JSON: {quote(str(error), 80)}") from None
    if not isinstance(header, dict):
        raise BadFile("has a header that is no object")
    header.pop(METADATA, None)
    entries = {name: _entry(name, entry) for name, entry in header.items()}
    at = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1][2:]):
        if entry.begin != at:
            raise BadFile(f"has {quote(name, 80)} at byte {entry.begin} of its data; expected byte {at}")
        at = entry.end
    if at != available:
        reason = "is truncated" if at > available else "is longer than its header says"
        raise BadFile(f"{reason}: it has {available} bytes of data; expected {at}")
    return entries


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Errors: ValueError for a key that is given twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is given twice")
    return found


def _entry(name: str, entry: Any) -> Entry:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise BadFile(f"does not say dtype, shape and data_offsets of {quote(name, 80)}")
    dtype, shape = entry["dtype"], shape_of(entry["shape"])
    match entry["data_offsets"]:
        case [int(begin), int(end)] if isinstance(dtype, str) and shape is not None and 0 <= begin <= end:
            if dtype not in DTYPES or end - begin == math.prod(shape) * DTYPES[dtype].itemsize:
                return Entry(dtype, shape, begin, end)
    raise BadFile(f"does not say where {quote(name, 80)} is: its shape, type and offsets do not agree")


def arrays_of(content: memoryview) -> dict[str, np.ndarray]:
    """All tensors of a whole stored layer, as views of its bytes that cannot be written to. Errors: BadFile."""
    length = header_length(content[:8], len(content), MAX_HEADER)
    entries = parse_header(bytes(content[8 : 8 + length]), len(content) - 8 - length)
    data = content[8 + length :]
    return {name: _array(name, entry, data) for name, entry in entries.items()}


def unknown_type(name: str, dtype: str) -> BadFile:
    """The error for a tensor of a type that NumPy has not."""
    return BadFile(f"has {quote(name, 80)} as {quote(dtype)}; expected one of {', '.join(DTYPES)}")


def _array(name: str, entry: Entry, data: memoryview) -> np.ndarray:
    if entry.dtype not in DTYPES:
        raise unknown_type(name, entry.dtype)
    octets = np.frombuffer(data[entry.begin : entry.end], np.uint8)
    if entry.dtype == "BOOL" and octets.size and octets.max() > 1:
        raise BadFile(f"has bytes other than 0 and 1 in {quote(name, 80)}")
    array = octets.view(DTYPES[entry.dtype]).reshape(entry.shape)
    if not array.flags.aligned:  # unaligned numbers are far slower
        array = array.copy()
    array.setflags(write=False)
    return array


def identity_of(path: Path) -> Identity | None:
    """The identity of a file, or of a symbolic link itself; None if there is none. Errors: OSError."""
    try:
        return Identity.of(os.lstat(path))
    except FileNotFoundError:
        return None


def nested(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays by dotted names as fields of a request: `projection.query.weight` within `projection` and `query`.

    Errors: BadFile for a name inside that of an array.
    """
    fields: dict[str, Any] = {}
    for name, array in arrays.items():
        *path, last = name.split(".")
        inner: Any = fields
        for step in path:
            inner = inner.setdefault(step, {})
            if not isinstance(inner, dict):
                raise BadFile(f"has {quote(name, 80)} within another array")
        if last in inner:
            raise BadFile(f"has {quote(name, 80)} twice")
        inner[last] = array
    return fields
