"""npz: a zip archive of npy files, as numpy.savez writes it. No pickle, ever.

Members that are stored, not compressed, are views of the body. Each member's size is held against its own header
before anything is made of it, and all of them against the limit before any is unpacked.
"""

from __future__ import annotations

import io
import math
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Mapping
from typing import Any, Final, cast

import numpy as np
from numpy.lib import format as npy

from service.codecs.decoded import Body, Decoded, Part
from service.codecs.members import MAX_MEMBERS, REQUEST, RESPONSE, booleans, flattened, nested, rest, too_many
from service.codecs.sizes import MAX_RANK, is_shape
from service.errors import BodyTooLarge, FieldConflict, InvalidTensors, NotAcceptable, TooLarge, child, quote

SUFFIX: Final = ".npy"
DTYPES: Final = tuple(np.dtype(kind) for kind in (np.bool_, np.int32, np.int64, np.float16, np.float32, np.float64))
# Of JSON that is longer than the body it was unpacked from: reading it takes many times its length.
MAX_TEXT: Final = 2**21
KINDS: Final = "bif"
# Of the header of an npy file; numpy's own take about 120 bytes.
MAX_HEADER: Final = 4096
LOCAL_HEADER: Final = struct.Struct("<4s22xHH")  # signature, length of the name, length of the extra field
ENCRYPTED: Final = 0x1


def decode(body: Body, limit: int) -> Decoded:
    """The fields of a request that unpacks to at most `limit` bytes.

    Errors: InvalidTensors, InvalidRequest, FieldConflict, BodyTooLarge, and those of the JSON text.
    """
    try:
        members = zipfile.ZipFile(io.BytesIO(body)).infolist()
    except (zipfile.BadZipFile, struct.error, ValueError, NotImplementedError, OSError) as error:
        raise InvalidTensors.at("", "a zip archive", quote(str(error), 80)) from None
    if len(members) > MAX_MEMBERS:
        raise too_many(len(members))
    unpacked = sum(member.file_size for member in members)
    if unpacked > max(limit, len(body)):
        raise BodyTooLarge.at("", f"at most {limit} bytes when unpacked", f"{unpacked}")
    tensors: dict[str, np.ndarray] = {}
    request = None
    for member in members:
        name = member.filename.removesuffix(SUFFIX)
        content = _content(member, body)
        if name == REQUEST and request is None:
            request = _text(_array(content, name, text=True), max(len(body), MAX_TEXT))
        elif name in tensors or name == REQUEST:
            raise FieldConflict.at(child("", name), "each member once", "the same name again")
        else:
            tensors[name] = _array(content, name)
    return nested(tensors, request)


def encode(answer: Mapping[str, Any], *, base64: bool = False) -> list[Part]:
    """An answer as numpy.savez would write it, in parts: the memory of each array as it is.

    Errors: NotAcceptable for bfloat16, which npy files do not know.
    """
    sink = _Parts()
    with zipfile.ZipFile(cast(Any, sink), "w", zipfile.ZIP_STORED) as archive:
        for name, tensor in [(RESPONSE, np.array(rest(answer).decode())), *flattened(answer)]:
            if tensor.dtype.kind == "V":
                raise NotAcceptable.at("", "another media type than npz for bfloat16", f"{name} in bfloat16")
            flat = np.asarray(tensor, order="C")
            header = io.BytesIO()
            npy.write_array_header_1_0(header, npy.header_data_from_array_1_0(flat))
            with archive.open(zipfile.ZipInfo(name + SUFFIX), "w", force_zip64=True) as member:
                member.write(header.getvalue())
                member.write(flat.reshape(-1).view(np.uint8).data)
    return sink.parts


class _Parts:
    """A file for zipfile that keeps what is written as it is, and cannot be rewound."""

    def __init__(self) -> None:
        self.parts: list[Part] = []

    def write(self, data: bytes | memoryview) -> int:
        self.parts.append(data)
        return len(data)

    def flush(self) -> None:
        """Nothing is held back."""


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
    if len(content) != member.file_size or zlib.crc32(content) != member.CRC:
        raise InvalidTensors.at("", f"{member.file_size} bytes of {name} with their checksum", "others")
    return content


def _inflated(packed: memoryview, member: zipfile.ZipInfo) -> memoryview:
    """No more than the member's own size is ever unpacked."""
    try:
        return memoryview(zlib.decompressobj(-15).decompress(packed, member.file_size + 1))
    except zlib.error as error:
        raise InvalidTensors.at("", f"{quote(member.filename)} deflated", quote(str(error), 80)) from None


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
    return flat.reshape(sizes, order="F" if fortran else "C").astype(_native(dtype), copy=False)


def _native(dtype: np.dtype) -> np.dtype:
    return dtype.newbyteorder("=")


def _text(array: np.ndarray, limit: int) -> bytes:
    """The JSON text: one string, or its bytes. Errors: InvalidTensors, TooLarge."""
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
