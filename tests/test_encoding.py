"""Responses of any size are encoded in small chunks, and the formats' own libraries can read them."""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

from attention_service.codecs.chunks import ENCODE_BYTES, JOINED, MAX_CHUNK, WORTH_SENDING, Chunk, Encoded, coalesce
from attention_service.codecs.decoded import Decoded, RequestedOutputs
from attention_service.codecs.json import writer
from attention_service.codecs.oip import http as oip
from attention_service.codecs.table import CODECS
from attention_service.errors import NotAcceptable
from tests.helpers.oip import TYPES
from tests.helpers.wire import JSON, NO_OPTIONS, NPZ, SAFETENSORS, read

METADATA: dict[str, Any] = {"backend": "numpy", "scale": 0.5, "warnings": ()}
WORST = -2.2250738585072014e-308  # as many digits as a number can have


class Format(NamedTuple):
    """A function that encodes a response, and an independent function that decodes it."""

    encode: Callable[[dict[str, Any]], Encoded]
    decode: Callable[[bytes, Encoded], dict[str, Any]]


def header(encoded: Encoded, name: bytes) -> int | None:
    """The number in a header of an encoded response; None if the header is absent."""
    value = dict(encoded.headers).get(name)
    return None if value is None else int(value)


def length_of(encoded: Encoded) -> int | None:
    return header(encoded, b"content-length")


def by_codec(media_type: str, **options: Any) -> Format:
    def encode(answer: dict[str, Any]) -> Encoded:
        return CODECS[media_type].encode(answer, Decoded(options, frozenset()))

    def decode(content: bytes, encoded: Encoded) -> dict[str, Any]:
        found: dict[str, Any] = untyped(read(content, media_type))
        return found

    return Format(encode, decode)


def by_inference(*binary: str, all_binary: bool = False) -> Format:
    def encode(answer: dict[str, Any]) -> Encoded:
        names = [f"{name}{part}" for name in answer if name != "metadata" for part in parts(answer[name])]
        outputs = RequestedOutputs("1", {name: all_binary or name in binary for name in names}, False)
        return oip.HTTPCodec(None).encode(answer, Decoded({}, frozenset(), outputs))

    def decode(content: bytes, encoded: Encoded) -> dict[str, Any]:
        head = header(encoded, oip.HEADER)
        at = len(content) if head is None else head
        found: dict[str, Any] = {}
        for output in json.loads(content[:at])["outputs"]:
            kind = np.dtype(TYPES[output["datatype"]])
            if "data" in output:
                array = np.array(output["data"], kind)
            else:
                size = output["parameters"]["binary_data_size"]
                array, at = np.frombuffer(content[at : at + size], kind), at + size
            found[output["name"]] = array.reshape(output["shape"])
        assert at == len(content)
        return found

    return Format(encode, decode)


def parts(value: Any) -> list[str]:
    """What follows the name of an output in the names of its tensors."""
    return [f".{name}" for name in value] if isinstance(value, dict) else [""]


def untyped(value: Any) -> Any:
    """The fields of a response with typed arrays decoded to ndarrays."""
    if not isinstance(value, dict):
        return value
    if value.keys() != {"dtype", "shape", "data"}:
        return {name: untyped(item) for name, item in value.items()}
    kind = np.dtype(ml_dtypes.bfloat16 if value["dtype"] == "bfloat16" else value["dtype"])
    return np.frombuffer(base64.b64decode(value["data"], validate=True), kind).reshape(value["shape"])


FORMATS = {
    "JSON": by_codec(JSON),
    "JSON with base64": by_codec(JSON, encoding="base64"),
    "npz": by_codec(NPZ),
    "safetensors": by_codec(SAFETENSORS),
    "inference in JSON": by_inference(),
    "inference in binary": by_inference(all_binary=True),
    "inference in both": by_inference("attention_weights"),
}

random = np.random.default_rng(0)
square = random.random((500, 700))
ARRAYS: dict[str, np.ndarray] = {
    "rows": square,
    "columns": square.T,
    "every other": square[::2, 1::2],
    "one row": square.reshape(1, -1),
    "one number a row": square.reshape(-1, 1, 1, 1)[:60_000],
    "long rows": random.random((3, 100_001)),
    "long columns": random.random((100_001, 3)).T,
    "heads behind tokens": random.random((2, 300, 5, 77)).transpose(0, 2, 1, 3),
    "float32": square.astype(np.float32),
    "float16": square.astype(np.float16).T,
    "bfloat16": square.astype(ml_dtypes.bfloat16),
    "bfloat16 columns": square.astype(ml_dtypes.bfloat16).T,
    "indices": random.integers(-(2**63), 2**63 - 1, (400, 333)),
    "longest numbers": np.full((40_000, 1), WORST),
    "one byte more": np.arange(MAX_CHUNK + 1, dtype=np.uint8).view(np.int8)[:, None] > 0,
    "small": np.array([[0.5, 0.25]]),
    "small columns": square[:3, :4].T,
    "empty": np.zeros((0, 3)),
    "scalar": np.array(1.5),
}


def answer_of(array: np.ndarray) -> dict[str, Any]:
    top = {"indices": np.arange(array.size).reshape(array.shape), "values": array}
    return {"output": array[:1] if array.ndim else array, "attention_weights": array, "top_weights": top}


@pytest.mark.slow
@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("form", FORMATS)
def test_every_array_is_encoded_in_small_chunks(form: str, name: str) -> None:
    array, (encode, decode) = ARRAYS[name], FORMATS[form]
    answer = answer_of(array)
    if form == "npz" and array.dtype == ml_dtypes.bfloat16:
        with pytest.raises(NotAcceptable):
            encode(answer | {"metadata": METADATA})
        return
    encoded = encode(answer | {"metadata": METADATA})
    chunks = list(encoded.chunks)
    content = b"".join(chunks)
    is_joined = form in ("safetensors", "inference in binary", "inference in both") and len(content) <= JOINED
    assert len(chunks) == 1 if is_joined else max(map(len, chunks)) <= MAX_CHUNK
    assert len(content) // len(chunks) >= min(WORTH_SENDING, len(content)) // 2
    assert length_of(encoded) in (None, len(content))
    assert (length_of(encoded) is None) == (
        form in ("JSON", "JSON with base64", "inference in JSON", "npz") and len(chunks) > 1
    )
    found = decode(content, encoded)
    for got, sent in pairs(found, answer):
        typed = np.array(got, sent.dtype)  # JSON lists have no dtype
        assert typed.tobytes() == sent.tobytes()
        assert typed.shape == sent.shape or sent.size < 2  # empty lists and scalars lose their shape in JSON


def pairs(found: dict[str, Any], answer: dict[str, Any], prefix: str = "") -> Iterator[tuple[Any, np.ndarray]]:
    """Pairs of a decoded array, under a nested or dotted name, and the array that was encoded."""
    for name, value in answer.items():
        if isinstance(value, dict):
            yield from pairs(found.get(name, found), value, "" if name in found else f"{name}.")
        else:
            yield found[prefix + name], value


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["rows", "columns", "nested"])
@pytest.mark.parametrize("form", FORMATS)
def test_encoding_needs_little_memory_for_any_size(form: str, layout: str) -> None:
    """Encoding needs the memory of a few chunks: neither the array nor its text is copied as a whole."""
    array = np.full((2000, 2000), 0.1, np.float32)
    array = array.T if layout == "columns" else array
    answer: dict[str, Any] = {"output": array, "attention_weights": array}
    if layout == "nested":
        answer = {"output": array, "top_weights": {"values": array}, "attention_weights": array[:2]}
    tracemalloc.start()
    try:
        for _ in FORMATS[form].encode(answer | {"metadata": METADATA}).chunks:
            pass
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < ENCODE_BYTES


LABELS: dict[str, list[Any]] = {
    "many": ["ab"] * 100_000,
    "many in rows": [["ab", "é"]] * 50_000,
    "one is long": ["x", "\u20ac\x01\U0001f600" * 200_000, "y"],
    "one in a row is long": [["x", '"\\' * 300_000], ["z", "y"]],
    "long ones": ["\x01" * 5000] * 100,
    "few": ["The", "cat"],
    "none": [],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LABELS)
@pytest.mark.parametrize("media_type", [JSON, NPZ, SAFETENSORS])
def test_labels_of_any_number_and_length_are_returned(media_type: str, name: str) -> None:
    labels = tuple(tuple(item) if isinstance(item, list) else item for item in LABELS[name])
    answer = {"output": np.array([[0.5]]), "query_tokens": labels, "key_tokens": ("a",), "metadata": METADATA}
    encoded = CODECS[media_type].encode(answer, NO_OPTIONS)
    chunks = list(encoded.chunks)
    assert max(map(len, chunks)) <= MAX_CHUNK
    assert length_of(encoded) in (None, sum(map(len, chunks)))
    found = read(b"".join(chunks), media_type)
    assert (found["query_tokens"], found["key_tokens"], found["output"]) == (LABELS[name], ["a"], [[0.5]])


def test_an_id_of_any_length_is_returned() -> None:
    name = '"\u20ac' * 200_000
    for binary in (False, True):
        request = Decoded({}, frozenset(), RequestedOutputs(name, {"output": binary}, False))
        encoded = oip.HTTPCodec(None).encode({"output": np.array([[0.5]]), "metadata": METADATA}, request)
        chunks = list(encoded.chunks)
        assert max(map(len, chunks)) <= MAX_CHUNK
        assert json.loads(b"".join(chunks)[: header(encoded, oip.HEADER)])["id"] == name


def test_npz_has_arrays_in_c_order() -> None:
    answer = {"output": np.arange(6.0).reshape(2, 3).T, "metadata": METADATA}
    content = b"".join(CODECS[NPZ].encode(answer, NO_OPTIONS).chunks)
    with np.load(io.BytesIO(content)) as archive:
        assert archive["output"].flags.c_contiguous


def zeros(count: int) -> np.ndarray:
    return np.zeros(count)


# By the definition: a number or a character counts 1, an element of a list 8 more, or 8 if it is a number. Of 32768.
WHOLE: dict[str, tuple[Callable[[int], Any], int]] = {
    "a string": (lambda n: "a" * n, 32768),
    "an array": (zeros, 32768),
    "numbers": (lambda n: [1.5, None, True, 7] * (n // 4), 4096),
    "strings": (lambda n: ["a" * 24] * n, 1024),
    "a tuple of lists": (lambda n: ([1],) * n, 2048),
    "arrays": (lambda n: [zeros(56)] * n, 512),
    "objects": (lambda n: [{"a": 1}] * n, 2048),
    "an object": (lambda n: {str(i): 1 for i in range(n)}, 4096),
    "an object of strings": (lambda n: {str(i): "a" * 56 for i in range(n)}, 512),
}


@pytest.mark.parametrize("name", WHOLE)
def test_only_small_values_are_written_at_once(name: str) -> None:
    make, most = WHOLE[name]
    assert len(list(writer.chunks(make(most)))) == 1
    larger = make(most + 4)
    found = list(writer.chunks(larger))
    assert len(found) > 1
    assert b"".join(found) == writer.dumps(larger)


def test_large_values_are_written_in_pieces() -> None:
    """32 rows of 1,000 numbers, 2,048 elements of a list, or 32,768 characters at a time, with what stands around."""
    for value, pieces in ((np.zeros((400, 1000)), 13), ([0] * 40_000, 20), (writer.Flat(zeros(80_000)), 3)):
        assert len(list(writer.chunks(value))) == 2 * pieces + 1
    assert len(list(writer.chunks("a" * 80_000))) == 2 + 3


def test_small_answers() -> None:
    for extra, is_small in (("", True), ("a" * 768, True), ("a" * 769, False)):
        answer = {"output": zeros(32_000), "id": extra, "metadata": {"id": "a" * 40_000}}
        assert writer.is_small(answer) is is_small
    assert not writer.is_small({"output": zeros(32_769)})


def test_the_longest_numbers_in_json() -> None:
    for array in (np.full(7, WORST), np.full(7, False)):
        assert writer.longest(array) == len(writer.dumps(array)) - 1  # brackets, and no comma after the last


def coalesced(chunks: Iterable[bytes]) -> list[Chunk]:
    return list(coalesce(chunks))


def test_small_chunks_are_coalesced_and_large_ones_pass_unchanged() -> None:
    few, enough, large = b"a" * 10, b"b" * WORTH_SENDING, b"c" * MAX_CHUNK
    assert coalesced([few, few]) == [few + few]
    assert coalesced([few, enough, few]) == [few + enough, few]
    assert coalesced([few, large, large, few]) == [few, large, large, few]
    assert coalesced([enough, few, large]) == [enough, few, large]
    assert coalesced([]) == []
    assert next(chunk for chunk in coalesce([few, large]) if len(chunk) == MAX_CHUNK) is large


# Runs in a separate process, which may run out of memory.
COMPUTE = """
import resource, sys
from pathlib import Path
import attention_service.backends.numpy.backend, attention_service.cli, attention_service.codecs
import attention_service.pipeline.engine, attention_service.schemas.response
pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
sys.exit(attention_service.cli.main(["compute", sys.argv[2]]))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_response_in_base64_needs_no_memory_for_its_text(tmp_path: Path) -> None:
    """3000² weights take 69 MiB, and their text a third more. orjson ends the process if an allocation fails."""
    request, answer = tmp_path / "request.json", tmp_path / "answer.json"
    request.write_text(json.dumps({"input": [[0, 0, 0, 0]] * 3000, "encoding": "base64"}))
    with answer.open("wb") as file:
        done = subprocess.run([sys.executable, "-c", COMPUTE, str(220 * 2**20), str(request)], stdout=file,
                              stderr=subprocess.PIPE, env={"ATTENTION_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                              text=True, check=False)  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    weights = untyped(json.loads(answer.read_bytes()))["attention_weights"]
    assert weights.shape == (3000, 3000)
    assert np.allclose(weights, 1 / 3000, rtol=1e-12)
