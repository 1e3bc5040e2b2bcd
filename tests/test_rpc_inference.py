"""The Open Inference Protocol over gRPC: health, metadata, tensors, options, and malformed messages."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention_service.codecs.oip import grpc as oip_grpc
from attention_service.codecs.oip.messages import MESSAGES
from attention_service.errors import ServiceError, error_classes
from attention_service.rpc.calls import STATUSES
from attention_service.version import __version__
from tests.cases import CASES, Case
from tests.helpers.covering import in_turn
from tests.helpers.messages import request
from tests.helpers.oip import TYPES, arrays_of
from tests.helpers.rpc import Remote, remote
from tests.helpers.waiting import TIMEOUT

EYE = np.eye(2, dtype=np.float32)


@pytest.fixture(scope="module")
def server() -> Iterator[Remote]:
    with remote() as found:
        yield found


def status_and_message(error: pytest.ExceptionInfo[Any]) -> tuple[str, str]:
    """The name of the status and the message of a gRPC error."""
    return error.value.code().name, error.value.details()


def test_health_and_metadata_are_returned(server: Remote) -> None:
    assert server.ask("ServerLive").live
    assert server.ask("ServerReady").ready
    about = server.ask("ServerMetadata")
    assert (about.name, about.version, about.extensions) == ("attention-service", __version__, ["binary_tensor_data"])
    for version in ("", "1"):
        assert server.named("ModelReady", "attention", version).ready
        metadata = server.named("ModelMetadata", "attention", version)
        assert (metadata.name, metadata.versions) == ("attention", ["1"])
        over_http = server.http.get("/v2/models/attention").json()
        for side, listed in (("inputs", metadata.inputs), ("outputs", metadata.outputs)):
            assert [{"name": one.name, "datatype": one.datatype, "shape": one.shape} for one in listed] == over_http[
                side
            ]


@pytest.mark.parametrize(("name", "version"), [("other", ""), ("", ""), ("attention", "2"), ("ä" * 3000, "")])
def test_unknown_models_and_versions_are_not_found(server: Remote, name: str, version: str) -> None:
    for method in ("ModelReady", "ModelMetadata", "ModelInfer"):
        with pytest.raises(grpc.RpcError) as error:
            server.named(method, name, version)
        code, details = status_and_message(error)
        assert code == "NOT_FOUND"
        assert re.match("expected (the model attention|version 1 of the model attention), got '", details)
        assert len(details) < 150


@pytest.mark.parametrize("method", ["ModelStreamInfer", "RepositoryIndex", "é", ""])
def test_other_methods_are_not_implemented(server: Remote, method: str) -> None:
    with pytest.raises(grpc.RpcError) as error:
        server.send(method)
    code, details = status_and_message(error)
    assert (code, "ModelInfer" in details) == ("UNIMPLEMENTED", True)


@pytest.mark.parametrize(("case", "raw"), in_turn(CASES, [True, False]))
def test_golden_cases_give_the_expected_numbers(case: Case, raw: bool, server: Remote) -> None:
    arrays, options = arrays_of(case.request)
    answer = server.infer(request(arrays, options, raw=raw))
    message = answer.pop("rest")
    assert (message.id, message.model_name, message.model_version) == ("17", "attention", "1")
    assert bool(message.raw_output_contents) == raw
    for expected in case.expected:
        expected.compare({name: array.tolist() for name, array in answer.items()})


@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize("kind", list(TYPES.values()), ids=str)
def test_every_datatype_is_received_and_returned(server: Remote, kind: Any, raw: bool) -> None:
    """With one key, whose weight is 1, the output is the value."""
    dtype = np.dtype(kind)
    if dtype.kind == "b":
        answer = server.infer(request({"input": EYE, "mask": ~np.eye(2, dtype=bool)}, raw=raw))
        assert answer["attention_weights"].tolist() == [[0, 1], [1, 0]]
        return
    value, one = np.array([[1, 2, 3]], dtype), np.ones((1, 1), dtype)
    if not raw and dtype.itemsize == 2 and dtype.kind not in "iu":
        message = request({"query": one, "key": one, "value": value})
        del message.raw_input_contents[:]
        with pytest.raises(grpc.RpcError, match=r"raw_input_contents for (FP16|BF16)"):
            server.ask("ModelInfer", message)
        return
    answer = server.infer(request({"query": one, "key": one, "value": value}, raw=raw))
    assert answer["output"].dtype == (dtype if dtype.kind not in "iu" else np.float64)
    assert answer["output"].astype(float).tolist() == [[1, 2, 3]]


def test_tensors_of_the_response_are_raw_or_typed_as_requested(server: Remote) -> None:
    cases: tuple[tuple[bool, dict[str, Any], bool], ...] = (
        (True, {}, True),
        (False, {}, False),
        (True, {"binary_data_output": False}, False),
        (False, {"binary_data_output": True}, True),
        (False, {"dtype": "float16"}, True),  # float16 has no typed field
    )
    for raw, options, expected in cases:
        answer = server.infer(request({"input": EYE}, {"scale": 0} | options, raw=raw))
        assert bool(answer["rest"].raw_output_contents) == expected, (raw, options)
        assert answer["output"].astype(float).tolist() == [[0.5, 0.5], [0.5, 0.5]]
    message = request({"input": EYE}, {"scale": 1}, outputs=("output", "scores"))
    for output in message.outputs:
        output.parameters["binary_data"].bool_param = False
    answer = server.infer(message)
    assert not answer["rest"].raw_output_contents
    assert answer["scores"].tolist() == EYE.tolist()


@pytest.mark.parametrize("raw", [True, False])
def test_options_are_parameters(server: Remote, raw: bool) -> None:
    """Each query attends to its own key only."""
    options = {"window.left": 0, "window.right": 0, "query_offset": 0, "top_k": 1, "dtype": "float64",
               "query_tokens": "a, b"}  # fmt: skip
    labels = np.array([b"\xc3\xa9", b""], dtype=object)
    answer = server.infer(request({"input": EYE, "key_tokens": labels}, options, raw=raw))
    assert answer["output"].tolist() == [[1, 0], [0, 1]]
    assert answer["output"].dtype == np.float64
    assert answer["top_weights.indices"].tolist() == [[0], [1]]
    parameters = answer["rest"].parameters
    assert (parameters["num_heads"].int64_param, parameters["dtype"].string_param) == (1, "float64")
    assert parameters["scale"].double_param == pytest.approx(1 / np.sqrt(2), rel=1e-15)


@pytest.mark.parametrize("raw", [True, False])
def test_each_batch_entry_may_have_its_own_token_labels(server: Remote, raw: bool) -> None:
    """The labels have one row for each batch entry, and one column for each token."""
    both = np.stack([EYE, EYE, EYE])
    labels = np.array([[b"a", b"b"], [b"c", b"d"], [b"e", b"f"]], dtype=object)
    server.infer(request({"input": both, "key_tokens": labels}, raw=raw))
    for wrong, expected in ((labels[:2], "3 lists"), (labels.reshape(2, 3), "3 lists"), (labels[:, :1], "2 labels")):
        with pytest.raises(grpc.RpcError, match=f"/key_tokens.*: expected {expected}"):
            server.infer(request({"input": both, "key_tokens": wrong}, raw=raw))


def test_parameters_of_triton_clients_are_accepted(server: Remote) -> None:
    """Unsigned integers are accepted, parameters for schedulers and those without a value are ignored."""
    message = request({"input": EYE}, {"scale": 0})
    message.parameters["priority"].uint64_param = 1
    message.parameters["num_heads"].uint64_param = 2
    message.parameters["softcap"].SetInParent()
    message.inputs[0].parameters["binary_data_size"].int64_param = 16
    assert server.infer(message)["rest"].parameters["num_heads"].int64_param == 2


def test_requested_outputs_and_warnings_are_returned(server: Remote) -> None:
    answer = server.infer(request({"input": EYE, "bias": EYE}, {"scale": 1}, outputs=("masked_scores", "output")))
    assert list(answer) == ["rest", "masked_scores", "output"]
    assert answer["masked_scores"].tolist() == [[2, 0], [0, 2]]
    assert answer["rest"].parameters["warnings"].string_param.startswith("bias_looks_like_mask: ")


def test_minus_infinity_in_a_bias_hides_keys(server: Remote) -> None:
    bias = np.array([[0, -np.inf], [0, 0]], np.float32)
    for raw in (True, False):
        message = request({"input": EYE, "bias": bias}, {"scale": 1}, raw=raw, outputs=("masked_scores",))
        answer = server.infer(message)
        assert answer["masked_scores"].tolist() == [[1, -np.inf], [0, 1]]


def test_an_empty_kv_cache_is_accepted(server: Remote) -> None:
    past = np.zeros((1, 0, 2), np.float32)
    plain = server.infer(request({"input": EYE}))
    for raw in (True, False):
        answer = server.infer(request({"input": EYE, "past_key": past, "past_value": past}, raw=raw))
        assert answer["output"].tolist() == plain["output"].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("raw", [True, False])
def test_large_requests_and_responses_are_processed(server: Remote, raw: bool) -> None:
    """Large messages are decoded, computed and encoded in threads."""
    array = np.random.default_rng(1).normal(size=(600, 64)).astype(np.float32)
    answer = server.infer(request({"input": array}, raw=raw))
    over_http = server.http.post("/attention", json={"input": array.tolist(), "dtype": "float32"}).json()
    np.testing.assert_array_equal(answer["attention_weights"], np.float32(over_http["attention_weights"]))
    large = np.tile(array, (30, 1))
    assert server.infer(request({"input": large}, raw=raw, outputs=("output",)))["output"].shape == large.shape


def changed(**fields: Any) -> Callable[[], Any]:
    """A function that makes a valid request with some fields of its first input, or of the request, replaced."""

    def make() -> Any:
        message = request({"input": np.ones((2, 1), np.float32)})
        for name, value in fields.items():
            place = message if name in ("inputs", "raw_input_contents") else message.inputs[0]
            if isinstance(value, list):
                del getattr(place, name)[:]
                getattr(place, name).extend(value)
            else:
                setattr(place, name, value)
        return message

    return make


def typed(**contents: Any) -> Callable[[], Any]:
    """A function that makes a request with one input in typed fields. datatype, shape: of the input"""

    def make() -> Any:
        message = MESSAGES["ModelInferRequest"](model_name="attention")
        tensor = message.inputs.add(name="input", datatype=contents.pop("datatype", "FP32"),
                                    shape=contents.pop("shape", [2, 1]))  # fmt: skip
        for name, value in contents.items():
            getattr(tensor.contents, name).extend(value)
        return message

    return make


def option(outputs: tuple[str, ...] = (), **options: Any) -> Callable[[], Any]:
    return lambda: request({"input": EYE}, options, outputs=outputs)


def shared() -> Any:
    message = request({"input": EYE})
    message.inputs[0].parameters["shared_memory_region"].string_param = "x"
    return message


def both() -> Any:
    message = request({"input": EYE})
    message.inputs[0].contents.fp32_contents.extend([1, 0, 0, 1])
    return message


def twice() -> Any:
    message = request({"input": EYE, "context": EYE})
    message.inputs[1].name = "input"
    return message


FOUR = b"\0\0\x80?"
# What a message can have wrong by itself; what requests over HTTP can have wrong, too, is in `test_inference.py`.
MALFORMED: dict[str, tuple[Callable[[], Any], str]] = {
    "nothing": (lambda: b"", "the model attention, got ''"),
    "garbage": (lambda: b"garbage", "a message of inference.proto"),
    "a key without an end": (lambda: b"\xff" * 20, "a message of inference.proto"),
    "a group": (lambda: b"\x0b\x0c", "a message of inference.proto"),
    "a length beyond the end": (lambda: b"\x3a\x05abc", "a message of inference.proto"),
    "a length without an end": (lambda: b"\x3a\xff\xff", "a message of inference.proto"),
    "a number cut off": (lambda: b"\x09abc", "a message of inference.proto"),
    "a name that is no text": (lambda: b"\x0a\x02\xff\xfe", "a message of inference.proto"),
    "no inputs": (changed(inputs=[], raw_input_contents=[]), "expected query, key and value"),
    "raw without inputs": (changed(inputs=[]), "/raw_input_contents: expected 0, one for each input, got 1"),
    "too many raw": (changed(raw_input_contents=[FOUR * 2, b""]), "expected 1, one for each input, got 2"),
    "raw too short": (changed(raw_input_contents=[FOUR]), "/raw_input_contents/0: expected 8 bytes of FP32 (2, 1)"),
    "raw too long": (changed(raw_input_contents=[FOUR * 3]), "expected 8 bytes of FP32 (2, 1), got 12"),
    "an empty raw": (changed(raw_input_contents=[b""]), "expected 8 bytes of FP32 (2, 1), got 0"),
    "no raw": (changed(raw_input_contents=[]), "/inputs/0/contents/fp32_contents: expected 2 elements of shape (2, 1)"),
    "no name": (changed(name=""), "/inputs/0/name: expected the name of an input"),
    "an unknown name": (changed(name="queri"), "did you mean query?"),
    "a name of a megabyte": (changed(name="x" * 2**20), "expected a known field"),
    "a deep name": (changed(name="a." * 50), "at most 32 levels"),
    "an input twice": (twice, "/inputs/1/name: expected each input once"),
    "an unsigned integer too many": (changed(datatype="UINT128"), "expected one of BOOL"),
    "no datatype": (changed(datatype=""), "expected one of BOOL"),
    "no shape": (changed(shape=[]), "expected 4 bytes of FP32 ()"),
    "another shape": (changed(shape=[2, 2]), "expected 16 bytes of FP32 (2, 2), got 8"),
    "a million axes": (changed(shape=[1] * 2**20), "at most 8 lengths"),
    "both": (both, "/inputs/0/contents: expected contents or raw_input_contents, got both"),
    "shared memory": (shared, "data in the request, got shared memory"),
    "too few elements": (typed(fp32_contents=[1]), "/fp32_contents: expected 2 elements of shape (2, 1), got 1"),
    "too many elements": (typed(fp32_contents=[1] * 3), "expected 2 elements of shape (2, 1), got 3"),
    "elements of another type": (typed(int_contents=[1, 2]), "expected fp32_contents for FP32, got int_contents"),
    "elements of two types": (typed(fp32_contents=[1, 2], bool_contents=[True]), "got bool_contents"),
    "halves in a typed field": (typed(datatype="FP16", fp32_contents=[1, 2]), "raw_input_contents for FP16"),
    "an integer too large": (typed(datatype="INT8", int_contents=[1, 300]), "/1: expected an integer from -128 to 127"),
    "an unsigned one too large": (typed(datatype="UINT8", uint_contents=[2**32 - 1, 0]), "/0: expected an integer"),
    "typed strings not UTF-8": (typed(datatype="BYTES", bytes_contents=[b"a", b"\xff"]), "strings in UTF-8"),
    "NaN": (typed(fp32_contents=[1, np.nan]), "/input/1/0: expected a finite number"),
    "an unknown output": (option(outputs=("weights",)), "/outputs/0/name: expected one of"),
    "a parameter of another type": (option(scale="1"), "/scale: expected a number, or an array of numbers, got"),
    "a scale that is none": (option(scale=float("nan")), "/scale: expected a finite number"),
    "many faults": (option((), **{f"x{i}": i for i in range(50)}), ": expected a known field, got 'x"),
    "too many fields": (option((), **{f"x{i}": i for i in range(700)}), "a message of at most 600 fields, got more"),
    "a bomb of empty inputs": (lambda: b"\x2a\x00" * 2**20, "a message of at most 600 fields, got more"),
}  # fmt: skip


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_messages_are_refused(server: Remote, name: str) -> None:
    make, expected = MALFORMED[name]
    message = make()
    with pytest.raises(grpc.RpcError) as error:
        server.send("ModelInfer", message if isinstance(message, bytes) else message.SerializeToString())
    status = "NOT_FOUND" if name == "nothing" else "INVALID_ARGUMENT"
    code, details = status_and_message(error)
    assert (code, expected in details) == (status, True), details
    assert len(details) < 1000


def test_a_truncated_message_is_refused(server: Remote) -> None:
    for method in ("ModelReady", "ModelMetadata"):
        with pytest.raises(grpc.RpcError, match=r"a message of inference\.proto") as error:
            server.send(method, b"\x0a\x09abc")
        assert status_and_message(error)[0] == "INVALID_ARGUMENT"
    for messages, expected in ([], "INVALID_ARGUMENT"), ([b"\x0a\x09attention"] * 2, None):
        call: Any = server.channel.stream_unary("/inference.GRPCInferenceService/ModelReady")
        try:
            call(iter(messages), timeout=TIMEOUT)
            assert expected is None
        except grpc.RpcError as error:
            assert error.code().name == expected
            assert error.details() == "expected one message of at most 67108864 bytes, got none"


def test_every_answer_has_a_status() -> None:
    """200, 499 for a client that disconnects, and those of the errors."""
    assert set(STATUSES) == {200, 499} | {kind.status for kind in error_classes().values()}
    assert set(STATUSES.values()) <= set(grpc.StatusCode.__members__)


GOOD = request({"query": EYE, "key": EYE, "value": EYE}, {"scale": 1, "window.left": 1}, outputs=("output",))
TYPED = request({"query": EYE, "key": EYE, "value": EYE}, {"scale": 1}, raw=False)


@given(data=st.data())
def test_garbage_decodes_or_raises_a_service_error(data: st.DataObject) -> None:
    content = bytearray(data.draw(st.sampled_from([GOOD, TYPED])).SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content)))
        content[place : place + data.draw(st.integers(0, 6))] = data.draw(st.binary(max_size=4))
    try:
        fields = oip_grpc.GRPCCodec(bytes(content)).decode(b"", 0).fields
    except ServiceError as error:
        assert error.status in (400, 404, 422)
        assert len(str(error)) < 2000
    else:
        assert isinstance(fields, dict)


def test_splitting_a_message_keeps_its_content() -> None:
    """The parts agree with protobuf's own parser, and raw tensors are views of the message."""
    for message in (GOOD, TYPED):
        content = message.SerializeToString()
        head, raw = oip_grpc.split(content)
        again = oip_grpc.parse("ModelInferRequest", head)
        again.raw_input_contents.extend(map(bytes, raw))
        assert again == MESSAGES["ModelInferRequest"].FromString(content)
        assert all(view.obj is content for view in raw)
