"""The Open Inference Protocol over HTTP: metadata, tensors in JSON and binary, options, and malformed requests."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention_service.codecs.oip import http as codec
from attention_service.codecs.oip.fields import OUTPUTS
from attention_service.codecs.oip.tensors import head_of
from attention_service.errors import ServiceError
from attention_service.schemas.inference import MODEL_METADATA
from attention_service.schemas.request import AttentionRequest
from attention_service.version import __version__
from tests.cases import CASES, Case
from tests.conftest import app, serving
from tests.helpers.covering import in_turn
from tests.helpers.oip import HEADER, INFER, body, read, request_of, tensor

EYE = np.eye(2, dtype=np.float32)


def ask(client: httpx.Client, content: bytes, headers: dict[str, str]) -> httpx.Response:
    return client.post(INFER, content=content, headers=headers)


def infer(client: httpx.Client, arrays: dict[str, np.ndarray], binary: bool = True, **more: Any) -> dict[str, Any]:
    response = ask(client, *body([tensor(name, array, binary) for name, array in arrays.items()], **more))
    assert response.status_code == 200, response.text
    return read(response)


def test_health_and_metadata_are_returned(client: httpx.Client) -> None:
    assert client.get("/v2/health/live").json() == {"live": True}
    assert client.get("/v2/health/ready").json() == {"ready": True}
    expected = {"name": "attention-service", "version": __version__, "extensions": ["binary_tensor_data"]}
    assert client.get("/v2").json() == expected
    for path in ("/v2/models/attention", "/v2/models/attention/versions/1"):
        assert client.get(f"{path}/ready").json() == {"name": "attention", "ready": True}
        metadata = client.get(path).json()
        assert (metadata["name"], metadata["versions"]) == ("attention", ["1"])
        assert {"name": "query", "datatype": "FP32", "shape": [-1, -1]} in metadata["inputs"]
        assert {"name": "top_weights.indices", "datatype": "INT64", "shape": [-1, -1]} in metadata["outputs"]


@pytest.mark.parametrize(
    "path",
    [
        "/v2/models/other",
        "/v2/models/other/ready",
        "/v2/models/attention/versions/2",
        "/v2/models/attention/versions/2/ready",
        "/v2/nowhere",
    ],
)
def test_unknown_models_and_paths_get_a_404(client: httpx.Client, path: str) -> None:
    response = client.get(path)
    assert (response.status_code, list(response.json())) == (404, ["error"])
    assert response.headers["content-type"] == "application/json"


@pytest.mark.parametrize("model", ["other", "attention/versions/2", "x" * 3000])
def test_inference_by_an_unknown_model_gets_a_404(client: httpx.Client, model: str) -> None:
    response = client.post(f"/v2/models/{model}/infer", json={"inputs": []})
    assert (response.status_code, list(response.json())) == (404, ["error"])
    assert len(response.content) < 200


def test_inference_by_the_version_of_the_model(client: httpx.Client) -> None:
    content, headers = body([tensor("input", EYE, True)], parameters={"scale": 0})
    answer = read(client.post("/v2/models/attention/versions/1/infer", content=content, headers=headers))
    assert answer["output"].tolist() == [[0.5, 0.5], [0.5, 0.5]]


def arrays_of(schema: dict[str, Any], definitions: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """The dotted names of all arrays in a model's schema."""
    for name, field in schema["properties"].items():
        kinds = {option.get("$ref", "").rpartition("/")[2] for option in field.get("anyOf", [field])}
        if kinds & {"Tensor", "IntegerOrTensor", "NumberOrTensor", "Labels"}:
            yield prefix + name
        for kind in kinds & {"Projection", "LinearMap", "GateMap", "Norm", "Rotary", "RelativeKeys", "SegmentIds"}:
            yield from arrays_of(definitions[kind], definitions, f"{prefix}{name}.")


def test_every_array_is_an_input() -> None:
    schema = AttentionRequest.model_json_schema()
    assert sorted(entry.name for entry in MODEL_METADATA.inputs) == sorted(arrays_of(schema, schema["$defs"]))
    assert [entry.name for entry in MODEL_METADATA.outputs] == list(OUTPUTS)


def test_inputs_have_the_datatypes_and_axes_of_their_fields() -> None:
    """Datatypes and axes are those of the fields' descriptions, in layout ld."""
    expected = {"query": ("FP32", 2), "past_key": ("FP32", 3), "mask": ("BOOL", 2), "key_mask": ("BOOL", 1),
                "projection.query.weight": ("FP32", 2), "projection.output.bias": ("FP32", 1), "sinks": ("FP32", 1),
                "rotary.cos": ("FP32", 2), "query_norm.weight": ("FP32", 1), "segment_ids.key": ("INT64", 1),
                "query_offset": ("INT64", 1), "select_heads": ("INT64", 1), "key_tokens": ("BYTES", 1)}  # fmt: skip
    found = {entry.name: (entry.datatype, len(entry.shape)) for entry in MODEL_METADATA.inputs}
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(("case", "form"), in_turn(CASES, ["binary", "flat", "nested"]))
def test_golden_cases_give_the_expected_numbers(case: Case, form: str, client: httpx.Client) -> None:
    response = ask(client, *request_of(case.request, form == "binary", form == "nested"))
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == f"application/{'octet-stream' if form == 'binary' else 'json'}"
    answer = read(response)
    rest = answer.pop("rest")
    assert (rest["id"], rest["model_name"], rest["model_version"]) == ("17", "attention", "1")
    for expected in case.expected:
        expected.compare({name: array.tolist() for name, array in answer.items()})


def test_binary_and_json_tensors_may_be_mixed(client: httpx.Client) -> None:
    entries = [tensor("query", EYE, True), tensor("key", EYE, False), tensor("value", 3 * EYE, True),
               tensor("mask", np.array([[True, False], [True, True]]), True)]  # fmt: skip
    outputs = [
        {"name": "masked_scores"},
        {"name": "output", "parameters": {"binary_data": False}},
        {"name": "logsumexp"},
    ]
    parameters = {"binary_data_output": True, "scale": 1, "include": None}
    response = ask(client, *body(entries, outputs=outputs, parameters=parameters))
    assert response.headers["content-type"] == "application/octet-stream"
    answer = read(response)
    assert list(answer) == ["rest", "masked_scores", "output", "logsumexp"]
    assert answer["masked_scores"].tolist() == [[1, -np.inf], [0, 1]]
    np.testing.assert_allclose(answer["logsumexp"], [1, np.log(1 + np.e)], rtol=1e-6)
    weight = np.e / (1 + np.e)
    expected = np.array([[3, 0], [3 * (1 - weight), 3 * weight]])
    np.testing.assert_allclose(answer["output"], expected, rtol=1e-6)
    assert "id" not in answer["rest"]


def test_options_are_parameters(client: httpx.Client) -> None:
    parameters = {
        "window.left": 0,
        "window.right": 0,
        "query_offset": 0,
        "top_k": 1,
        "dtype": "float64",
        "query_tokens": "a, b",
    }
    answer = infer(client, {"input": EYE}, parameters=parameters)
    assert answer["output"].tolist() == [[1, 0], [0, 1]]  # each query attends to its own key only
    assert answer["output"].dtype == np.float64
    assert answer["top_weights.indices"].tolist() == [[0], [1]]
    parameters = answer["rest"]["parameters"]
    assert (parameters["num_heads"], parameters["query_length"], parameters["dtype"]) == (1, 2, "float64")


def test_warnings_are_one_string(client: httpx.Client) -> None:
    answer = infer(client, {"input": EYE, "bias": EYE})
    assert answer["rest"]["parameters"]["warnings"].startswith("bias_looks_like_mask: ")


def test_include_may_be_a_parameter(client: httpx.Client) -> None:
    answer = infer(client, {"input": EYE}, parameters={"include": "scores, logsumexp"})
    assert list(answer) == ["rest", "output", "scores", "logsumexp"]
    answer = infer(client, {"input": EYE}, outputs=[{"name": "top_weights.values"}], parameters={"top_k": 2})
    assert list(answer) == ["rest", "top_weights.values"]


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("kind", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.int8, np.int16, np.int32,
                                  np.int64, np.uint8, np.uint16, np.uint32])  # fmt: skip
def test_every_datatype_is_received_and_returned(client: httpx.Client, kind: Any, binary: bool) -> None:
    """With one key, whose weight is 1, the output is the value."""
    value = np.array([[1, 2, 3]], kind)
    answer = infer(client, {"query": np.ones((1, 1), kind), "key": np.ones((1, 1), kind), "value": value}, binary)
    floating = np.dtype(kind) in (np.float16, ml_dtypes.bfloat16, np.float32)
    assert answer["output"].dtype == (kind if floating else np.float64)
    assert answer["output"].astype(float).tolist() == [[1, 2, 3]]


def test_token_labels_are_checked(client: httpx.Client) -> None:
    def labels(*texts: str) -> tuple[dict[str, Any], bytes]:
        data = b"".join(len(text.encode()).to_bytes(4, "little") + text.encode() for text in texts)
        entry = {"name": "key_tokens", "shape": [len(texts)], "datatype": "BYTES"}
        return entry | {"parameters": {"binary_data_size": len(data)}}, data

    listed = {"name": "query_tokens", "shape": [2], "datatype": "BYTES", "data": ["a", "b"]}
    entries = [tensor("input", EYE, True), labels("é", ""), (listed, b"")]
    assert ask(client, *body(entries)).status_code == 200
    error = ask(client, *body([*entries[:1], labels("a", "b", "c")])).json()["error"]
    assert error.startswith("/key_tokens: expected ")


def test_null_in_a_bias_is_minus_infinity(client: httpx.Client) -> None:
    for data in ([0, None, 0, 0], [[0, None], [0, 0]]):
        bias = {"name": "bias", "shape": [2, 2], "datatype": "FP32", "data": data}
        answer = read(ask(client, *body([tensor("input", EYE, False), (bias, b"")])))
        assert answer["attention_weights"][0].tolist() == [1, 0]


def test_an_empty_kv_cache_is_accepted(client: httpx.Client) -> None:
    past = {"shape": [1, 0, 2], "datatype": "FP32", "data": []}
    entries = [(past | {"name": name}, b"") for name in ("past_key", "past_value")]
    assert ask(client, *body([tensor("input", EYE, False), *entries])).status_code == 200


def test_parameters_of_gateways_are_ignored(client: httpx.Client) -> None:
    parameters = {"priority": 1, "timeout": 5, "sequence_id": 3, "sequence_start": True, "sequence_end": True}
    answer = infer(client, {"input": EYE}, parameters=parameters, model_name="attention")
    plain = infer(client, {"input": EYE})
    assert answer["output"].tolist() == plain["output"].tolist()
    assert answer["rest"]["parameters"].keys() == plain["rest"]["parameters"].keys()


@pytest.mark.slow
def test_large_requests_and_responses_are_processed() -> None:
    """Large requests are decoded and computed in threads, and encoded while the response is sent."""
    array = np.random.default_rng(1).normal(size=(300, 64)).astype(np.float32)
    with serving(app(inline_flops=0)) as client:
        answers = [infer(client, {"input": array}, binary) for binary in (True, False)]
        answers += [infer(client, {"input": np.tile(array, (60, 1))}, outputs=[{"name": "output"}])]
    assert answers[0]["attention_weights"].shape == (300, 300)
    np.testing.assert_array_equal(answers[0]["output"], answers[1]["output"])
    assert answers[2]["output"].shape == (18000, 64)


def test_binary_tensors_are_decoded_as_aligned_arrays() -> None:
    for shift in range(8):
        content, headers = body([tensor("query", np.arange(1000.0), True)], id="x" * shift)
        decoded = codec.HTTPCodec(int(headers[HEADER])).decode(content, 0)
        assert decoded.fields["query"].flags.aligned
        assert decoded.fields["query"].tolist() == np.arange(1000.0).tolist()


def entry(**changed: Any) -> tuple[dict[str, Any], bytes]:
    """An input of two numbers with some fields replaced; None removes a field."""
    whole = {"name": "input", "shape": [2, 1], "datatype": "FP32", "data": [1, 2]} | changed
    return {name: value for name, value in whole.items() if value is not None}, b""


def sized(size: Any, data: bytes = b"\0" * 8, **changed: Any) -> tuple[dict[str, Any], bytes]:
    return entry(data=None, parameters={"binary_data_size": size}, **changed)[0], data


def bad(*entries: tuple[Any, bytes], header: str | None = None, **more: Any) -> tuple[bytes, dict[str, str]]:
    content, headers = body([item for item in entries if isinstance(item[0], dict)], **more)
    return content, headers if header is None else headers | {HEADER: header}


def shifted(by: int) -> tuple[bytes, dict[str, str]]:
    content, headers = body([sized(8)])
    return content, {HEADER: str(int(headers[HEADER]) + by)}


EMPTY: tuple[bytes, dict[str, str]] = (b'{"inputs": []}', {})
BAD: dict[str, tuple[Callable[[], tuple[bytes, dict[str, str]]], int, str]] = {
    "no JSON": (lambda: (b"{", {}), 400, "expected JSON"),
    "a list": (lambda: (b"[]", {}), 400, "expected an object, got an array"),
    "no inputs": (lambda: (b"{}", {}), 400, "/inputs: expected an array of tensors, got null"),
    "inputs that are none": (lambda: (b'{"inputs": 3}', {}), 400, "/inputs: expected an array"),
    "numbers as inputs": (lambda: (b'{"inputs": [1]}', {}), 400, "/inputs: expected an array"),
    "an input that is none": (lambda: (b'{"inputs": [{}, 1]}', {}), 400, "/inputs/0"),
    "a key twice": (lambda: (b'{"inputs": [], "inputs": []}', {}), 400, "each key once"),
    "no name": (lambda: bad(entry(name=None)), 400, "/inputs/0/name: expected the name of an input, got null"),
    "a long shape": (lambda: bad(entry(shape=[1] * 10**6)), 400, "none negative, got '[1, 1, 1, 1, 1, 1, 1, 1, 1]'"),
    "no shape": (lambda: bad(entry(shape=None)), 400, "/inputs/0/shape: expected at most 8 lengths of axes"),
    "negative shape": (lambda: bad(entry(shape=[-2, -1])), 400, "none negative, got '[-2, -1]'"),
    "zero times too much": (lambda: bad(entry(shape=[0, 2**62, 2], data=[])), 400, "none negative"),
    "shape of text": (lambda: bad(entry(shape="2")), 400, "none negative, got string '2'"),
    "shape of fractions": (lambda: bad(entry(shape=[2.0, 1.0])), 400, "none negative"),
    "9 axes": (lambda: bad(entry(shape=[1] * 8 + [2])), 400, "at most 8 lengths"),
    "unknown datatype": (lambda: bad(entry(datatype="FP8")), 400, "/inputs/0/datatype: expected one of BOOL"),
    "no datatype": (lambda: bad(entry(datatype=None)), 400, "got null"),
    "no data": (lambda: bad(entry(data=None)), 400, "/inputs/0/data: expected data, or binary_data_size"),
    "too little data": (lambda: bad(entry(data=[1])), 400, "expected 2 elements of shape (2, 1), got 1"),
    "too much data": (lambda: bad(entry(data=[1, 2, 3])), 400, "expected 2 elements of shape (2, 1), got 3"),
    "data nested otherwise": (lambda: bad(entry(data=[[1, 2]])), 400, "nested as (2, 1), got (1, 2)"),
    "ragged data": (lambda: bad(entry(data=[[1], [2, 3]])), 400, "inputs/0/data: expected numbers for FP32, got array"),
    "data of text": (lambda: bad(entry(data=["1", "2"])), 400, "data/0: expected numbers for FP32, got string '1'"),
    "one text": (lambda: bad(entry(data="12")), 400, "numbers for FP32, got string '12'"),
    "data of null": (lambda: bad(entry(data=[1, None])), 400, "/inputs/0/data/1: expected numbers for FP32, got null"),
    "a boolean too many": (lambda: bad(entry(data=[1, True])), 400, "data/1: expected numbers for FP32, got boolean"),
    "booleans for numbers": (lambda: bad(entry(data=[False, True])), 400, "numbers for FP32, got booleans"),
    "numbers for booleans": (lambda: bad(entry(data=[0, 1], datatype="BOOL")), 400, "true or false for BOOL"),
    "fractions for integers": (lambda: bad(entry(data=[0.5, 1], datatype="INT32")), 400, "integers for INT32"),
    "text in a bias": (lambda: bad(entry(name="bias", data=["x", None])), 400, "numbers for FP32"),
    "numbers for strings": (lambda: bad(entry(data=[1, 2], datatype="BYTES")), 400, "strings for BYTES"),
    "null for strings": (lambda: bad(entry(data=["a", None], datatype="BYTES")), 400, "strings for BYTES"),
    "an integer too large": (lambda: bad(entry(data=[1, 300], datatype="INT8")), 422, "/1: expected an integer from"),
    "a number too large": (lambda: bad(entry(data=[1, 7e4], datatype="FP16")), 422, "that float16 can hold"),
    "NaN": (lambda: (b'{"inputs": [{"data": [NaN]}]}', {}), 400, "/inputs/0/data/0: expected a finite number"),
    "both": (lambda: bad(entry(parameters={"binary_data_size": 8})), 400, "data or binary_data_size, got both"),
    "parameters that are none": (lambda: bad(entry(parameters=[1])), 400, "/inputs/0/parameters: expected an object"),
    "shared memory": (lambda: bad(entry(parameters={"shared_memory_region": "x"})), 400, "data in the request"),
    "size too small": (lambda: bad(sized(4)), 400, "expected 8 bytes of FP32 (2, 1), got 4"),
    "size too large": (lambda: bad(sized(12, b"\0" * 12)), 400, "expected 8 bytes of FP32 (2, 1), got 12"),
    "negative size": (lambda: bad(sized(-8)), 400, "a number of bytes, got number -8"),
    "size of text": (lambda: bad(sized("8")), 400, "a number of bytes, got string '8'"),
    "size that is true": (lambda: bad(sized(True)), 400, "a number of bytes"),
    "a huge shape": (lambda: bad(sized(8, shape=[2**40, 2**40])), 400, "bytes of FP32"),
    "tail missing": (lambda: bad(sized(8, b"")), 400, "at most the 0 bytes that are left"),
    "tail too short": (lambda: bad(sized(8, b"\0" * 7)), 400, "at most the 7 bytes that are left"),
    "tail too long": (lambda: bad(sized(8, b"\0" * 9)), 400, "8 bytes after the JSON, as its inputs say, got 9"),
    "one tail for two": (lambda: bad(sized(8), sized(8, b"", name="context")), 400, "at most the 0 bytes"),
    "booleans of 2": (lambda: bad(sized(2, b"\0\2", datatype="BOOL", name="mask")), 400, "bytes of 0 and 1"),
    "strings cut off": (lambda: bad(sized(8, b"\4\0\0\0a\0\0\0", datatype="BYTES")), 400, "strings (2, 1)"),
    "strings too long": (lambda: bad(sized(6, b"\4\0\0\0ab", datatype="BYTES")), 400, "strings (2, 1)"),
    "strings of no length": (lambda: bad(sized(0, b"", datatype="BYTES", shape=[2**24, 0])), 400, "at least one str"),
    "no strings": (lambda: bad(entry(datatype="BYTES", shape=[2**24, 0], data=[])), 400, "at least one string"),
    "strings not UTF-8": (lambda: bad(sized(5, b"\1\0\0\0\xff", datatype="BYTES")), 400, "strings in UTF-8"),
    "no header": (lambda: (body([sized(8)])[0], {}), 400, "the length of the JSON in Inference-Header-Content-Length"),
    "size without header": (lambda: (body([sized(8, b"")])[0], {}), 400, "Inference-Header-Content-Length says"),
    "header too short": (lambda: shifted(-1), 400, "expected JSON"),
    "header too long": (lambda: shifted(4), 400, "expected JSON"),
    "header beyond the body": (lambda: shifted(100), 400, "as long as the body is"),
    "header that is no number": (lambda: bad(sized(8), header="-1"), 400, "to be a number, got '-1'"),
    "header of 30 digits": (lambda: bad(sized(8), header="9" * 30), 400, "as long as the body is"),
    "header of zero": (lambda: bad(sized(8), header="0"), 400, "an empty body"),
    "an input twice": (lambda: bad(entry(), entry()), 422, "/inputs/1/name: expected each input once"),
    "input and parameter": (lambda: bad(entry(name="scale"), parameters={"scale": 1}), 422, "each field once"),
    "too many": (lambda: (json.dumps({"inputs": [{}] * 201}).encode(), {}), 422, "200 tensors"),
    "an id that is none": (lambda: bad(entry(), id=3), 400, "/id: expected a string, got number 3"),
    "a long id": (lambda: bad(entry(), id="7" * 4097), 400, "/id: expected at most 4096 characters, got more"),
    "outputs that are none": (lambda: bad(entry(), outputs={}), 400, "/outputs: expected an array"),
    "an output that is none": (lambda: bad(entry(), outputs=[None]), 400, "/outputs/0: expected an object"),
    "an unknown output": (lambda: bad(entry(), outputs=[{"name": "weights"}]), 422, "/outputs/0/name: expected one of"),
    "an output twice": (lambda: bad(entry(), outputs=[{"name": "output"}] * 2), 422, "each output once"),
    "classification": (lambda: bad(entry(), outputs=[{"name": "output", "parameters": {"classification": 2}}]), 400,
                       "an output as it is"),
    "shared memory for an output": (lambda: bad(entry(), outputs=[{"name": "output", "parameters": {
                                    "shared_memory_region": "x"}}]), 400, "an output as it is"),
    "a flag that is none": (lambda: bad(entry(), parameters={"binary_data_output": 1}), 400, "true or false"),
    "outputs and include": (lambda: bad(entry(), outputs=[{"name": "output"}], parameters={"include": "scores"}), 422,
                            "include or outputs, got both"),
    "weights with top_k": (lambda: bad(entry(), outputs=[{"name": "attention_weights"}], parameters={"top_k": 1}), 422,
                           "top_weights.indices and top_weights.values"),
    "top_weights without": (lambda: bad(entry(), outputs=[{"name": "top_weights.values"}]), 422, "parameter top_k"),
    "an unknown parameter": (lambda: bad(entry(), parameters={"causal": True}), 422, "(use is_causal)"),
    "encoding": (lambda: bad(entry(), parameters={"encoding": "base64"}), 422, "binary_data_output"),
    "a parameter in a scalar": (lambda: bad(entry(), parameters={"scale": 1, "scale.x": 1}), 422, "an object"),
    "an unknown input": (lambda: bad(entry(name="queri")), 422, "did you mean query?"),
    "shapes that do not fit": (lambda: bad(entry(name="query"), entry(name="key", shape=[1, 2]), entry(name="value")),
                               422, "/value: expected (1, ·), got numbers of shape (2, 1)"),
    "nothing to compute": (lambda: EMPTY, 422, "expected query, key and value"),
    "numbers as mask": (lambda: bad(entry(), entry(name="mask", datatype="UINT8")), 422, "/mask: expected "),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_malformed_requests_are_refused(client: httpx.Client, name: str) -> None:
    make, status, expected = BAD[name]
    response = ask(client, *make())
    assert response.status_code == status, response.text
    assert list(response.json()) == ["error"]
    assert expected in response.json()["error"]
    assert len(response.content) < 1000


def test_a_compressed_body_is_refused(client: httpx.Client) -> None:
    response = client.post(INFER, content=b"", headers={"Content-Encoding": "gzip"})
    assert (response.status_code, list(response.json())) == (415, ["error"])


def test_limits_apply_to_the_inference_protocol() -> None:
    with serving(app(max_body_bytes=1000)) as client:
        response = ask(client, *body([sized(2000, b"\0" * 2000)]))
        assert (response.status_code, list(response.json())) == (413, ["error"])
        response = client.post(INFER, content=(b"[" * 100 for _ in range(11)))
        assert response.status_code == 413


GOOD = body([tensor("query", EYE, True), tensor("key", EYE, False), tensor("value", EYE, True)],
            outputs=[{"name": "output"}], parameters={"scale": 1, "window.left": 1})  # fmt: skip


def test_a_long_shape_is_refused_without_a_copy_of_it() -> None:
    """Text of it would block the event loop for seconds."""
    lengths = np.ones(10**6)
    tracemalloc.start()
    try:
        with pytest.raises(ServiceError):
            head_of("input", "FP32", lengths, {}, "/inputs/0")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < lengths.nbytes / 10


@given(data=st.data())
def test_garbage_decodes_or_raises_a_service_error(data: st.DataObject) -> None:
    content, headers = bytearray(GOOD[0]), GOOD[1]
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content)))
        content[place : place + data.draw(st.integers(0, 6))] = data.draw(st.binary(max_size=4))
    head = int(headers[HEADER]) + data.draw(st.integers(-3, 3))
    try:
        fields = codec.HTTPCodec(head).decode(bytes(content), 0).fields
    except ServiceError as error:
        assert error.status in (400, 422)
        assert len(str(error)) < 2000
    else:
        assert isinstance(fields, dict)
