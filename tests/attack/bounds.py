"""Upper bounds for decoding any body: memory and time in proportion to its length, no errors but ServiceError."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from attention_service.codecs.base import Codec
from attention_service.errors import ServiceError

MB: Final = 2**20
PAGE: Final = os.sysconf("SC_PAGE_SIZE")
STATM: Final = os.open("/proc/self/statm", os.O_RDONLY)
# The default limit for the decompressed size of a body, in bytes.
LIMIT: Final = 16 * MB


class BoundBroken(Exception):
    """Raised when decoding a body exceeds a bound."""


def memory_bound(codec: Codec, length: int, limit: int = LIMIT) -> int:
    """The most bytes that decoding a body of this length may use, its decompressed content included."""
    return 20 * length + 64 * MB + (limit if codec.may_be_compressed else 0)


def time_bound(length: int) -> float:
    """The most seconds of processor time for a body: far above what is usual, as machines are shared, below a hang."""
    return 1 + length * 2e-6


def parse(codec: Codec, body: bytes, limit: int = LIMIT) -> bool:
    """True if the codec decodes the body, False if it raises a ServiceError. Errors: any other; BoundBroken."""
    start = time.process_time()
    try:
        codec.decode(body, limit)
        good = True
    except ServiceError as error:
        if not 400 <= error.status < 500 or len(str(error)) > 4000:
            raise BoundBroken(f"{error.status} with {len(str(error))} characters") from error
        good = False
    if (took := time.process_time() - start) > time_bound(len(body)):
        raise BoundBroken(f"{took:.1f} s for {len(body)} bytes")
    return good


@contextmanager
def address_space(more: int) -> Iterator[None]:
    """Limits the process to `more` bytes beyond its present address space; cheap enough for a million executions."""
    now = int(os.pread(STATM, 64, 0).split()[0]) * PAGE
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


def peak_of_parsing(codec: Codec, body: bytes) -> int:
    """The growth of resident memory while the codec decodes the body, in bytes, as the kernel counts it."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    parse(codec, body)
    return _status("VmHWM") - before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))
