"""npz and safetensors: the codecs read what the formats' own libraries write, and the libraries read our responses."""

from __future__ import annotations

import io
import json
import struct
import zipfile
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from typing import Any

import httpx
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from attention_service.codecs.named_tensors import plain_fields
from attention_service.codecs.table import CODECS
from attention_service.errors import InvalidRequest, ServiceError, TooLarge
from tests.cases import CASES, Case
from tests.conftest import app, serving
from tests.helpers.covering import in_turn
from tests.helpers.wire import JSON, MEDIA_TYPES, NO_OPTIONS, NPZ, SAFETENSORS, read, split, write

EYE = np.eye(2)
LIMIT = 10**6


def post(client: httpx.Client, content: bytes, media_type: str, accept: str | None = None) -> httpx.Response:
    headers = {"Content-Type": media_type} | ({"Accept": accept} if accept else {})
    return client.post("/attention", content=content, headers=headers)


# Formats of responses and requests, each with each but JSON with JSON, which `test_golden_cases.py` has.
FORMATS = list(product(MEDIA_TYPES, MEDIA_TYPES))[1:]
SENT = in_turn(CASES, FORMATS) + in_turn(CASES, FORMATS[1:] + FORMATS[:1])


def test_every_case_is_sent_in_two_formats_and_every_two_formats_meet() -> None:
    sent = [one.values for one in SENT]
    assert {formats for _, formats in sent} == {*product(MEDIA_TYPES, MEDIA_TYPES)} - {(JSON, JSON)}
    for case in CASES:
        assert len({media_type for other, (_, media_type) in sent if other is case}) == 2, case.name


@pytest.mark.parametrize(("case", "formats"), SENT)
def test_golden_cases_give_the_same_numbers_in_every_format(
    case: Case, formats: tuple[str, str], client: httpx.Client
) -> None:
    accept, media_type = formats
    response = post(client, write(case.request, media_type), media_type, accept)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == accept
    answer = read(response.content, accept)
    for expected in case.expected:
        field = expected.name.partition("(")[2].rstrip(")") or expected.name
        if isinstance(answer[field], np.ndarray):
            answer[field] = answer[field].tolist()
        expected.compare(answer)
    for name in ("query_tokens", "key_tokens"):
        assert answer.get(name) == case.request.get(name)


def test_the_response_has_the_format_of_the_request_by_default(client: httpx.Client) -> None:
    for media_type in MEDIA_TYPES:
        content = write({"input": [[1.0]]}, media_type)
        for accept in (None, "*/*"):
            assert post(client, content, media_type, accept).headers["content-type"] == media_type


@pytest.mark.parametrize(
    ("media_type", "dtype"),
    [*product([NPZ, SAFETENSORS], ["float64", "float32", "float16"]), (SAFETENSORS, "bfloat16")],
)
def test_values_are_returned_bit_for_bit(client: httpx.Client, media_type: str, dtype: str) -> None:
    """With one key, whose weight is 1, the output is the value, for any bits except NaN and infinity.

    npy files do not support bfloat16: a test below covers its refusal.
    """
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    value = np.frombuffer(np.random.default_rng(5).bytes(64 * kind.itemsize), kind).reshape(1, 64)
    value = np.where(np.isfinite(value.astype(np.float64)), value, kind.type(1)).astype(kind)
    arrays = {"query": np.ones((1, 2), kind), "key": np.ones((1, 2), kind), "value": value}
    if media_type == NPZ:
        stream = io.BytesIO()
        np.savez(stream, allow_pickle=False, **arrays)
        content = stream.getvalue()
    else:
        content = safetensors.numpy.save(arrays)
    response = post(client, content, media_type)
    assert response.status_code == 200, response.text
    output = read(response.content, media_type)["output"]
    assert output.dtype == kind
    assert output.tobytes() == (value + 0).tobytes()  # 0 - 0 is +0 in a sum


@pytest.mark.parametrize("media_type", [NPZ, SAFETENSORS])
@pytest.mark.parametrize("kind", [np.bool_, np.int8, np.uint8, np.int32, np.int64, np.float16, np.float32, np.float64])
def test_codecs_are_exact_for_every_type_and_shape(media_type: str, kind: type) -> None:
    random = np.random.default_rng(9)
    arrays: dict[str, Any] = {
        "a": random.integers(0, 2, (3, 4)).astype(kind),
        "b.c": random.integers(0, 2, (2, 1, 5)).astype(kind).T,
        "d": np.zeros((0, 3), kind),
        "e": np.array(1, kind),
    }
    nested_arrays = {"a": arrays["a"], "b": {"c": arrays["b.c"]}, "d": arrays["d"], "e": arrays["e"]}
    content = b"".join(
        CODECS[media_type].encode(nested_arrays | {"metadata": {"x": 1}, "tokens": ["é"]}, NO_OPTIONS).chunks
    )
    theirs = read(content, media_type)
    assert (theirs["metadata"], theirs["tokens"]) == ({"x": 1}, ["é"])
    if media_type == NPZ:
        stream = io.BytesIO()
        np.savez_compressed(stream, **arrays)
        content = stream.getvalue()
    else:
        content = safetensors.numpy.save({name: np.asarray(x, order="C") for name, x in arrays.items()})
    ours = CODECS[media_type].decode(content, LIMIT).fields
    for got in (theirs, ours):
        for name, array in (("a", got["a"]), ("b.c", got["b"]["c"]), ("d", got["d"]), ("e", got["e"])):
            assert (array.dtype, array.shape) == (arrays[name].dtype, arrays[name].shape)
            assert array.tobytes() == arrays[name].tobytes()


@pytest.mark.parametrize("media_type", [NPZ, SAFETENSORS])
def test_stored_tensors_are_views_of_the_body(media_type: str) -> None:
    content = write({"query": np.arange(1000.0)}, media_type)
    array = CODECS[media_type].decode(content, LIMIT).fields["query"]
    assert not array.flags.owndata
    assert not array.flags.writeable


def test_equivalent_forms_of_npz_are_accepted(client: httpx.Client) -> None:
    """Compressed, in Fortran order, big-endian, with the JSON text as bytes, and without JSON text."""
    fortran = np.asfortranarray(np.arange(6.0).reshape(3, 2))
    expected = post(client, write({"input": fortran.tolist(), "scale": 1}, JSON), JSON).json()["output"]
    request = np.frombuffer(b'{"scale": 1}', np.uint8)
    for save in (np.savez, np.savez_compressed):
        for array in (fortran, fortran.astype(">f8"), fortran.astype(np.int32)):
            stream = io.BytesIO()
            save(stream, request=request, input=array)
            answer = read(post(client, stream.getvalue(), NPZ).content, NPZ)
            np.testing.assert_array_equal(answer["output"], expected)
    stream = io.BytesIO()
    np.savez(stream, input=EYE)
    assert post(client, stream.getvalue(), NPZ).status_code == 200


def test_npz_answers_can_be_read_from_their_first_byte() -> None:
    """Readers that do not go to the directory first: the sizes of stored files stand before them (APPNOTE 6.3.10)."""
    answer = {"output": np.arange(2**20 + 1, dtype=np.float32), "label": "é", "metadata": {"rows": 2}}
    body = b"".join(CODECS[NPZ].encode(answer, NO_OPTIONS).chunks)
    found = {}
    at = 0
    while body[at : at + 4] == b"PK\3\4":
        flags, method, checksum, packed, size, name, extra = struct.unpack("<6xHH4xLLLHH", body[at : at + 30])
        assert (flags, method, packed, extra) == (0, 0, size, 0)
        at += 30 + name
        content = body[at : at + size]
        assert zlib.crc32(content) == checksum
        found[body[at - name : at].decode()] = np.load(io.BytesIO(content))
        at += size
    assert body[at : at + 4] == b"PK\1\2"
    assert [*found] == ["output.npy", "response.npy"]
    np.testing.assert_array_equal(found["output.npy"], answer["output"])
    assert found["response.npy"].dtype == np.uint8
    assert json.loads(bytes(found["response.npy"])) == {"label": "é", "metadata": {"rows": 2}}


def test_a_safetensors_file_without_metadata_is_accepted(client: httpx.Client) -> None:
    assert post(client, safetensors.numpy.save({"input": EYE}), SAFETENSORS).status_code == 200


def test_bfloat16_in_npz_is_refused_with_advice(client: httpx.Client) -> None:
    """numpy.savez writes bfloat16 of ml_dtypes as two bytes of no type."""
    content = write({"input": EYE, "dtype": "bfloat16"}, SAFETENSORS)
    response = post(client, content, SAFETENSORS, NPZ)
    assert (response.status_code, response.json()["code"]) == (406, "not_acceptable")
    assert "use application/vnd.safetensors" in response.json()["detail"]
    stream = io.BytesIO()
    np.savez(stream, input=EYE.astype(ml_dtypes.bfloat16))
    assert b"'descr': '<V2'" in stream.getvalue()
    problem = post(client, stream.getvalue(), NPZ).json()
    assert problem["code"] == "invalid_tensors"
    (fault,) = problem["errors"]
    assert fault["got"] == "'|V2'"
    assert "npz has no bfloat16; use application/vnd.safetensors" in fault["hint"]
    stream = io.BytesIO()
    np.savez(stream, input=EYE.astype(np.complex64))
    assert "hint" not in post(client, stream.getvalue(), NPZ).json()["errors"][0]


def test_top_weights_have_dotted_names(client: httpx.Client) -> None:
    for media_type in (NPZ, SAFETENSORS):
        answer = read(post(client, write({"input": EYE, "top_k": 1}, media_type), media_type).content, media_type)
        assert answer["top_weights"]["indices"].tolist() == [[0], [1]]


def npy(header: bytes, data: bytes, version: bytes = b"\1\0") -> bytes:
    return b"\x93NUMPY" + version + struct.pack("<H", len(header)) + header + data


def archive(**members: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as file:
        for name, content in members.items():
            file.writestr(f"{name}.npy", content)
    return stream.getvalue()


HEADER = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1, 1), }\n"
GOOD_NPY = npy(HEADER, b"\0" * 8)


def pickled() -> bytes:
    stream = io.BytesIO()
    np.savez(stream, allow_pickle=True, query=np.array([{"a": 1}], dtype=object))
    return stream.getvalue()


def twice() -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as file:
        file.writestr("query.npy", GOOD_NPY)
        with pytest.warns(UserWarning, match="Duplicate"):
            file.writestr("query.npy", GOOD_NPY)
    return stream.getvalue()


def patched(content: bytes, old: bytes, new: bytes) -> bytes:
    assert old in content
    return content.replace(old, new, 1)


def test_large_compressed_tensors_are_unpacked_in_pieces() -> None:
    """zipfile asks for as many bytes at once as it is asked for, which the directory alone may be large."""
    query = np.random.default_rng(0).random((1000, 300))
    stream = io.BytesIO()
    np.savez_compressed(stream, query=query)
    assert len(stream.getvalue()) > 2**21
    decoded = CODECS[NPZ].decode(stream.getvalue(), 2**24)
    assert np.array_equal(decoded.fields["query"], query)


def _compressed(start: bytes) -> bytes:
    """An archive whose compressed member starts with these bytes instead of its own."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("query.npy", GOOD_NPY)
    content = stream.getvalue()
    place = content.index(b"query.npy") + len("query.npy")
    return content[:place] + start + content[place + len(start) :]


STORED = archive(query=GOOD_NPY)
LIES: dict[str, tuple[Callable[[], bytes] | bytes, int, str]] = {
    "not a zip": (b"PK nonsense", 400, "a zip archive"),
    "empty": (b"", 400, "a zip archive"),
    "cut off": (STORED[:-30], 400, "a zip archive"),
    "pickle": (pickled, 400, "to be of bool, uint8, uint16"),
    "member twice": (twice, 422, "each tensor once"),
    "not an npy file": (archive(query=b"12345678" * 20), 400, "an npy file"),
    "version 3": (archive(query=npy(HEADER, b"\0" * 8, b"\3\0")), 400, "an npy file"),
    "header of code": (archive(query=npy(b"__import__('os')\n", b"")), 400, "an npy file"),
    "header of brackets": (archive(query=npy(b"(" * 3000, b"")), 400, "an npy file"),
    "header too long": (archive(query=npy(HEADER + b" " * 20000, b"\0" * 8)), 400, "an npy file"),
    "negative shape": (archive(query=npy(HEADER.replace(b"(1, 1)", b"(-1, -1)"), b"\0" * 8)), 400, "axes of 'query'"),
    "more shape than data": (archive(query=npy(HEADER.replace(b"(1, 1)", b"(9, 9)"), b"\0" * 8)), 400, "648 bytes"),
    "huge shape": (archive(query=npy(HEADER.replace(b"(1, 1)", b"(2**62, 4)"), b"")), 400, "an npy file"),
    "huge literal shape": (archive(query=npy(HEADER.replace(b"1, 1", b"9" * 30), b"")), 400, "an npy file"),
    "less shape than data": (archive(query=npy(HEADER, b"\0" * 16)), 400, "8 bytes of"),
    "nothing times a huge shape": (archive(query=npy(HEADER.replace(b"1, 1", b"0, 9223372036854775807"), b"")), 400,
                                   "axes of 'query'"),
    "lengths that are booleans": (archive(query=npy(HEADER.replace(b"1, 1", b"True, 1"), b"\0" * 8)), 400, "axes of"),
    "70 axes": (archive(query=npy(HEADER.replace(b"1, 1", b"1," * 70), b"\0" * 8)), 400, "at most 8 axes"),
    "type of an empty tuple": (archive(query=npy(HEADER.replace(b"'<f8'", b"()"), b"\0" * 8)), 400, "an npy file"),
    "type without byte order": (archive(query=npy(HEADER.replace(b"<f8", b"T"), b"\0" * 8)), 400, "to be of bool"),
    "deep name": (archive(**{"a." * 40 + "a": GOOD_NPY}), 400, "at most 32 levels"),
    "complex numbers": (archive(query=npy(HEADER.replace(b"<f8", b"<c16"), b"\0" * 16)), 400, "to be of bool"),
    "booleans of 2": (archive(mask=npy(HEADER.replace(b"<f8", b"|b1"), b"\2")), 400, "bytes of 0 and 1"),
    "wrong checksum": (patched(STORED, b"\0" * 8 + b"PK\1\2", b"\1" + b"\0" * 7 + b"PK\1\2"), 400, "undamaged"),
    "wrong deflation": (lambda: _compressed(b"\xff\xff"), 400, "undamaged"),
    "wrong local header": (patched(STORED, b"PK\3\4", b"PK\3\5"), 400, "undamaged"),
    "request of numbers": (archive(request=GOOD_NPY), 400, "a string, or bytes"),
    "request of two strings": (lambda: _savez(request=np.array(["{}", "{}"])), 400, "one string"),
    "request of half a surrogate": (lambda: _savez(request=np.array("\ud800")), 400, "Unicode"),
    "request beyond Unicode": (archive(request=npy(b"{'descr': '<U1', 'fortran_order': False, 'shape': (), }\n",
                               b"\xff" * 4)), 400, "Unicode"),
    "request that is no JSON": (lambda: _savez(request=np.array("{")), 400, "JSON"),
    "field twice": (lambda: _savez(request=np.array('{"query": [[1]]}'), query=EYE), 422, "each field once"),
    "field in a field": (lambda: _savez(request=np.array('{"query": [[1]]}'), **{"query.x": EYE}), 422, "an object"),
    "too many members": (lambda: _savez(**{f"a{i}": EYE for i in range(201)}), 422, "200 tensors"),
    "unknown member": (lambda: _savez(**{"projection.query.weigth": EYE}, input=EYE), 422, "a known field"),
    "encrypted": (lambda: patched(patched(STORED, b"PK\1\2\x14\3\x14\0\0\0", b"PK\1\2\x14\3\x14\0\1\0"), b"PK\3\4",
                  b"PK\3\4"), 400, "not encrypted"),
}  # fmt: skip


def _savez(**members: Any) -> bytes:
    stream = io.BytesIO()
    np.savez(stream, **members)
    return stream.getvalue()


def check(response: httpx.Response, status: int, expected: str) -> None:
    assert response.status_code == status, response.text
    assert expected in response.json()["errors"][0]["expected"]
    assert len(response.content) < 2000


@pytest.mark.parametrize("name", LIES)
def test_malformed_npz_is_refused(client: httpx.Client, name: str) -> None:
    content, status, expected = LIES[name]
    check(post(client, content() if callable(content) else content, NPZ), status, expected)


def test_compressed_json_text_beyond_the_limit_is_refused(client: httpx.Client) -> None:
    text = np.frombuffer(b'{"query": [' + b"1," * 2**20 + b"1]}", np.uint8)
    for request in (text, np.array(text.tobytes().decode())):
        stream = io.BytesIO()
        np.savez_compressed(stream, request=request)
        content = stream.getvalue()
        check(post(client, content, NPZ), 413, f"'request' of at most {2**16 + 16 * len(content)} bytes when unpacked")


@pytest.mark.parametrize("media_type", [NPZ, SAFETENSORS])
def test_long_json_text_is_refused(media_type: str) -> None:
    """Parsing JSON needs a multiple of its length, so that JSON text in a binary body has a limit."""
    labels = ["a" * 10**6] * 3
    content = write({"query": [[1.0]] * 3, "query_tokens": labels}, media_type)
    with pytest.raises(TooLarge, match="'request' of at most 2097152 bytes"):
        CODECS[media_type].decode(content, 10**9)
    content = write({"query": [[1.0]] * 3, "query_tokens": labels[:2]}, media_type)
    assert CODECS[media_type].decode(content, 10**9).fields["query_tokens"] == labels[:2]


def test_npz_that_decompresses_beyond_the_limit_is_refused() -> None:
    stream = io.BytesIO()
    np.savez_compressed(stream, query=np.zeros((1000, 100)))
    with serving(app(max_body_bytes=100_000)) as client:
        response = post(client, stream.getvalue(), NPZ)
        check(response, 413, "at most 100000 bytes when unpacked")
    # Also if the size in the directory is too small: no more than this size is decompressed.
    small = stream.getvalue().replace(struct.pack("<I", 800_128), struct.pack("<I", 1_000))
    with serving(app(max_body_bytes=100_000)) as client:
        check(post(client, small, NPZ), 400, "undamaged")


def tensors(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(**changed: Any) -> dict[str, Any]:
    return {"query": {"dtype": "F64", "shape": [1, 1], "data_offsets": [0, 8]} | changed}


TENSOR_LIES: dict[str, tuple[bytes, int, str]] = {
    "empty": (b"", 400, "8 bytes of header length"),
    "header beyond the body": (b"\xff" * 8, 400, "a header of at most 0 bytes"),
    "header that is no JSON": (tensors(b"{"), 400, "a header in JSON"),
    "header of empty lists": (tensors(b'{"a": [' + b"[]," * 2**19 + b"1]}"), 400, "at most 524288 arrays"),
    "header that is a list": (tensors([]), 400, "a header that is an object"),
    "metadata that is none": (tensors({"__metadata__": [1]}), 400, "to be an object"),
    "metadata of other things": (tensors({"__metadata__": {"request": "{}", "format": 1}}), 400, "to hold strings"),
    "metadata that is a string": (tensors({"__metadata__": "request"}), 400, "to be an object"),
    "request that is none": (tensors({"__metadata__": {"request": 1}}), 400, "to hold strings"),
    "request that is no JSON": (tensors({"__metadata__": {"request": "{"}}), 400, "JSON"),
    "entry that is none": (tensors({"query": 1}), 400, "dtype, shape and data_offsets"),
    "entry without shape": (tensors({"query": {"dtype": "F64"}}), 400, "dtype, shape and data_offsets"),
    "unknown type": (tensors(entry(dtype="F8_E8M0"), b"\0" * 8), 400, "to be one of BOOL"),
    "negative shape": (tensors(entry(shape=[-1, -1]), b"\0" * 8), 400, "axes of 'query'"),
    "shape of booleans": (tensors(entry(shape=[True]), b"\0" * 8), 400, "axes of 'query'"),
    "9 axes": (tensors(entry(shape=[1] * 9), b"\0" * 8), 400, "at most 8 axes"),
    "shape beyond the offsets": (tensors(entry(shape=[2**62, 4]), b"\0" * 8), 400, "bytes of 'query' within 8"),
    "nothing times a huge shape": (tensors(entry(shape=[0, 2**63, 2**63], data_offsets=[0, 0])), 400, "axes of"),
    "deep offsets": (tensors(b'{"query": {"dtype": "F64", "shape": [], "data_offsets": ' + b"[" * 100_000
                             + b"]" * 100_000 + b"}}", b"\0" * 8), 400, "at most 32 levels"),
    "deep name": (tensors({"a." * 40 + "a": entry()["query"]}, b"\0" * 8), 400, "at most 32 levels"),
    "offsets beyond the data": (tensors(entry(data_offsets=[8, 16]), b"\0" * 8), 400, "8 bytes of 'query' within 8"),
    "offsets the wrong way": (tensors(entry(data_offsets=[8, 0]), b"\0" * 8), 400, "8 bytes of 'query'"),
    "three offsets": (tensors(entry(data_offsets=[0, 8, 8]), b"\0" * 8), 400, "8 bytes of 'query'"),
    "a hole": (tensors(entry(data_offsets=[8, 16]), b"\0" * 16), 400, "begins at byte 0"),
    "more data": (tensors(entry(), b"\0" * 16), 400, "8 bytes of data"),
    "shared bytes": (tensors(entry() | {"key": entry()["query"]}, b"\0" * 8), 400, "begins at byte 8"),
    "booleans of 2": (tensors(entry(dtype="BOOL", data_offsets=[0, 1]), b"\2"), 400, "bytes of 0 and 1"),
    "too many": (tensors({f"a{i}": {"dtype": "F64", "shape": [0], "data_offsets": [0, 0]} for i in range(201)}), 422,
                 "200 tensors"),
    "field twice": (tensors(entry() | {"__metadata__": {"request": '{"query": 1}'}}, b"\0" * 8), 422, "each field"),
}  # fmt: skip


@pytest.mark.parametrize("name", TENSOR_LIES)
def test_malformed_safetensors_are_refused(client: httpx.Client, name: str) -> None:
    content, status, expected = TENSOR_LIES[name]
    check(post(client, content, SAFETENSORS), status, expected)


ENTRY = b'{"dtype": "F64", "shape": [1, 1], "data_offsets": [0, 8]}'
DEEP = b"[" * 1000 + b"]" * 1000
TWICE: dict[str, tuple[bytes, str]] = {
    "a tensor": (b'{"query": %b, "query": %b}' % (ENTRY, ENTRY), "query"),
    "a tensor in other letters": (b'{"query": %b, "qu\\u0065ry": %b}' % (ENTRY, ENTRY), "query"),
    "a part of an entry": (b'{"query": %b, "shape": [1, 1]}}' % ENTRY.replace(b"}", b""), "shape"),
    "the metadata": (b'{"__metadata__": {}, "query": %b, "__metadata__": {}}' % ENTRY, "__metadata__"),
    "the request": (b'{"__metadata__": {"request": "{", "request": "{}"}, "query": %b}' % ENTRY, "request"),
    "a huge integer": (b'{"query": 1%b, "query": %b}' % (b"0" * 300, ENTRY), "query"),
}


@pytest.mark.parametrize("name", TWICE)
def test_safetensors_with_duplicate_keys_are_refused(client: httpx.Client, name: str) -> None:
    header, key = TWICE[name]
    response = post(client, tensors(header, b"\0" * 8), SAFETENSORS)
    check(response, 400, f"'{key}' once in the header")
    assert response.json()["code"] == "duplicate_key"


@pytest.mark.parametrize("hidden", [DEEP, b'{"a":' * 500 + b"1" + b"}" * 500, b"1" * 5000, b"NaN", b'"\\ud800"'])
def test_hostile_values_under_a_duplicate_key_are_refused(client: httpx.Client, hidden: bytes) -> None:
    """The last value of the key is valid; every limit of a parser raises a ServiceError."""
    response = post(client, tensors(b'{"query": %b, "query": %b}' % (hidden, ENTRY), b"\0" * 8), SAFETENSORS)
    assert response.status_code == 400
    assert response.json()["code"] in ("duplicate_key", "invalid_tensors", "too_deep")


GOOD_BODIES = {
    media_type: write({"query": EYE, "mask": [[True]], "scale": 1}, media_type) for media_type in MEDIA_TYPES
}


@pytest.mark.parametrize("media_type", MEDIA_TYPES)
@given(data=st.data())
def test_garbage_decodes_or_raises_a_service_error(media_type: str, data: st.DataObject) -> None:
    """Valid bodies with some bytes changed, removed or repeated."""
    body = bytearray(GOOD_BODIES[media_type])
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, max(len(body) - 1, 0)))
        piece = data.draw(st.binary(max_size=4))
        body[place : place + data.draw(st.integers(0, 6))] = piece
    try:
        fields = CODECS[media_type].decode(bytes(body), LIMIT).fields
    except ServiceError as error:
        assert error.status in (400, 413, 422)
        assert len(str(error)) < 2000
    else:
        assert isinstance(fields, dict)


def test_split_separates_tensors_from_other_fields() -> None:
    arrays, rest = split({"a": [[1, 2]], "b": {"c": [True], "d": "x"}, "e": [1, None], "f": []})
    assert {name: array.tolist() for name, array in arrays.items()} == {"a": [[1, 2]], "b.c": [True]}
    assert rest == {"b": {"d": "x"}, "e": [1, None], "f": []}


@pytest.mark.parametrize(("files", "is_read"), [(3, True), (4, False)])
def test_the_directory_of_an_archive_has_a_limit(files: int, is_read: bool) -> None:
    """Comments of 65,500 bytes each, and 46 bytes more: three are less than 2**18 bytes, four are more."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name in ("query", "key", "value", "bias")[:files]:
            entry = zipfile.ZipInfo(f"{name}.npy")
            entry.comment = b"x" * 65_500
            array = io.BytesIO()
            np.save(array, np.ones((2, 2)))
            archive.writestr(entry, array.getvalue())
    with nullcontext() if is_read else pytest.raises(InvalidRequest, match="tensors"):
        assert len(CODECS[NPZ].decode(stream.getvalue(), 2**20).fields) == files


@pytest.mark.parametrize(
    ("files", "is_read"),
    [(200, True), (201, False), (4_000, False), pytest.param(100_000, False, marks=pytest.mark.slow)],
)
def test_files_beyond_the_limit_are_refused_before_any_is_parsed(
    files: int, is_read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """zipfile makes an object of each, in a few microseconds: of 4,000, while nothing else runs."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for n in range(files):
            archive.writestr(f"a{n}.npy", GOOD_NPY)
    made: list[str] = []

    class Counted(zipfile.ZipInfo):
        def __init__(self, filename: str) -> None:
            made.append(filename)
            super().__init__(filename)

    monkeypatch.setattr(zipfile, "ZipInfo", Counted)
    body = stream.getvalue()
    CODECS[NPZ].decode_bytes(body, 2**30)
    with nullcontext() if is_read else pytest.raises(InvalidRequest, match="at most 200 tensors"):
        assert len(CODECS[NPZ].decode(body, 2**30).fields) == files
    assert len(made) == (2 * files if is_read else 0)


def test_what_begins_as_a_file_of_an_archive_may_stand_in_an_array() -> None:
    """An array of more such bytes than there may be files is one array, packed or not."""
    array = np.frombuffer(b"PK\1\2PK\1\2" * 300, np.uint64).astype(np.int64)
    for save in (np.savez, np.savez_compressed):
        stream = io.BytesIO()
        save(stream, mask=array)
        assert np.array_equal(CODECS[NPZ].decode(stream.getvalue(), 2**20).fields["mask"], array)


def test_fields_that_are_no_arrays_are_kept_beside_those_that_are() -> None:
    array = np.zeros(2)
    rotary = {"base": 500.0, "cos": array, "scaling": {"kind": "linear", "factors": array}}
    fields = {"query": array, "rotary": rotary, "relative_keys": {"key": array}, "query_norm": {}, "layout": "ld"}
    kept = {"rotary": {"base": 500.0, "scaling": {"kind": "linear"}}, "query_norm": {}, "layout": "ld"}
    assert plain_fields(fields) == kept
