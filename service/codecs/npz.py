"""npz: a zip archive of npy files, as numpy.savez writes it. No pickle, ever.

A tensor that is stored, not compressed, is a view of the body if its elements are aligned there. The sizes of all
files are held against the limit before any is unpacked, and each against its own header before an array is made of it.
"""

from __future__ import annotations

import io
import math
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from typing import IO, Any, Final, NamedTuple, cast

import numpy as np
from numpy.lib import format as npy

from service.codecs import json
from service.codecs.chunks import MAX_CHUNK, WORTH_SENDING, Chunk, Encoded, in_one, memory, sliced, streamed
from service.codecs.decoded import Body, Decoded
from service.codecs.named_tensors import (
    MAX_TEXT,
    REQUEST,
    RESPONSE,
    AnswerText,
    answer_tensors,
    booleans,
    check_count,
    request_fields,
    whole_words,
)
from service.codecs.shapes import MAX_RANK, shape_of
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
# The types that are read, in both byte orders, and what they become.
NATIVE: Final = {dtype: dtype for dtype in DTYPES} | {dtype.newbyteorder("S"): dtype for dtype in DTYPES}
# Bytes of the JSON text: these and as many times the length of the body, but reading it takes many times its own.
TEXT: Final = 2**16
TEXT_GROWTH: Final = 16
# Bytes of the directory, of which zipfile makes an object for each 46: some ten times what MAX_TENSORS need.
MAX_DIRECTORY: Final = 2**18
DIRECTORY_GROWTH: Final = 20
# Bytes of an entry of the directory, at least.
ENTRY: Final = 46
# Deflate packs at most so many bytes into one.
DEFLATE: Final = 1032
# A string of NumPy, with four bytes for each character, is read by way of bytes and a string of Python.
TEXT_COPIES: Final = 9
# Of the header of an npy file; numpy's own take about 120 bytes.
MAX_HEADER: Final = 4096
# What zipfile raises for an archive or a file in it that is damaged, encrypted, or packed in another way.
DAMAGED: Final = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, RuntimeError, ValueError)
# What NumPy raises for the header of an npy file that is none.
NO_HEADER: Final = (ValueError, LookupError, TypeError, SyntaxError, RecursionError, MemoryError, tokenize.TokenError)
# Of the widest elements.
ALIGNMENT: Final = 8
# Bytes of an archive beside names and contents: for each file its header with an extra field of 20, the descriptor
# after its content, and its entry in the directory; then the end. Of larger archives the directory has longer entries.
PER_FILE: Final = 30 + 20 + 24 + 46
END: Final = 22
ZIP64: Final = 2**31 - 1


def decode(body: Body, limit: int) -> Decoded:
    """The fields of a request that unpacks to at most `limit` bytes.

    Errors: InvalidTensors, InvalidRequest, FieldConflict, BodyTooLarge, and those of the JSON text.
    """
    stream = _Stream(body)
    archive = _open(stream)
    unpacked = sum(file.file_size for file in archive.infolist())
    if unpacked > max(limit, len(body)):
        raise BodyTooLarge.at("", f"at most {limit} bytes when unpacked", f"{unpacked}")
    tensors: dict[str, np.ndarray] = {}
    text = None
    for file in archive.infolist():
        name = file.filename.removesuffix(SUFFIX)
        content = _content(archive, file, stream)
        if name == REQUEST and text is None:
            text = _text(_array(content, name, is_text=True), _max_text(len(body)))
        elif name in tensors or name == REQUEST:
            raise FieldConflict.at(child("", name), "each tensor once", "the same name again")
        else:
            tensors[name] = _array(content, name)
    return request_fields(tensors, text)


def decode_bound(length: int, limit: int) -> int:
    """Upper bound of the memory for decoding any body of this length, in bytes."""
    text = _max_text(length)
    directory = DIRECTORY_GROWTH * min(length, MAX_DIRECTORY)
    return length + min(DEFLATE * length, max(limit, length)) + _text_bytes(text) + directory


def decode_bytes(body: Body, limit: int) -> int:
    """Upper bound of the memory for decoding this body, by the sizes in its directory."""
    memory = len(body) + DIRECTORY_GROWTH * min(len(body), MAX_DIRECTORY)
    try:
        files = _open(_Stream(body)).infolist()
    except ServiceError:
        return memory  # nothing is made of it
    for file in files:
        memory += file.file_size
        if file.filename.removesuffix(SUFFIX) == REQUEST:
            memory += _text_bytes(min(file.file_size, _max_text(len(body))))
    return min(memory, decode_bound(len(body), limit))


def _text_bytes(text: int) -> int:
    return TEXT_COPIES * text + json.decode_bound(text)


def _max_text(length: int) -> int:
    return min(MAX_TEXT, TEXT + TEXT_GROWTH * length)


class _Stream:
    """A body as the file that zipfile reads, without a copy.

    zipfile reads the directory in one piece, so longer reads are refused. Errors: InvalidRequest.
    """

    def __init__(self, body: Body) -> None:
        self.view = memoryview(body)
        self._at = 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = (0, self._at, len(self.view))[whence]
        self._at = max(0, start + offset)
        return self._at

    def read(self, size: int = -1) -> bytes:
        content = self.view[self._at :] if size < 0 else self.view[self._at : self._at + size]
        if len(content) > MAX_DIRECTORY:
            check_count(len(content) // ENTRY)
        self._at += len(content)
        return bytes(content)


def _open(stream: _Stream) -> zipfile.ZipFile:
    """The archive in a body. Errors: InvalidTensors, InvalidRequest for too many files."""
    try:
        archive = zipfile.ZipFile(cast(Any, stream))
    except DAMAGED as error:
        raise InvalidTensors.at("", "a zip archive", quote(str(error), 80)) from None
    check_count(len(archive.infolist()))
    return archive


def _content(archive: zipfile.ZipFile, file: zipfile.ZipInfo, stream: _Stream) -> memoryview:
    """The bytes of a file in an archive: a view of the body if it is stored. Errors: InvalidTensors."""
    name = quote(file.filename)
    if file.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise InvalidTensors.at("", f"{name} stored or deflated", "another method")
    try:
        with archive.open(file) as unpacked:
            if file.compress_type == zipfile.ZIP_DEFLATED:
                content = _inflated(unpacked, file.file_size)
            else:
                start = stream.tell()  # after the header of the file, which zipfile has read
                content = stream.view[start : start + file.compress_size]
                if zlib.crc32(content) != file.CRC:
                    raise zipfile.BadZipFile("Bad CRC-32")
    except DAMAGED as error:
        raise InvalidTensors.at("", f"{name} undamaged and not encrypted", quote(str(error), 80)) from None
    if len(content) != file.file_size:
        raise InvalidTensors.at("", f"{file.file_size} bytes of {name}", str(len(content)))
    return content


def _inflated(unpacked: IO[bytes], size: int) -> memoryview:
    """The content of a compressed file; zipfile unpacks no more than `size` bytes, and compares the checksum."""
    padding = -size % ALIGNMENT  # in front, as the elements of an array stand at the end
    content = np.empty(padding + size, np.uint8).data[padding:]
    at = 0
    while part := unpacked.read(MAX_CHUNK):
        content[at : at + len(part)] = part
        at += len(part)
    return content[:at]


def _array(content: memoryview, name: str, *, is_text: bool = False) -> np.ndarray:
    """The array of an npy file, whose size is what its header says. Errors: InvalidTensors.

    is_text: the array is the JSON text, one string or bytes
    """
    start = io.BytesIO(content[: MAX_HEADER + 16])
    try:
        version = npy.read_magic(start)
        read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}[version]
        lengths, fortran, dtype = read(start, max_header_size=MAX_HEADER)
    except NO_HEADER:
        raise InvalidTensors.at("", f"{quote(name)} to be an npy file", "something else") from None
    native = NATIVE.get(dtype)
    if is_text:
        native = dtype if dtype.kind == "U" or dtype == np.uint8 else None
    if native is None or dtype.itemsize == 0:
        wanted = "a string, or bytes" if is_text else ", ".join(kind.name for kind in DTYPES)
        raise InvalidTensors.at("", f"{quote(name)} to be of {wanted}", quote(dtype.str))
    if shape_of(lengths) is None:
        raise InvalidTensors.at("", f"at most {MAX_RANK} axes of {quote(name)}", quote(str(lengths)))
    data = content[start.tell() :]
    needed = math.prod(lengths) * dtype.itemsize
    if len(data) != needed:
        raise InvalidTensors.at("", f"{needed} bytes of {quote(name)}, as its header says", f"{len(data)}")
    flat = booleans(data, name) if dtype == np.bool_ else np.frombuffer(data, dtype)
    if dtype != native and flat.flags.writeable:  # it was unpacked here
        flat = flat.byteswap(inplace=True).view(native)
    return whole_words(flat.astype(native, copy=False)).reshape(lengths, order="F" if fortran else "C")


def _text(array: np.ndarray, limit: int) -> bytes:
    """The JSON text: one string, or its bytes. Errors: InvalidTensors, TooLarge."""
    length = array.nbytes if array.dtype == np.uint8 else array.nbytes // 4
    if length <= limit:
        text = array.tobytes() if array.dtype == np.uint8 else _string(array)
        length = len(text)
    if length > limit:
        raise TooLarge.at("", f"{REQUEST} of at most {limit} bytes when unpacked", str(length))
    return text


def _string(array: np.ndarray) -> bytes:
    if array.size != 1:
        raise InvalidTensors.at("", f"{REQUEST} to be one string", f"{array.size}")
    try:
        text = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes().decode("utf-32-le")
    except UnicodeDecodeError:
        raise InvalidTensors.at("", f"{REQUEST} to be a string of Unicode", "half a surrogate, or nothing") from None
    return text.rstrip("\0").encode()


def encode(answer: Mapping[str, Any], request: Decoded) -> Encoded:
    """An answer as numpy.savez would write it: the memory of each array as it is.

    Errors: NotAcceptable for bfloat16, which npy files do not know.
    """
    tensors = dict(answer_tensors(answer))
    for name, tensor in tensors.items():
        if tensor.dtype.kind == "V":
            raise NotAcceptable.at("", "another media type than npz for bfloat16", f"{name} in bfloat16")
    files = [_text_file(AnswerText(answer, tensors)), *(_tensor_file(name, tensor) for name, tensor in tensors.items())]
    length = END + sum(PER_FILE + 2 * len(file.name) + len(file.header) + file.nbytes for file in files)
    if length <= WORTH_SENDING:
        return in_one(MEDIA_TYPE, _archive(files))
    return streamed(MEDIA_TYPE, _archive(files), length if length < ZIP64 else None)


class _NpyFile(NamedTuple):
    """An npy file to be written: its header, and `nbytes` bytes in chunks."""

    name: str
    header: bytes
    nbytes: int
    chunks: Iterator[Chunk]


def _tensor_file(name: str, tensor: np.ndarray) -> _NpyFile:
    header = npy.header_data_from_array_1_0(tensor) | {"fortran_order": False}  # some readers know no other
    return _NpyFile(name + SUFFIX, _npy_header(header), tensor.nbytes, memory(tensor))


def _text_file(text: AnswerText) -> _NpyFile:
    """The JSON text as NumPy's array of one string, with four bytes for each character."""
    length = sum(len(str(chunk, "utf-8")) for chunk in text)
    header = _npy_header({"descr": f"<U{length}", "fortran_order": False, "shape": ()})
    chunks = (part for chunk in text for part in sliced(str(chunk, "utf-8").encode("utf-32-le")))
    return _NpyFile(RESPONSE + SUFFIX, header, 4 * length, chunks)


def _npy_header(header: dict[str, Any]) -> bytes:
    stream = io.BytesIO()
    npy.write_array_header_1_0(stream, header)
    return stream.getvalue()


def _archive(files: list[_NpyFile]) -> Iterator[Chunk]:
    """A zip archive, in the chunks that zipfile writes."""
    written = _Written()
    with zipfile.ZipFile(cast(Any, written), "w", zipfile.ZIP_STORED) as archive:
        for name, header, _, chunks in files:
            with archive.open(zipfile.ZipInfo(name), "w", force_zip64=True) as file:
                file.write(header)
                for chunk in chunks:
                    file.write(chunk)
                    yield from written.take()
    yield from written.take()


class _Written:
    """A file for zipfile that cannot be rewound, and keeps what is written until it is taken."""

    def __init__(self) -> None:
        self._chunks: list[Chunk] = []

    def write(self, data: Chunk) -> int:
        self._chunks.append(data)
        return len(data)

    def flush(self) -> None:
        """Nothing is held back."""

    def take(self) -> list[Chunk]:
        """The chunks written since the last time."""
        chunks, self._chunks = self._chunks, []
        return chunks
