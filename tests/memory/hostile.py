"""Bodies that need far more memory than their length, each decoded in a separate process, as in `measure`."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from attention_service.attention.cost import Memory
from attention_service.codecs.base import Codec
from attention_service.codecs.decoded import Body
from attention_service.codecs.oip import grpc as oip_grpc
from attention_service.codecs.oip import http as oip
from attention_service.codecs.table import CODECS
from attention_service.errors import ServiceError
from attention_service.runtime.memory import reuse_memory
from tests.attack.corpus import FOR_MODEL, elements
from tests.helpers.wire import JSON, NPZ, SAFETENSORS
from tests.memory.measure import LIMIT, measure_in_child

N = 4 * 2**20
INFERENCE, GRPC = "inference", "grpc"


def repeated(item: str, last: str = "", count: int = 0) -> Callable[[], bytes]:
    """A JSON list of `count` times the item, or of as many as fit into N bytes, with `last` at the end."""
    return lambda: f'{{"a": [{f"{item}," * (count or N // len(item.encode()))}{last or item}]}}'.encode()


def encoded(body: Callable[[], str]) -> Callable[[], bytes]:
    return lambda: body().encode()


def nested() -> bytes:
    inner = ",".join(["{}"] * 200)
    for _ in range(2):
        inner = ",".join([f'{{"a":[{inner}]}}'] * 100)
    return f'{{"a":[{inner}]}}'.encode()


def keys() -> bytes:
    fields = ",".join(f'"{i}":0' for i in range(200))
    return f'{{"a":[{",".join([f"{{{fields}}}"] * 190)}]}}'.encode()


def archive(method: int, **members: Any) -> Callable[[], bytes]:
    def make() -> bytes:
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w", method) as file:
            for name, array in members.items():
                with file.open(f"{name}.npy", "w") as member:
                    np.save(member, array)
        return stream.getvalue()

    return make


def tensors(header: dict[str, Any], data: int = 0) -> Callable[[], bytes]:
    def make() -> bytes:
        encoded = json.dumps(header).encode()
        return len(encoded).to_bytes(8, "little") + encoded + bytes(data)

    return make


def inference(tail: bytes, **entry: Any) -> Callable[[], bytes]:
    """A request of the protocol with one input; the first eight bytes are the length of its JSON."""

    def make() -> bytes:
        binary = {"parameters": {"binary_data_size": len(tail)}} if tail else {}
        encoded = json.dumps({"inputs": [{"name": "query_tokens", "shape": [1]} | entry | binary]}).encode()
        return len(encoded).to_bytes(8, "little") + encoded + tail

    return make


TEXT = np.array(repeated("1", "x", 2**19)().decode())


def escaped() -> bytes:
    """A request of strings whose datatype is not found by its letters."""
    body = inference(SHORT_STRING * 2**19, datatype="BYTES", shape=[2**19])()
    text = body[8:].replace(b"BYTES", b"\\u0042YTES", 1)
    return (int.from_bytes(body[:8], "little") + 5).to_bytes(8, "little") + text


SHORT_STRING = b"\2\0\0\0\xc3\xa9"
BODIES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "small integers": (JSON, repeated("1")),
    "small integers, then null": (JSON, repeated("0", "null")),
    "integers, then null": (JSON, repeated("257", "null")),
    "fractions, then ragged": (JSON, repeated("0.5", "[1]")),
    "rows of one": (JSON, repeated("[1]")),
    "booleans": (JSON, repeated("[true]")),
    "strings": (JSON, repeated('"\u0100"')),
    "strings of ASCII": (JSON, repeated('"ab"')),
    "empty lists": (JSON, repeated("[]", "1", 2**19 - 10)),
    "lists in lists": (JSON, repeated("[[]]", "1", 2**18 - 10)),
    "more lists than the limit": (JSON, repeated("[]", "1", 2**20)),
    "objects": (JSON, repeated('{"":0}', "1", 2**17 - 10)),
    "objects in objects": (JSON, nested),
    "keys": (JSON, keys),
    "a string": (JSON, encoded(lambda: f'{{"a": "{"x" * N}"}}')),
    "a string with one wide character": (JSON, encoded(lambda: f'{{"a": "{"x" * N}\U0001f600"}}')),
    "a string with one wide character escaped": (JSON, encoded(lambda: f'{{"a": "{"x" * N}\\ud83d\\ude00"}}')),
    "a wide string in a list": (JSON, encoded(lambda: f'{{"a": ["{"x" * N}\U0001f600"]}}')),
    "a hidden list": (JSON, encoded(lambda: f'{{"query": [{"1," * (N // 2)}1], "key": [1, [2]]}}')),
    "an escaped bracket": (JSON, encoded(lambda: f'{{"x": "\\u005b", "query": [{"[1,1]," * (N // 6)}[1,1]]}}')),
    "no JSON at the end": (JSON, repeated("257", "x")),
    "no JSON after strings": (JSON, repeated('"\u0100"', "x")),
    "long numbers": (JSON, repeated("12345678901234567890.5e280")),
    "long numbers and a string": (JSON, repeated("1.234567890123456789e-300", json.dumps("4e" * (N // 2)), 2**12)),
    "a long number": (JSON, encoded(lambda: f'{{"a": 1{"0" * N}}}')),
    "spaces": (JSON, encoded(lambda: " " * N)),
    "not UTF-8": (JSON, lambda: b"\xff" * N),
    "stored": (NPZ, archive(zipfile.ZIP_STORED, query=np.ones(N // 8), key=np.ones(N, np.bool_))),
    "big-endian": (NPZ, archive(zipfile.ZIP_STORED, query=np.ones(N // 8, ">f8"))),
    "deflated": (NPZ, archive(zipfile.ZIP_DEFLATED, query=np.ones(4 * N // 8), key=np.ones(N // 8))),
    "deflated and big-endian": (NPZ, archive(zipfile.ZIP_DEFLATED, query=np.ones(4 * N // 8, ">f8"))),
    "a deflated text": (NPZ, archive(zipfile.ZIP_DEFLATED, query=np.arange(N // 8), request=TEXT)),
    "many members": (NPZ, archive(zipfile.ZIP_STORED, **{f"{i}": np.ones(1) for i in range(3000)})),
    "no archive": (NPZ, lambda: b"PK" * (N // 2)),
    "a header of lists": (SAFETENSORS, tensors({"a": [[]] * 2**18})),
    "a header of numbers": (SAFETENSORS, tensors({"a": [257] * (N // 5)})),
    "a text of lists": (SAFETENSORS, tensors({"__metadata__": {"request": repeated("[]", "1", 2**19)().decode()}})),
    "a header that is no JSON": (SAFETENSORS, tensors({"a": "x" * N})),
    "strings in bytes": (INFERENCE, inference(SHORT_STRING * 2**19, datatype="BYTES", shape=[2**19])),
    "strings in bytes, by an escaped name": (INFERENCE, escaped),
    "more strings than the limit": (INFERENCE, inference(SHORT_STRING * 2**20, datatype="BYTES", shape=[2**20])),
    "numbers in lists": (INFERENCE, inference(b"", datatype="FP32", shape=[N // 3], data=[1] * (N // 3), name="query")),
    "numbers across words": (INFERENCE, inference(bytes(N), datatype="FP64", shape=[N // 8], name="query")),
    "typed integers": (GRPC, lambda: FOR_MODEL + elements("INT64", N, 3, b"\1" * N)),
    "typed strings": (GRPC, lambda: FOR_MODEL + elements("BYTES", N // 4, 0, b"\x42\2\xc3\xa9" * (N // 4))),
    "raw": (GRPC, lambda: FOR_MODEL + b"\x3a\x80\x80\x80\x02" + bytes(N)),
}  # fmt: skip


def decode(kind: str, bodies: list[np.ndarray]) -> Memory:
    """Decode a body, ignore a ServiceError, and return its estimate (`decode`) and bound (`results`)."""
    body: Body = bodies.pop().data
    kept: Any = None
    try:
        if kind == INFERENCE:
            head = int.from_bytes(body[:8], "little")
            body = body[8:]
            codec: Codec = oip.HTTPCodec(head)
        elif kind == GRPC:
            body = bytes(body)
            codec = oip_grpc.GRPCCodec(body)
        else:
            codec = CODECS[kind]
        expected, bound = codec.decode_bytes(body, LIMIT), codec.decode_bound(len(body), LIMIT)
        kept = codec.decode(body, LIMIT)
    except ServiceError:
        pass
    del kept
    return Memory(expected, 0, 0, 0, 0)._replace(results=bound)


def main() -> None:
    """Print a line of JSON for each body."""
    reuse_memory()
    for kind, body in (JSON, b'{"a": [1, null], "b": [[0.5]]}'), (NPZ, archive(zipfile.ZIP_DEFLATED, a=np.ones(3))()):
        CODECS[kind].decode(np.frombuffer(bytearray(body), np.uint8).data, LIMIT)
    for name, (kind, make) in BODIES.items():
        body = make()
        bodies = [np.frombuffer(body, np.uint8).copy()]
        del body
        found = measure_in_child(partial(decode, kind, bodies), bodies[0].nbytes)
        print(json.dumps({"name": name} | found), flush=True)


if __name__ == "__main__":
    main()
