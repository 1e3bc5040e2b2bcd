"""npz: a zip archive of npy files, as numpy.savez writes it. No pickle, ever.

Members that are stored, not compressed, are views of the body if their elements are aligned there. Each member's size
is held against its own header before anything is made of it, and all of them against the limit before any is unpacked.
"""

from __future__ import annotations

import io
import math
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple, cast

import numpy as np
from numpy.lib import format as npy

from service.codecs import json
from service.codecs.chunks import WORTH_SENDING, Chunk, Encoded, in_one, memory, sliced, streamed
from service.codecs.decoded import Body, Decoded
from service.codecs.named_tensors import (
    MAX_MEMBERS,
    MAX_TEXT,
    REQUEST,
    RESPONSE,
    Rest,
    booleans,
    flattened,
    nested,
    too_many,
)
from service.codecs.sizes import MAX_RANK, is_shape
from service.errors import (
    BodyTooLarge,
    FieldConflict,
    InvalidTensors,
    NotAcceptable,
    ServiceError,
    TooLarge,
    child,
    quote,
)

MEDIA_TYPE: Final = "application/x-npz"
SUFFIX: Final = ".npy"
DTYPES: Final = tuple(np.dtype(kind) for kind in (np.bool_, np.int32, np.int64, np.float16, np.float32, np.float64))
# Bytes of the JSON text: these and as many times the length of the body, but reading it takes many times its own.
TEXT: Final = 2**16
TEXT_GROWTH: Final = 16
# Bytes of the directory, of which zipfile makes an object for each 46: some ten times what MAX_MEMBERS need.
MAX_DIRECTORY: Final = 2**18
DIRECTORY_GROWTH: Final = 20
# Bytes that are unpacked at once.
AT_ONCE: Final = 2**18
# Deflate packs at most so many bytes into one.
DEFLATE: Final = 1032
# A string of NumPy, with four bytes for each character, is read by way of bytes and a string of Python.
TEXT_COPIES: Final = 9
KINDS: Final = "bif"
# Of the header of an npy file; numpy's own take about 120 bytes.
MAX_HEADER: Final = 4096
LOCAL_HEADER: Final = struct.Struct("<4s22xHH")  # signature, length of the name, length of the extra field
ENCRYPTED: Final = 0x1
# Bytes of an entry of the directory, at least.
ENTRY: Final = 46
# Of the widest elements.
ALIGNMENT: Final = 8
# Bytes of an archive beside names and contents: for each member its header with an extra field of 20, the descriptor
# after its content, and its entry in the directory; then the end. Of larger archives the directory has longer entries.
EACH: Final = 30 + 20 + 24 + 46
END: Final = 22
ZIP64: Final = 2**31 - 1


def decode(body: Body, limit: int) -> Decoded:
    """The fields of a request that unpacks to at most `limit` bytes.

    Errors: InvalidTensors, InvalidRequest, FieldConflict, BodyTooLarge, and those of the JSON text.
    """
    members = _directory(body)
    unpacked = sum(member.file_size for member in members)
    if unpacked > max(limit, len(body)):
        raise BodyTooLarge.at("", f"at most {limit} bytes when unpacked", f"{unpacked}")
    tensors: dict[str, np.ndarray] = {}
    request = None
    for member in members:
        name = member.filename.removesuffix(SUFFIX)
        content = _content(member, body)
        if name == REQUEST and request is None:
            request = _text(_array(content, name, text=True), _most_text(len(body)))
        elif name in tensors or name == REQUEST:
            raise FieldConflict.at(child("", name), "each member once", "the same name again")
        else:
            tensors[name] = _array(content, name)
    return nested(tensors, request)


def decode_bound(length: int, limit: int) -> int:
    """Upper bound of the memory for decoding any body of this length, in bytes."""
    text = _most_text(length)
    directory = DIRECTORY_GROWTH * min(length, MAX_DIRECTORY)
    return length + min(DEFLATE * length, max(limit, length)) + _text_bytes(text) + directory


def decode_bytes(body: Body, limit: int) -> int:
    """Upper bound of the memory for decoding this body, by the sizes in its directory."""
    memory = len(body) + DIRECTORY_GROWTH * min(len(body), MAX_DIRECTORY)
    try:
        members = _directory(body)
    except ServiceError:
        return memory  # nothing is made of it
    for member in members:
        memory += member.file_size
        if member.filename.removesuffix(SUFFIX) == REQUEST:
            text = min(member.file_size, _most_text(len(body)))
            memory += _text_bytes(text)
    return min(memory, decode_bound(len(body), limit))


def _text_bytes(text: int) -> int:
    return TEXT_COPIES * text + json.decode_bound(text)


def _most_text(length: int) -> int:
    return min(MAX_TEXT, TEXT + TEXT_GROWTH * length)


def _directory(body: Body) -> list[zipfile.ZipInfo]:
    """The members of an archive. Errors: InvalidTensors, InvalidRequest."""
    try:
        members = zipfile.ZipFile(cast(Any, _File(body))).infolist()
    except (zipfile.BadZipFile, struct.error, ValueError, NotImplementedError, OSError) as error:
        raise InvalidTensors.at("", "a zip archive", quote(str(error), 80)) from None
    if len(members) > MAX_MEMBERS:
        raise too_many(len(members))
    return members


class _File:
    """A file over a body, without a copy. zipfile reads the directory in one piece, so long reads are refused."""

    def __init__(self, body: Body) -> None:
        self._view = memoryview(body)
        self._at = 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = (0, self._at, len(self._view))[whence]
        self._at = max(0, start + offset)
        return self._at

    def read(self, size: int = -1) -> bytes:
        content = self._view[self._at :] if size < 0 else self._view[self._at : self._at + size]
        if len(content) > MAX_DIRECTORY:
            raise too_many(len(content) // ENTRY)
        self._at += len(content)
        return bytes(content)


def encode(answer: Mapping[str, Any], request: Decoded) -> Encoded:
    """An answer as numpy.savez would write it: the memory of each array as it is.

    Errors: NotAcceptable for bfloat16, which npy files do not know.
    """
    tensors = dict(flattened(answer))
    for name, tensor in tensors.items():
        if tensor.dtype.kind == "V":
            raise NotAcceptable.at("", "another media type than npz for bfloat16", f"{name} in bfloat16")
    members = [_text_member(Rest(answer)), *(_member(name, tensor) for name, tensor in tensors.items())]
    length = END + sum(EACH + 2 * len(member.name) + len(member.header) + member.nbytes for member in members)
    if length <= WORTH_SENDING:
        return in_one(MEDIA_TYPE, _archive(members))
    return streamed(MEDIA_TYPE, _archive(members), length if length < ZIP64 else None)


class _Member(NamedTuple):
    """An npy file to be written. header: of the npy file; chunks: what comes after it, so many bytes"""

    name: str
    header: bytes
    nbytes: int
    chunks: Iterator[Chunk]


def _archive(members: list[_Member]) -> Iterator[Chunk]:
    """A zip archive, in the chunks that zipfile writes."""
    sink = _Sink()
    with zipfile.ZipFile(cast(Any, sink), "w", zipfile.ZIP_STORED) as archive:
        for name, header, _, chunks in members:
            with archive.open(zipfile.ZipInfo(name), "w", force_zip64=True) as member:
                member.write(header)
                for chunk in chunks:
                    member.write(chunk)
                    yield from sink.take()
    yield from sink.take()


def _member(name: str, tensor: np.ndarray) -> _Member:
    header = npy.header_data_from_array_1_0(tensor) | {"fortran_order": False}  # some readers know no other
    return _Member(name + SUFFIX, _npy_header(header), tensor.nbytes, memory(tensor))


def _text_member(text: Iterable[Chunk]) -> _Member:
    """The JSON text as NumPy's array of one string, with four bytes for each character."""
    length = sum(len(str(chunk, "utf-8")) for chunk in text)
    header = _npy_header({"descr": f"<U{length}", "fortran_order": False, "shape": ()})
    chunks = (part for chunk in text for part in sliced(str(chunk, "utf-8").encode("utf-32-le")))
    return _Member(RESPONSE + SUFFIX, header, 4 * length, chunks)


def _npy_header(header: dict[str, Any]) -> bytes:
    stream = io.BytesIO()
    npy.write_array_header_1_0(stream, header)
    return stream.getvalue()


class _Sink:
    """A file for zipfile that cannot be rewound, and keeps what is written until it is taken."""

    def __init__(self) -> None:
        self._chunks: list[Chunk] = []

    def write(self, data: Chunk) -> int:
        self._chunks.append(data)
        return len(data)

    def flush(self) -> None:
        """Nothing is held back."""

    def take(self) -> list[Chunk]:
        """What was written since the last time."""
        chunks, self._chunks = self._chunks, []
        return chunks


def _content(member: zipfile.ZipInfo, body: Body) -> memoryview:
    """The bytes of a member: a view of the body if it is stored. Errors: InvalidTensors."""
    name = quote(member.filename)
    header = body[member.header_offset : member.header_offset + LOCAL_HEADER.size]
    if len(header) < LOCAL_HEADER.size or header[:4] != b"PK\3\4":
        raise InvalidTensors.at("", f"{name} to begin with its header", "something else")
    _, name_length, extra_length = LOCAL_HEADER.unpack(header)
    start = member.header_offset + LOCAL_HEADER.size + name_length + extra_length
    packed = memoryview(body)[start : start + member.compress_size]
    if len(packed) != member.compress_size:
        raise InvalidTensors.at("", f"{member.compress_size} bytes of {name}", f"{len(packed)}")
    if member.flag_bits & ENCRYPTED or member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise InvalidTensors.at("", f"{name} stored or deflated", "another method, or encryption")
    content = packed if member.compress_type == zipfile.ZIP_STORED else _inflated(packed, member)
    if content is None or len(content) != member.file_size or zlib.crc32(content) != member.CRC:
        raise InvalidTensors.at("", f"{member.file_size} bytes of {name} with their checksum", "others")
    return content


def _inflated(packed: memoryview, member: zipfile.ZipInfo) -> memoryview | None:
    """The unpacked bytes of a member; None if there are more than its size says. Never unpacks more than that."""
    size = member.file_size
    padding = -size % ALIGNMENT  # in front, as the elements of an array stand at the end
    content = np.empty(padding + size, np.uint8).data[padding:]
    at = 0
    try:
        for part in _inflate(packed):
            if at + len(part) > size:
                return None
            content[at : at + len(part)] = part
            at += len(part)
    except zlib.error as error:
        raise InvalidTensors.at("", f"{quote(member.filename)} deflated", quote(str(error), 80)) from None
    return content[:at]


def _inflate(packed: memoryview) -> Iterator[bytes]:
    inflater = zlib.decompressobj(-15)
    for chunk in (*sliced(packed, AT_ONCE), b""):
        left: Any = chunk
        part = b"any"
        while (left or part) and not inflater.eof:
            part = inflater.decompress(left, AT_ONCE)
            left = inflater.unconsumed_tail
            yield part


def _array(content: memoryview, name: str, *, text: bool = False) -> np.ndarray:
    """The array of an npy file, whose size is what its header says. Errors: InvalidTensors.

    text: whether it is the JSON text, one string or bytes
    """
    start = io.BytesIO(content[: MAX_HEADER + 16])
    try:
        version = npy.read_magic(start)
        read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}[version]
        sizes, fortran, dtype = read(start, max_header_size=MAX_HEADER)
    except (ValueError, LookupError, TypeError, SyntaxError, RecursionError, MemoryError, tokenize.TokenError):
        raise InvalidTensors.at("", f"{quote(name)} to be an npy file", "something else") from None
    allowed = dtype.kind == "U" or dtype == np.uint8 if text else dtype.kind in KINDS and _native(dtype) in DTYPES
    if not allowed or dtype.itemsize == 0:
        wanted = "a string, or bytes" if text else ", ".join(kind.name for kind in DTYPES)
        raise InvalidTensors.at("", f"{quote(name)} to be of {wanted}", quote(dtype.str))
    if not is_shape(sizes):
        raise InvalidTensors.at("", f"at most {MAX_RANK} axes of {quote(name)}", quote(str(sizes)))
    data = content[start.tell() :]
    needed = math.prod(sizes) * dtype.itemsize
    if len(data) != needed:
        raise InvalidTensors.at("", f"{needed} bytes of {quote(name)}, as its header says", f"{len(data)}")
    flat = booleans(data, name) if dtype == np.bool_ else np.frombuffer(data, dtype)
    if flat.dtype != _native(dtype) and flat.flags.writeable:  # it was unpacked here
        flat = flat.byteswap(inplace=True).view(_native(dtype))
    # Numbers that lie across words are computed with far more slowly than copied once.
    native = flat.astype(_native(dtype), copy=not flat.flags.aligned)
    return native.reshape(sizes, order="F" if fortran else "C")


def _native(dtype: np.dtype) -> np.dtype:
    return dtype.newbyteorder("=")


def _text(array: np.ndarray, limit: int) -> bytes:
    """The JSON text: one string, or its bytes. Errors: InvalidTensors, TooLarge."""
    length = array.nbytes if array.dtype == np.uint8 else array.nbytes // 4
    if length > limit:
        raise TooLarge.at("", f"{REQUEST} of at most {limit} bytes when unpacked", str(length))
    text = array.tobytes() if array.dtype == np.uint8 else _string(array)
    if len(text) > limit:
        raise TooLarge.at("", f"{REQUEST} of at most {limit} bytes when unpacked", str(len(text)))
    return text


def _string(array: np.ndarray) -> bytes:
    if array.size != 1:
        raise InvalidTensors.at("", f"{REQUEST} to be one string", f"{array.size}")
    try:
        text = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes().decode("utf-32-le")
    except UnicodeDecodeError:
        raise InvalidTensors.at("", f"{REQUEST} to be a string of Unicode", "half a surrogate, or nothing") from None
    return text.rstrip("\0").encode()
