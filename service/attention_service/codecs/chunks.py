"""Streaming responses: an answer is encoded chunk by chunk while earlier chunks are being sent.

Each chunk takes about a millisecond and at most 1 MiB, so encoding an answer of any size needs some megabytes and does
not block the event loop. Binary formats make chunks that are views of arrays; each is copied when it is sent, or all at
once for an answer of up to 2 MiB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import Final, NamedTuple

import numpy as np

# A memoryview has bytes as elements, as its `len` is taken for its size.
Chunk = bytes | memoryview

# Bytes of the largest chunk. A multiple of 8, so that no element of an array is cut.
MAX_CHUNK: Final = 2**20
# Memory that encoding takes beside the answer, whatever its size: chunks on their way from step to step.
ENCODE_BYTES: Final = 2**23
# Bytes of a chunk that is worth sending by itself, and chunks that are joined at most: files of an archive take some
# ten microseconds each.
WORTH_SENDING: Final = 2**19
MOST_JOINED: Final = 2**8
# Bytes of an answer that takes less time to join than turns of the event loop, one for each chunk, take.
JOINED: Final = 2**21


class Encoded(NamedTuple):
    """An encoded answer.

    media_type: of the answer
    headers: Content-Type, Content-Length unless it is unknown before the chunks are made, and those of the format
    chunks: the bytes to send; a list if all are made, else an iterator that makes them
    """

    media_type: str
    headers: list[tuple[bytes, bytes]]
    chunks: Iterable[Chunk]


def encoded(media_type: str, chunks: Iterable[Chunk], length: int | None = None) -> Encoded:
    """An answer of these chunks: small ones joined, all made already if the answer is small.

    length: bytes of the whole answer, if they are known: then chunks are views, and all are joined up to `JOINED`
    """
    if length is not None and length <= JOINED:
        return one_chunk(media_type, b"".join(chunks))
    joined = coalesce(chunks)
    start = list(islice(joined, 2))
    if len(start) < 2:
        return one_chunk(media_type, *start)
    headers = [(b"content-type", media_type.encode("ascii"))]
    if length is not None:
        headers.append((b"content-length", b"%d" % length))
    return Encoded(media_type, headers, chain(iter(start), joined))  # `chain` would keep the list itself


def one_chunk(media_type: str, content: Chunk = b"") -> Encoded:
    """A small answer in one chunk."""
    length = b"%d" % len(content)
    headers = [(b"content-type", media_type.encode("ascii")), (b"content-length", length)]
    return Encoded(media_type, headers, [content])


def whole(media_type: str, content: bytes) -> Encoded:
    """An answer that is made whole. Its chunks are views."""
    view = memoryview(content)
    chunks = [view[start : start + MAX_CHUNK] for start in range(0, len(content), MAX_CHUNK)]
    return one_chunk(media_type, content)._replace(chunks=chunks)


def measured(make: Callable[[], Iterator[Chunk]]) -> tuple[Iterator[Chunk], int]:
    """The chunks that `make` returns, and their length in bytes.

    Many chunks are not kept: then `make` is called again, once to measure them and once for the result.
    """
    start = list(islice(coalesce(make()), 2))
    if len(start) < 2:
        return iter(start), sum(map(len, start))
    return make(), sum(map(len, make()))


def coalesce(chunks: Iterable[Chunk]) -> Iterator[Chunk]:
    """The same bytes in fewer chunks, made as they are asked for.

    Up to MOST_JOINED neighbours are joined, and so copied, until they have WORTH_SENDING bytes, unless the next would
    make them longer than MAX_CHUNK. So a large chunk may be joined with small ones before it, and a result may be
    small. A chunk that is longer by itself passes as it is. No chunks give none.
    """
    waiting: list[Chunk] = []
    length = 0
    for chunk in chunks:
        is_full = length >= WORTH_SENDING or len(waiting) >= MOST_JOINED
        if waiting and (is_full or length + len(chunk) > MAX_CHUNK):
            yield _joined(waiting)
            waiting, length = [], 0
        waiting.append(chunk)
        length += len(chunk)
    if waiting:
        yield _joined(waiting)


def _joined(chunks: list[Chunk]) -> Chunk:
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def array_chunks(array: np.ndarray, size: int = MAX_CHUNK) -> Iterator[memoryview]:
    """The bytes of an array in row-major order, in chunks of at most `size`. The whole array is never copied."""
    for part in contiguous(array, size // array.itemsize):
        yield part.view(np.uint8).data


def contiguous(array: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """The elements of an array in row-major order, as vectors of at most `size` elements.

    A contiguous array gives views, any other copies.
    """
    if array.flags.c_contiguous:
        flat = array.reshape(-1)
        return (flat[start : start + size] for start in range(0, flat.size, size))
    parts = np.nditer(array, ["buffered", "external_loop", "zerosize_ok"], order="C", buffersize=size)
    return map(np.copy, parts)  # as all parts are in one buffer
