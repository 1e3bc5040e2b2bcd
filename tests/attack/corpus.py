"""Seeds for fuzzing: valid bodies of every format, and hostile bodies that are known to break parsers."""

from __future__ import annotations

import io
import json
import struct
import zipfile
from collections.abc import Callable
from typing import Any, Final

import ml_dtypes
import numpy as np

from attention_service.codecs.base import Codec
from attention_service.codecs.decoded import Body, Decoded
from attention_service.codecs.json import JSONCodec
from attention_service.codecs.oip import grpc as oip_grpc
from attention_service.codecs.oip import http as oip
from attention_service.codecs.oip.fields import OUTPUTS
from attention_service.codecs.table import CODECS
from tests.cases import CASES
from tests.helpers import oip as requests_of_protocol
from tests.helpers.messages import request as message_of
from tests.helpers.wire import JSON, MEDIA_TYPES, NPZ, SAFETENSORS, typed_array, write
from tests.test_binary_codecs import GOOD_NPY, LIES, TENSOR_LIES, archive, entry, tensors

# Bytes of a large body.
LARGE: Final = 2**23
DTYPES: Final = (np.bool_, np.int32, np.int64, np.float16, np.float32, np.float64, ml_dtypes.bfloat16)
OPTIONS: Final[dict[str, Any]] = {
    "is_causal": True,
    "query_offset": 0,
    "window": {"left": 1},
    "include": ["scores", "logsumexp"],
    "top_k": 1,
    "scale": -0.5e-3,
    "query_tokens": ["a", "\u00e9[", "\\"],
    "segment_ids": {"query": [1, 2], "key": [1, 1]},
    "rotary": {"base": 1e4, "interleaved": True},
    "projection": {"query": {"weight": [[1, 2], [3, 4]], "bias": [0.5, 1]}, "output": {"kernel": [[1], [2]]}},
}
# The Open Inference Protocol, which has no media type of its own, over HTTP and over gRPC.
OIP: Final = "oip"
GRPC: Final = "grpc"
# Stands for a request without the header that gives the length of its JSON.
NO_HEAD: Final = 2**64 - 1
# The field of a message that names the model.
FOR_MODEL: Final = b"\x0a\x09attention"
ANSWER: Final[dict[str, Any]] = {
    **{name: np.ones((2, 2), np.float32) for name in OUTPUTS if "." not in name},
    "top_weights": {"indices": np.zeros((2, 1), np.int64), "values": np.ones((2, 1))},
    "metadata": {"scale": 1.0, "warnings": []},
}


def decode_and_encode_inference(body: Body, limit: int) -> Decoded:
    """Decodes a request of the protocol (eight bytes stand for its header) and encodes a response in its form."""
    head = int.from_bytes(body[:8], "little")
    codec = oip.HTTPCodec(None if head == NO_HEAD else head)
    decoded = codec.decode(body[8:], limit)
    encoded = codec.encode(ANSWER, decoded)
    headers, length = dict(encoded.headers), sum(map(len, encoded.chunks))
    assert int(headers.get(oip.HEADER, 0)) <= length
    assert int(headers.get(b"content-length", length)) == length
    return decoded


def decode_and_encode_message(body: Body, limit: int) -> Decoded:
    """Decodes a gRPC message, and encodes a response in its form."""
    codec = oip_grpc.GRPCCodec(FOR_MODEL + bytes(body))
    decoded = codec.decode(body, limit)
    assert codec.encode(ANSWER, decoded).chunks
    return decoded


class Target(JSONCodec):
    """A codec whose `decode` is another function."""

    def __init__(self, function: Callable[[Body, int], Decoded]) -> None:
        self._function = function

    def decode(self, body: Body, limit: int) -> Decoded:
        return self._function(body, limit)


# Every codec, by its media type or protocol.
TARGETS: Final[dict[str, Codec]] = CODECS | {
    OIP: Target(decode_and_encode_inference),
    GRPC: Target(decode_and_encode_message),
}


def request_fields() -> list[dict[str, Any]]:
    """Fields of valid requests: all golden cases, and one request for each dtype."""
    found = [case.request for case in CASES]
    for dtype in DTYPES:
        array = np.array([[1, 0], [0, 1]], dtype)
        found.append(OPTIONS | {"query": array, "past_key": np.zeros((1, 0, 2), dtype), "mask": array.astype(bool)})
    return found


def seeds(media_type: str) -> list[bytes]:
    """Valid bodies of a format."""
    if media_type == OIP:
        return [*inference_seeds(), inference({"inputs": [labels("query_tokens", 2)]}, b"\1\0\0\0a\2\0\0\0\xc3\xa9")]
    if media_type == GRPC:
        return message_seeds()
    assert media_type in MEDIA_TYPES, f"write {media_type} in tests/helpers/wire.py"
    found = []
    for fields in request_fields():
        bfloat16 = any(isinstance(value, np.ndarray) and value.dtype.kind == "V" for value in fields.values())
        if media_type != JSON:
            if media_type != NPZ or not bfloat16:
                found.append(write(fields, media_type))
            continue
        plain = {name: value.tolist() if _is_array(value) else value for name, value in fields.items()}
        typed = {name: typed_array(value) if _is_array(value) else value for name, value in fields.items()}
        found += [json.dumps(plain).encode(), json.dumps(typed, ensure_ascii=False).encode()]
    if media_type == NPZ:
        found += [deflated(query=GOOD_NPY, request=npy_file(np.frombuffer(b"{}", np.uint8)))]
    return found


def inference_seeds() -> list[bytes]:
    """The same requests in the protocol: binary, as flat JSON, and as nested JSON."""
    found = []
    for fields in request_fields():
        empty = fields.get("past_key")  # which stays an array, as JSON has no types
        for binary, nested in ((True, False), (False, False), (False, True)):
            content, headers = requests_of_protocol.request_of(fields, binary, nested and empty is None)
            head = int(headers.get(requests_of_protocol.HEADER, NO_HEAD))
            found.append(head.to_bytes(8, "little") + content)
    return found


def message_seeds() -> list[bytes]:
    """The same requests as gRPC messages, with raw tensors and, if their dtype has a typed field, with typed ones."""
    found = []
    for fields in request_fields():
        arrays, options = requests_of_protocol.arrays_of(fields)
        halves = any(array.dtype.itemsize == 2 for array in arrays.values())
        found.append(message_of(arrays, options).SerializeToString())
        if not halves:
            found.append(message_of(arrays, options, raw=False).SerializeToString())
    return found


def inference(request: Any, tail: bytes = b"", head: int | None = None) -> bytes:
    """A request of the protocol: length of the JSON (`head` replaces it), JSON, and `tail`, the bytes after it."""
    text = request if isinstance(request, bytes) else json.dumps(request).encode()
    return (len(text) if head is None else head).to_bytes(8, "little") + text + tail


def labels(name: str, count: int, size: int = 11) -> dict[str, Any]:
    """An input with strings in binary form."""
    return {"name": name, "shape": [count], "datatype": "BYTES", "parameters": {"binary_data_size": size}}


def tensor_input(**more: Any) -> Callable[[], bytes]:
    """A request of the protocol with one binary input of two numbers; `more` replaces its fields."""
    tail = more.pop("tail", b"\0" * 8)
    entry = {"name": "query", "shape": [2], "datatype": "FP32", "parameters": {"binary_data_size": 8}} | more
    return lambda: inference({"inputs": [entry]}, tail)


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray)


def hostile_bodies(media_type: str) -> dict[str, Callable[[], bytes]]:
    """Hostile bodies of a format, by name; each is a function that makes the body, as some are large."""
    return HOSTILE[media_type]


def deflated(**members: bytes) -> bytes:
    """A compressed archive of npy files."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            file.writestr(f"{name}.npy", content)
    return stream.getvalue()


def npy_file(array: np.ndarray) -> bytes:
    """An npy file."""
    stream = io.BytesIO()
    np.lib.format.write_array(stream, array, allow_pickle=False)
    return stream.getvalue()


def overlapping(content: bytes, count: int, method: int = zipfile.ZIP_DEFLATED) -> bytes:
    """An archive whose directory has `count` members that all point to the same bytes."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as file:
        file.writestr("m000.npy", content)
        (info,) = file.infolist()
        for number in range(1, count):
            copy = zipfile.ZipInfo(f"m{number:03}.npy")
            for name in ("header_offset", "compress_size", "file_size", "CRC", "compress_type"):
                setattr(copy, name, getattr(info, name))
            file.filelist.append(copy)
    return stream.getvalue()


def bomb(size: int) -> bytes:
    """An npz of `size` bytes of zeros, which deflate compresses a thousand to one."""
    return deflated(query=npy_file(np.zeros(size // 8)))


def wrong_size(of: int) -> bytes:
    """An archive whose directory gives `of` as the size of a member of 8128 bytes."""
    good = deflated(query=npy_file(np.zeros(1000)))
    place = good.index(b"PK\1\2") + 24
    assert struct.unpack_from("<I", good, place) == (8128,)
    return good[:place] + struct.pack("<I", of) + good[place + 4 :]


def zip64(offset: int) -> bytes:
    """An archive whose zip64 record gives a wrong offset of the directory."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as file:
        file.writestr("query.npy", GOOD_NPY)
    content = stream.getvalue()
    end = content.index(b"PK\5\6")
    record = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, 1, 1, offset, offset)
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, end, 1)
    tail = content[end : end + 8] + b"\xff" * 12 + content[end + 20 :]
    return content[:end] + record + locator + tail


def dotted_name(count: int) -> bytes:
    """A safetensors body with one tensor whose name has `count` dots."""
    return tensors({"a" + ".a" * count: {"dtype": "F64", "shape": [0], "data_offsets": [0, 0]}})


def long_list(item: bytes, last: bytes = b"1", after: bytes = b"}") -> Callable[[], bytes]:
    """A JSON body whose query is an array of about 8 MB that repeats `item` and ends with `last`."""
    return lambda: b'{"query": [' + item * (LARGE // len(item)) + last + b"]" + after


def constant(body: bytes) -> Callable[[], bytes]:
    return lambda: body


def typed(dtype: str, shape: str, data: str) -> Callable[[], bytes]:
    """A typed array in JSON."""
    return lambda: f'{{"query": {{"dtype": {dtype}, "shape": [{shape}], "data": "{data}"}}}}'.encode()


STRINGS: Final = b'"' + b"a" * 2**20 + b'"' + b',""' * 2**20
ITEMS: Final = (
    b"1,",
    b"1.5,",
    b"[],",
    b"{},",
    b"[9],",
    b"[[1]],",
    b"[true],",
    b"null,",
    b'"ab",',
    b'"\xf0\x9f\x98\x80",',
)
HIDDEN: Final = b', "key": [1, [2]]}'
JSON_HOSTILE: Final[dict[str, Callable[[], bytes]]] = (
    {f"many {item.decode()}": long_list(item) for item in ITEMS}
    | {f"many {item.decode()} then ragged": long_list(item, b"[1, 2]") for item in ITEMS}
    | {f"many {item.decode()} then NaN": long_list(item, b"NaN") for item in ITEMS}
    | {f"many {item.decode()} beside a hidden array": long_list(item, item[:-1], HIDDEN) for item in ITEMS}
    | {
        "a long string among many": constant(b'{"mask": [' + STRINGS + b"]}"),
        "a long string among many booleans": constant(b'{"mask": [true,' + STRINGS + b"]}"),
        "100,000 brackets": constant(b"[" * 100_000),
        "100,000 brackets in a field": constant(b'{"query": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
        "100,000 objects": constant(b'{"a":' * 100_000),
        "1,000 nested objects": constant(b'{"a":' * 1000 + b"1" + b"}" * 1000),
        "32 levels of objects": constant(b'{"a":' * 32 + b"1" + b"}" * 32),
        "many keys": lambda: b"{" + b",".join(b'"%d":1' % number for number in range(500_000)) + b"}",
        "a key many times": lambda: b"{" + b'"query":1,' * 500_000 + b'"query":1}',
        "a key twice": constant(b'{"query": 1, "query": [[1]]}'),
        "a key of 8 MB": lambda: b'{"' + b"k" * LARGE + b'": 1}',
        "a string of 8 MB": lambda: b'{"dtype": "' + b"\\u00e9" * (LARGE // 6) + b'"}',
        "a number of 8 MB": lambda: b'{"scale": ' + b"9" * LARGE + b"}",
        "a fraction of 8 MB": lambda: b'{"scale": 0.' + b"9" * LARGE + b"}",
        "huge exponents": long_list(b"1e999,"),
        "a huge exponent of 8 MB": lambda: b'{"scale": 1e' + b"9" * LARGE + b"}",
        "many NaN": long_list(b"NaN,", b"NaN"),
        "NUL": constant(b'{"query": "\0"}'),
        "NUL in a key": constant(b'{"a\\u0000b": 1}'),
        "only NUL": constant(b"\0" * 1000),
        "byte-order mark": constant(b'\xef\xbb\xbf{"query": [[1]]}'),
        "UTF-16": constant('{"query": [[1]]}'.encode("utf-16")),
        "UTF-16 without mark": constant('{"query": [[1]]}'.encode("utf-16-le")),
        "UTF-32": constant('{"query": [[1]]}'.encode("utf-32-be")),
        "half a surrogate": constant(b'{"query": "\\ud800"}'),
        "8 MB of spaces": lambda: b" " * LARGE,
        "8 MB of 0xff": lambda: b"\xff" * LARGE,
        "typed array of a huge shape": typed('"float64"', "4294967296, 4294967296, 1", ""),
        "typed array of a huge shape of no elements": typed('"bool"', "0, 9223372036854775807", ""),
        "typed array with 8 MB of bad base64": typed('"bool"', "1", "=" * LARGE),
    }
)  # fmt: skip
NPZ_HOSTILE: Final[dict[str, Callable[[], bytes]]] = {
    "bomb below the limit": lambda: bomb(15 * 2**20),
    "bomb of the other byte order": lambda: deflated(query=npy_file(np.zeros(2**20, ">f8"))),
    "bomb of 1 GB": lambda: bomb(2**30),
    "200 members in one place": lambda: overlapping(npy_file(np.zeros(2**12)), 200),
    "200 stored members in one place": lambda: overlapping(npy_file(np.zeros(2**16)), 200, zipfile.ZIP_STORED),
    "200 members, 2 GB in one place": lambda: overlapping(npy_file(np.zeros(10 * 2**17)), 200),
    "60,000 members": lambda: archive(**{f"a{number}": b"" for number in range(60_000)}),
    "JSON text that is a bomb": lambda: deflated(request=npy_file(np.frombuffer(long_list(b"1,")(), np.uint8))),
    "a string that is a bomb": lambda: deflated(request=npy_file(np.array("[" * 2_000_000))),
    "archive in an archive": lambda: deflated(query=bomb(10 * 2**20)),
    "size 0 in the directory": lambda: wrong_size(0),
    "size 4 GB in the directory": lambda: wrong_size(2**32 - 2),
    "size too small by one": lambda: wrong_size(8127),
    "directory beyond the end": lambda: zip64(2**62),
    "directory beyond any end": lambda: zip64(2**64 - 1),
    "directory before the beginning": lambda: zip64(0),
    "a name of 60,000 dots": lambda: archive(**{"a" + ".a" * 30_000: GOOD_NPY}),
} | {
    f"lie: {name}": (content if callable(content) else constant(content)) for name, (content, _, _) in LIES.items()
}  # fmt: skip
SAFETENSORS_HOSTILE: Final[dict[str, Callable[[], bytes]]] = {
    "header of 2**63 bytes": constant(b"\xff" * 7 + b"\x7f" + b"{}"),
    "header of 2**64 bytes": constant(b"\xff" * 8 + b"{}"),
    "header of empty lists": lambda: tensors(long_list(b"[],")()[: LARGE - 100]),
    "header of numbers": lambda: tensors(b'{"query": [' + b"1.5," * (2**20) + b"1]}"),
    "header of brackets": lambda: tensors(b"[" * 1_000_000),
    "a name of 400,000 dots": lambda: dotted_name(400_000),
    "a name of 31 dots": lambda: dotted_name(31),
    "names twice": constant(tensors(b'{"query": {"dtype": "F64", "shape": [1], "data_offsets": [0, 8]}, '
                                 b'"query": {"dtype": "F64", "shape": [1], "data_offsets": [0, 8]}}', b"\0" * 8)),
    "JSON text of empty lists": lambda: tensors({"__metadata__": {"request": '{"bias": [' + "[]," * 10**6 + "1]}"}}),
    "1 TB of zeros that are missing": constant(tensors(entry(shape=[2**37], data_offsets=[0, 2**40]), b"\0" * 8)),
} | {f"lie: {name}": constant(content) for name, (content, _, _) in TENSOR_LIES.items()}  # fmt: skip


def json_input(data: bytes, **entry: Any) -> Callable[[], bytes]:
    """A request of the protocol whose input has this JSON text as its data."""
    text = json.dumps({"name": "query", "shape": [2], "datatype": "FP32"} | entry).encode()
    return lambda: inference(b'{"inputs": [' + text[:-1] + b', "data": ' + data + b"}]}", head=NO_HEAD)


OIP_HOSTILE: Final[dict[str, Callable[[], bytes]]] = (
    {f"JSON: {name}": lambda make=make: inference(make(), head=NO_HEAD) for name, make in JSON_HOSTILE.items()}
    | {
        "empty": constant(b""),
        "head beyond the end": lambda: inference({"inputs": []}, head=2**63),
        "head before the end": lambda: inference({"inputs": []}, head=3),
        "bytes that no input uses": lambda: inference({"inputs": []}, b"\0" * LARGE),
        "a size beyond the end": tensor_input(parameters={"binary_data_size": 2**62}),
        "a size below zero": tensor_input(parameters={"binary_data_size": -8}),
        "a size that is true": tensor_input(parameters={"binary_data_size": True}),
        "a huge shape": tensor_input(shape=[2**62, 2**62, 2**62]),
        "a huge shape of no elements": tensor_input(shape=[0, 2**63 - 1], parameters={"binary_data_size": 0}, tail=b""),
        "a shape of many axes": tensor_input(shape=[1] * 100_000 + [2]),
        "a name of many dots": tensor_input(name="a" + ".a" * 400_000),
        "an empty name": tensor_input(name=""),
        "a name of dots": tensor_input(name="..."),
        "booleans other than 0 and 1": tensor_input(datatype="BOOL", shape=[8]),
        "strings without an end": lambda: inference({"inputs": [labels("x", 1, 8)]}, b"\xff" * 8),
        "strings of no length": lambda: inference({"inputs": [labels("x", 0, 0) | {"shape": [2**59, 0]}]}),
        "many empty strings": lambda: inference({"inputs": [labels("x", LARGE // 4, LARGE)]}, b"\0" * LARGE),
        "many short strings": lambda: inference(
            {"inputs": [labels("x", LARGE // 6, LARGE // 6 * 6)]}, b"\2\0\0\0\xc3\xa9" * (LARGE // 6)
        ),
        "many inputs": lambda: inference({"inputs": [labels(f"x{i}", 0, 0) for i in range(100_000)]}),
        "an input twice": lambda: inference({"inputs": [labels("x", 0, 0)] * 2}),
        "many outputs": lambda: inference({"inputs": [], "outputs": [{"name": "output"}] * 100_000}),
        "many outputs that are null": lambda: inference({"inputs": [], "outputs": [None] * 100_000}),
        "many names in one": lambda: inference({"inputs": [], "parameters": {"include": "," * LARGE}}),
        "parameters of many dots": lambda: inference({"inputs": [], "parameters": {"a" + ".a" * 400_000: 1}}),
        "a long string among many": json_input(b"[" + STRINGS + b"]", shape=[2**20 + 1]),
        "a long string among many biases": json_input(b"[null," + STRINGS + b"]", name="bias", shape=[2**20 + 2]),
        "nested as a string": json_input(b"[" + STRINGS + b"]", datatype="BYTES", shape=[2**20 + 1, 1]),
        "a tree of nothing": json_input(b"[" + b"[[],[]]," * (LARGE // 8) + b"[]]", shape=[0]),
        "numbers that do not fit": json_input(b"[" + b"1e300," * (LARGE // 6) + b"1]", datatype="FP16"),
        "integers that do not fit": json_input(b"[" + b"300," * (LARGE // 4) + b"1]", datatype="UINT8"),
    }
)  # fmt: skip


def field(number: int, content: bytes) -> bytes:
    """A length-delimited field of a protobuf message: key, length, content."""
    length, size = [], len(content)
    while size > 0x7F:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([number << 3 | 2, *length, size]) + content


def elements(datatype: str, count: int, number: int, content: bytes) -> bytes:
    """A gRPC message with one input, whose elements are in field `number` of its contents."""
    message = message_of({"query": np.zeros((0,), np.float32)})
    del message.raw_input_contents[:]
    message.inputs[0].datatype = datatype
    message.inputs[0].shape[0] = count
    head: bytes = message.inputs[0].SerializeToString()
    return field(5, head + field(5, field(number, content) if number else content))


GRPC_HOSTILE: Final[dict[str, Callable[[], bytes]]] = {
    "empty": constant(b""),
    "many empty inputs": lambda: b"\x2a\0" * (LARGE // 2),
    "many empty outputs": lambda: b"\x32\0" * (LARGE // 2),
    "many empty parameters": lambda: b"\x22\0" * (LARGE // 2),
    "many empty raw tensors": lambda: b"\x3a\0" * (LARGE // 2),
    "many unknown fields": lambda: b"\x78\1" * (LARGE // 2),
    "600 empty inputs": lambda: b"\x2a\0" * 600,
    "groups in groups": lambda: b"\x0b" * LARGE,
    "groups in groups of an input": lambda: field(5, b"\x7b" * LARGE),
    "unknown fields of an input": lambda: field(5, b"\x78\1" * (LARGE // 2)),
    "parameters of an input": lambda: field(5, b"".join(field(4, field(1, b"%06d" % n)) for n in range(LARGE // 10))),
    "empty parameters of an input": lambda: field(5, b"\x22\0" * (LARGE // 2)),
    "repeated contents": lambda: field(5, b"\x2a\0" * (LARGE // 2)),
    "a shape of many axes": lambda: field(5, field(1, b"query") + field(2, b"FP32") + field(3, b"\1" * LARGE)),
    "a name of 8 MB": lambda: field(5, field(1, b"q" * LARGE) + field(2, b"FP32")),
    "a name of many dots": lambda: field(5, field(1, b"a" + b".a" * 400_000) + field(2, b"BOOL") + field(3, b"\0")),
    "a model of 8 MB": lambda: field(1, b"q" * LARGE),
    "an id of 8 MB": lambda: field(3, b"q" * LARGE),
    "a text of 8 MB that is not UTF-8": lambda: field(3, b"\xff" * LARGE),
    "names in one": lambda: field(4, field(1, b"include") + field(2, field(3, b"," * LARGE))),
    "8 MB that no input uses": lambda: field(7, b"\0" * LARGE),
    "a length beyond the end": constant(b"\x3a\xff\xff\xff\xff\x07"),
    "a length beyond any end": constant(b"\x3a" + b"\xff" * 9 + b"\1"),
    "a length of many bytes": lambda: b"\x3a" + b"\x80" * LARGE,
    "integers of a byte": lambda: elements("INT64", LARGE, 3, b"\1" * LARGE),
    "small integers of a byte": lambda: elements("INT8", LARGE, 2, b"\1" * LARGE),
    "integers that do not fit": lambda: elements("UINT8", LARGE // 2, 4, b"\x80\2" * (LARGE // 2)),
    "integers one by one": lambda: elements("INT64", LARGE // 2, 0, b"\x18\1" * (LARGE // 2)),
    "booleans": lambda: elements("BOOL", LARGE, 1, b"\1" * LARGE),
    "numbers": lambda: elements("FP64", LARGE // 8, 7, b"\0" * LARGE),
    "empty strings": lambda: elements("BYTES", LARGE // 2, 0, b"\x42\0" * (LARGE // 2)),
    "short strings": lambda: elements("BYTES", LARGE // 4, 0, b"\x42\2\xc3\xa9" * (LARGE // 4)),
    "strings that are not UTF-8": lambda: elements("BYTES", LARGE // 3, 0, b"\x42\1\xff" * (LARGE // 3)),
}  # fmt: skip
HOSTILE: Final = {
    JSON: JSON_HOSTILE,
    NPZ: NPZ_HOSTILE,
    SAFETENSORS: SAFETENSORS_HOSTILE,
    OIP: OIP_HOSTILE,
    GRPC: GRPC_HOSTILE,
}
