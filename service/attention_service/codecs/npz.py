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
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import IO, Any, Final, NamedTuple, cast

import numpy as np
from numpy.lib import format as npy

from attention_service.codecs.base import Codec
from attention_service.codecs.chunks import Chunk, Encoded, array_chunks, encoded
from attention_service.codecs.decoded import Body, Decoded
from attention_service.codecs.element_types import NPZ_TYPES
from attention_service.codecs.json.memory import decode_bound
from attention_service.codecs.json.writer import chunks
from attention_service.codecs.named_tensors import (
    MAX_TEXT,
    REQUEST,
    RESPONSE,
    check_count,
    check_not_lfs,
    elements,
    request_fields,
    split_answer,
    whole_words,
)
from attention_service.codecs.shapes import BESIDE_0, MAX_RANK, shape_as_given, shape_of
from attention_service.errors import (
    BodyTooLarge,
    FieldConflict,
    InvalidTensors,
    NotAcceptable,
    ServiceError,
    TooLarge,
    child,
    quote,
)

SUFFIX: Final = ".npy"
# NumPy writes bfloat16 as two bytes of no type (<V2), which could be anything.
BY_SAFETENSORS: Final = "npz has no bfloat16; use application/vnd.safetensors, or another dtype"
# Types of float8 as one such byte, or as <f1, which NumPy itself cannot read.
NO_FLOAT8: Final = "npz has no float8; codes are arguments of a call, in application/vnd.safetensors"
# The same types in both byte orders, as they are read, and what they become.
NATIVE: Final = {dtype: dtype for dtype in NPZ_TYPES} | {dtype.newbyteorder("S"): dtype for dtype in NPZ_TYPES}
# The JSON text may have at most TEXT + TEXT_GROWTH · length of the body bytes, as reading it takes many times its
# length of memory.
TEXT: Final = 2**16
TEXT_GROWTH: Final = 16
# Of a string that is a field of its own, like the name of a layout.
MAX_STRING: Final = 256
# Folder of what macOS adds to archives.
OF_MACOS: Final = "__MACOSX/"
# Bytes of the directory: some ten times what MAX_TENSORS need.
MAX_DIRECTORY: Final = 2**18
DIRECTORY_GROWTH: Final = 20
# Bytes that are unpacked at once: zipfile asks the body for as many, see _Stream.
READ: Final = MAX_DIRECTORY
# Bytes of an entry of the directory, at least, and how it begins.
ENTRY: Final = 46
ENTRY_START: Final = b"PK\1\2"
# Deflate packs at most so many bytes into one.
DEFLATE: Final = 1032
# A string of NumPy, with four bytes for each character, is read by way of bytes and a string of Python.
TEXT_COPIES: Final = 9
# Bytes of an answer whose checksums take some milliseconds.
MEASURED: Final = 2**22
# Of the header of an npy file; numpy's own take about 120 bytes.
MAX_HEADER: Final = 4096
# What zipfile raises for an archive or a file in it that is damaged, encrypted, or packed in another way.
DAMAGED: Final = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, RuntimeError, ValueError)
# What NumPy raises for the header of an npy file that is none.
NO_HEADER: Final = (ValueError, LookupError, TypeError, SyntaxError, RecursionError, MemoryError, tokenize.TokenError)


class NPZCodec(Codec):
    """Tensors under dotted names, all other fields as JSON text in a tensor of its own."""

    media_type = "application/x-npz"
    decode_inline = 2**14
    may_be_compressed = True
    encode_inline = MEASURED

    def decode(self, body: Body, limit: int) -> Decoded:
        """The fields of a request that unpacks to at most `limit` bytes.

        Errors: InvalidTensors, InvalidRequest, FieldConflict, BodyTooLarge, and those of the JSON text.
        """
        stream = _Stream(body)
        archive = _open(stream)
        unpacked = sum(file.file_size for file in archive.infolist())
        if unpacked > max(limit, len(body)):
            raise BodyTooLarge.at("", f"at most {limit} bytes when unpacked", f"{unpacked}", BodyTooLarge.ways_out)
        tensors: dict[str, np.ndarray | str] = {}
        text = None
        for file in archive.infolist():
            if file.filename.endswith("/") or file.filename.startswith(OF_MACOS):  # is_dir fails for an empty name
                continue
            name = file.filename.removeprefix("./").removesuffix(SUFFIX)
            content = _content(archive, file, stream)
            if name == REQUEST and text is None:
                text = _text(_parse(content, name), name, _max_text(len(body)))
            elif name in tensors or name == REQUEST:
                raise FieldConflict.at(child("", name), "each tensor once", "the same name again")
            else:
                tensors[name] = _value(_parse(content, name), name)
        return request_fields(tensors, text)

    def decode_bound(self, length: int, limit: int) -> int:
        """Upper bound of the memory for decoding any body of `length` bytes that unpacks to at most `limit`."""
        directory = DIRECTORY_GROWTH * min(length, MAX_DIRECTORY)
        return length + min(DEFLATE * length, max(limit, length)) + _text_bytes(_max_text(length)) + directory

    def decode_bytes(self, body: Body, limit: int) -> int:
        """A closer upper bound, by the sizes in the directory."""
        memory = len(body) + DIRECTORY_GROWTH * min(len(body), MAX_DIRECTORY)
        try:
            files = _open(_Stream(body)).infolist()
        except ServiceError:
            return memory  # nothing is made of it
        for file in files:
            memory += file.file_size
            if file.filename.removeprefix("./").removesuffix(SUFFIX) == REQUEST:
                memory += _text_bytes(min(file.file_size, _max_text(len(body))))
        return min(memory, self.decode_bound(len(body), limit))

    def encode(self, answer: Mapping[str, Any], request: Decoded) -> Encoded:
        """The answer as numpy.savez would write it: the memory of each array as it is.

        Errors: NotAcceptable for bfloat16, which npy files do not know.
        """
        tensors, fields = split_answer(answer)
        for name, tensor in tensors.items():
            if tensor.dtype.kind == "V":
                raise NotAcceptable.at(
                    "", "another media type than npz for bfloat16", f"{name} in bfloat16", BY_SAFETENSORS
                )
        files = [_File(name, partial(_tensor_file, tensor)) for name, tensor in tensors.items()]
        files.append(_File(RESPONSE, partial(_text_file, fields)))
        return encoded(self.media_type, _archive(files))


def _text_bytes(text: int) -> int:
    return TEXT_COPIES * text + decode_bound(text)


def _max_text(length: int) -> int:
    return min(MAX_TEXT, TEXT + TEXT_GROWTH * length)


class _Stream:
    """A body as the file that zipfile reads, without a copy.

    zipfile reads the directory in one piece, so longer reads are refused, and so are more entries than tensors: of each
    it would make an object. has_directory: True once zipfile has the directory

    Errors: InvalidRequest.
    """

    def __init__(self, body: Body) -> None:
        self.view = memoryview(body)
        self.has_directory = False
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
        read = bytes(content)
        if not self.has_directory:
            check_count(read.count(ENTRY_START))
        return read


def _open(stream: _Stream) -> zipfile.ZipFile:
    """The archive in a body. Errors: InvalidTensors, InvalidRequest for too many files."""
    try:
        archive = zipfile.ZipFile(cast(Any, stream))
    except DAMAGED as error:
        check_not_lfs(stream.view)
        raise InvalidTensors.at("", "a zip archive", quote(str(error), 80)) from None
    stream.has_directory = True
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
    content = np.empty(size, np.uint8).data
    at = 0
    while part := unpacked.read(READ):
        content[at : at + len(part)] = part
        at += len(part)
    return content[:at]


class _NpyFile(NamedTuple):
    """The header of an npy file, and the bytes after it."""

    shape: tuple[int, ...]
    fortran_order: bool
    dtype: np.dtype
    data: memoryview


def _parse(content: memoryview, name: str) -> _NpyFile:
    """The parts of an npy file, checked against each other. Errors: InvalidTensors."""
    start = io.BytesIO(content[: MAX_HEADER + 16])
    try:
        version = npy.read_magic(start)
        read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}[version]
        shape, fortran_order, dtype = read(start, max_header_size=MAX_HEADER)
    except NO_HEADER:
        hint = NO_FLOAT8 if b"'<f1'" in start.getvalue()[:MAX_HEADER] else ""
        raise InvalidTensors.at("", f"{quote(name)} to be an npy file", "something else", hint) from None
    is_text = dtype.kind in "SU" and dtype.itemsize > 0
    if name == REQUEST:
        expected, known = "a string, or bytes", dtype == np.uint8 or is_text
    else:
        expected, known = f"{', '.join(kind.name for kind in NPZ_TYPES)}, or one string", dtype in NATIVE or is_text
    if not known:
        hints = {"|V1": NO_FLOAT8, "|V2": BY_SAFETENSORS} if name != REQUEST else {}
        raise InvalidTensors.at("", f"{quote(name)} to be of {expected}", quote(dtype.str), hints.get(dtype.str, ""))
    if shape_of(shape) is None:
        raise InvalidTensors.at("", f"at most {MAX_RANK} axes of {quote(name)}{BESIDE_0}", shape_as_given(shape))
    data = content[start.tell() :]
    needed = math.prod(shape) * dtype.itemsize
    if len(data) != needed:
        raise InvalidTensors.at("", f"{needed} bytes of {quote(name)}, as its header says", f"{len(data)}")
    return _NpyFile(shape, fortran_order, dtype, data)


def _value(file: _NpyFile, name: str) -> np.ndarray | str:
    """The array of an npy file, in the byte order of the machine, or its string. Errors: InvalidTensors, TooLarge."""
    if file.dtype.kind in "SU":
        return _text(file, name, MAX_STRING).decode()
    native = NATIVE[file.dtype]
    flat = elements(file.data, file.dtype, name)
    if file.dtype != native and flat.flags.writeable:  # it was unpacked here
        flat = flat.byteswap(inplace=True).view(native)
    return whole_words(flat.astype(native, copy=False)).reshape(file.shape, order="F" if file.fortran_order else "C")


def _text(file: _NpyFile, name: str, limit: int) -> bytes:
    """The text in an npy file, in UTF-8: one string, or its bytes. Errors: InvalidTensors, TooLarge."""
    length = len(file.data) // 4 if file.dtype.kind == "U" else len(file.data)
    if length <= limit:
        text = bytes(file.data) if file.dtype == np.uint8 else _string(file, name).encode()
        length = len(text)
    if length > limit:
        raise TooLarge.at("", f"{quote(name)} of at most {limit} bytes when unpacked", str(length))
    return text


def _string(file: _NpyFile, name: str) -> str:
    """The string of an npy file that holds one. Errors: InvalidTensors."""
    if (count := math.prod(file.shape)) != 1:
        raise InvalidTensors.at("", f"{quote(name)} to be one string", f"{count}")
    wide = "utf-32-be" if file.dtype.byteorder == ">" else "utf-32-le"
    try:
        return str(file.data, wide if file.dtype.kind == "U" else "utf-8").rstrip("\0")
    except UnicodeDecodeError:
        got = "half a surrogate, or other bytes"
        raise InvalidTensors.at("", f"{quote(name)} to be a string of Unicode", got) from None


def _tensor_file(tensor: np.ndarray) -> Iterator[Chunk]:
    """An array as an npy file."""
    yield _npy_header(npy.header_data_from_array_1_0(tensor) | {"fortran_order": False})  # some readers know no other
    yield from array_chunks(tensor)


def _text_file(fields: Mapping[str, Any]) -> Iterator[Chunk]:
    """The JSON of fields as an npy file of its bytes: few readers but NumPy know strings."""
    length = sum(map(len, chunks(fields)))
    yield _npy_header({"descr": "|u1", "fortran_order": False, "shape": (length,)})
    yield from chunks(fields)


def _npy_header(header: dict[str, Any]) -> bytes:
    stream = io.BytesIO()
    npy.write_array_header_1_0(stream, header)
    return stream.getvalue()


class _File(zipfile.ZipInfo):
    """A file of an archive, whose header has the size and the checksum of the content.

    zipfile itself writes both behind the content if it cannot go back. Readers that begin at the first byte, such as
    Java's ZipInputStream, refuse such a file: without compression they cannot tell where it ends.

    make: makes the chunks of the content, here to measure them, and again to write them
    """

    def __init__(self, name: str, make: Callable[[], Iterator[Chunk]]) -> None:
        super().__init__(name + SUFFIX)
        self.make = make
        self.checksum = 0
        for chunk in make():
            self.file_size += len(chunk)
            self.checksum = zlib.crc32(chunk, self.checksum)

    def FileHeader(self, zip64: bool | None = None) -> bytes:  # noqa: N802  # zipfile's name
        self.CRC, self.compress_size = self.checksum, self.file_size
        return super().FileHeader(zip64)


def _archive(files: Sequence[_File]) -> Iterator[Chunk]:
    """A zip archive, in the chunks that zipfile writes."""
    written = _Written()
    with zipfile.ZipFile(cast(Any, written), "w", zipfile.ZIP_STORED) as archive:
        for file in files:
            with archive.open(file, "w") as content:
                for chunk in file.make():
                    content.write(chunk)
                    yield from written.taken()
    yield from written.taken()


class _Written:
    """The file that zipfile writes to, as chunks.

    After each content zipfile goes back, and writes the header again. That is dropped: it was right the first time.
    """

    def __init__(self) -> None:
        self._chunks: list[Chunk] = []
        self._at = self._end = 0

    def tell(self) -> int:
        """Where the next bytes go."""
        return self._at

    def seek(self, offset: int) -> None:
        """Go to an offset."""
        self._at = offset

    def write(self, data: Chunk) -> int:
        if self._at == self._end:
            self._chunks.append(data)
            self._end += len(data)
        self._at += len(data)
        return len(data)

    def flush(self) -> None:
        """Nothing is held back."""

    def taken(self) -> list[Chunk]:
        """The chunks since the last call."""
        chunks, self._chunks = self._chunks, []
        return chunks
