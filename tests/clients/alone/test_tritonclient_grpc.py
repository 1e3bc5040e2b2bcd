"""tritonclient over gRPC, unmodified."""

from __future__ import annotations

import hashlib
import queue
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from tests.cases import CASES, Case
from tests.clients.messages import compare
from tests.conftest import app, serving
from tests.helpers.oip import arrays_of
from tests.test_rpc_server import until

EYE = np.eye(2, dtype=np.float32)


@pytest.fixture(scope="module")
def server() -> Iterator[triton.InferenceServerClient]:
    application = app(grpc_port=0)
    with serving(application), triton.InferenceServerClient(f"127.0.0.1:{application.state.rpc.port}") as found:
        yield found


def tensor(name: str, array: np.ndarray) -> triton.InferInput:
    found = triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    found.set_data_from_numpy(array)
    return found


def test_messages_match_those_of_the_client() -> None:
    compare(service_pb2.DESCRIPTOR)


def test_health_and_metadata(server: triton.InferenceServerClient) -> None:
    assert server.is_server_live()
    assert server.is_server_ready()
    for version in ("", "1"):
        assert server.is_model_ready("attention", version)
        metadata = server.get_model_metadata("attention", version)
        assert metadata.versions == ["1"]
        assert "query" in {entry.name for entry in metadata.inputs}
    assert server.get_server_metadata(as_json=True)["extensions"] == ["binary_tensor_data"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_golden_cases_give_the_expected_numbers(case: Case, server: triton.InferenceServerClient) -> None:
    arrays, parameters = arrays_of(case.request)
    inputs = [tensor(name, array) for name, array in arrays.items()]
    names = parameters.pop("include", "attention_weights").split(",")
    outputs = [triton.InferRequestedOutput(name) for name in ("output", *filter(None, names))]
    result = server.infer("attention", inputs, outputs=outputs, parameters=parameters, request_id="9")
    assert result.get_response().id == "9"
    for expected in case.expected:
        field = expected.name.partition("(")[2].rstrip(")") or expected.name
        expected.compare({field: result.as_numpy(field).tolist()})


def send_message(server: triton.InferenceServerClient, message: Any) -> Any:
    """The response to a message of the client's own types, sent by its private stub, as it has no public function."""
    return server._client_stub.ModelInfer(message, timeout=30)


def test_typed_contents_are_received_and_returned(server: triton.InferenceServerClient) -> None:
    """With one key, whose weight is 1, the output is the value."""
    for datatype, field, numbers in (
        ("FP32", "fp32_contents", [1, -2.5]),
        ("FP64", "fp64_contents", [1, -2.5]),
        ("INT8", "int_contents", [1, -2]),
        ("UINT16", "uint_contents", [1, 2]),
        ("INT64", "int64_contents", [1, -2]),
    ):
        message = service_pb2.ModelInferRequest(model_name="attention")
        for name, data in (("query", [1]), ("key", [1]), ("value", numbers)):
            contents = service_pb2.InferTensorContents(**{field: data})
            message.inputs.add(name=name, datatype=datatype, shape=[1, len(data)], contents=contents)
        output, weights = send_message(server, message).outputs
        known = field if datatype.startswith("FP") else "fp64_contents"
        assert (list(getattr(output.contents, known)), list(getattr(weights.contents, known))) == (numbers, [1])


@pytest.mark.parametrize("kind", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_floating_types_are_returned_unchanged(kind: Any, server: triton.InferenceServerClient) -> None:
    """With one key, whose weight is 1, the output is the value."""
    value = np.array([[1, -2.5, 3]], kind)
    inputs = [tensor("query", np.ones((1, 1), kind)), tensor("key", np.ones((1, 1), kind)), tensor("value", value)]
    output = server.infer("attention", inputs).as_numpy("output")
    assert output.dtype == kind
    assert output.tobytes() == value.tobytes()


def test_a_boolean_mask_hides_keys(server: triton.InferenceServerClient) -> None:
    """Each query may attend to the other token's key only."""
    inputs = [tensor("input", EYE), tensor("mask", ~np.eye(2, dtype=bool))]
    assert server.infer("attention", inputs).as_numpy("attention_weights").tolist() == [[0, 1], [1, 0]]


def test_token_labels_are_accepted(server: triton.InferenceServerClient) -> None:
    labels = tensor("key_tokens", np.array(["kitten", "lézard"], dtype=object))
    assert server.infer("attention", [tensor("input", EYE), labels]).as_numpy("output").shape == (2, 2)


def test_asynchronous_requests_are_answered(server: triton.InferenceServerClient) -> None:
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    for _ in range(3):
        server.async_infer("attention", [tensor("input", EYE)], lambda result, error: answers.put((result, error)))
    for _ in range(3):
        result, error = answers.get(timeout=30)
        assert error is None
        assert result.as_numpy("output").shape == (2, 2)


def with_change(change: Callable[[Any], Any]) -> Callable[[triton.InferenceServerClient], Any]:
    """A function that sends a valid message after `change` was applied to it."""

    def ask(server: triton.InferenceServerClient) -> Any:
        message = service_pb2.ModelInferRequest(model_name="attention")
        message.inputs.add(name="input", datatype="FP32", shape=[2, 2])
        message.raw_input_contents.append(EYE.tobytes())
        change(message)
        try:
            return send_message(server, message)
        except grpc.RpcError as error:
            raise InferenceServerException(error.details(), str(error.code())) from None

    return ask


def set_raw(*raw: bytes) -> Callable[[Any], None]:
    def change(message: Any) -> None:
        del message.raw_input_contents[:]
        message.raw_input_contents.extend(raw)

    return change


def set_shape(*shape: int) -> Callable[[Any], None]:
    def change(message: Any) -> None:
        del message.inputs[0].shape[:]
        message.inputs[0].shape.extend(shape)

    return change


RAW = EYE.tobytes()
BAD: dict[str, tuple[Callable[[triton.InferenceServerClient], Any], str, str]] = {
    "wrong shape": (lambda server: server.infer("attention", [tensor("query", EYE), tensor("key", EYE[:, :1]),
                    tensor("value", EYE)]), "INVALID_ARGUMENT", "/key: expected (·, 2)"),
    "unknown input": (lambda server: server.infer("attention", [tensor("quary", EYE)]), "INVALID_ARGUMENT",
                      "did you mean query?"),
    "unknown output": (lambda server: server.infer("attention", [tensor("input", EYE)],
                       outputs=[triton.InferRequestedOutput("weights")]), "INVALID_ARGUMENT",
                       "/outputs/0/name: expected one of "),
    "unknown parameter": (lambda server: server.infer("attention", [tensor("input", EYE)],
                          parameters={"causal": True}), "INVALID_ARGUMENT", "use is_causal"),
    "unknown model": (lambda server: server.infer("other", [tensor("input", EYE)]), "NOT_FOUND", "model attention"),
    "unknown version": (lambda server: server.infer("attention", [tensor("input", EYE)], "7"), "NOT_FOUND",
                        "version 1"),
    "readiness of another": (lambda server: server.is_model_ready("other"), "NOT_FOUND", "the model attention"),
    "metadata of another": (lambda server: server.get_model_metadata("other"), "NOT_FOUND", "the model attention"),
    "numbers as mask": (lambda server: server.infer("attention", [tensor("input", EYE), tensor("mask",
                        np.ones((2, 2), np.uint8))]), "INVALID_ARGUMENT", "/mask: expected "),
    "classes": (lambda server: server.infer("attention", [tensor("input", EYE)],
                outputs=[triton.InferRequestedOutput("output", class_count=2)]), "INVALID_ARGUMENT",
                "an output as it is"),
    "compressed": (lambda server: server.infer("attention", [tensor("input", EYE)], compression_algorithm="gzip"),
                   "UNIMPLEMENTED", "gzip"),
    "statistics": (lambda server: server.get_inference_statistics(), "UNIMPLEMENTED", "a method among ServerLive"),
    "no data": (lambda server: server.infer("attention", [triton.InferInput("input", [2, 2], "FP32")]),
                "INVALID_ARGUMENT", "expected 4 elements of shape (2, 2), got 0"),
    "raw too short": (with_change(set_raw(RAW[:-1])), "INVALID_ARGUMENT", "expected 16 bytes of FP32 (2, 2), got 15"),
    "raw too long": (with_change(set_raw(RAW + b"\0")), "INVALID_ARGUMENT", "expected 16 bytes of FP32 (2, 2), got 17"),
    "raw too many": (with_change(set_raw(RAW, RAW)), "INVALID_ARGUMENT", "expected 1, one for each input, got 2"),
    "negative shape": (with_change(set_shape(-2, -2)), "INVALID_ARGUMENT", "none negative, got '[-2, -2]'"),
    "unknown datatype": (with_change(lambda message: setattr(message.inputs[0], "datatype", "FP8")), "INVALID_ARGUMENT",
                         "/inputs/0/datatype: expected one of BOOL"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_errors_have_a_status_and_a_message(name: str, server: triton.InferenceServerClient) -> None:
    ask, status, message = BAD[name]
    with pytest.raises(InferenceServerException) as caught:
        ask(server)
    found = caught.value
    assert (found.status(), message in found.message()) == (f"StatusCode.{status}", True), found


def test_api_keys_are_sent_as_headers() -> None:
    hashed = f"sha256:{hashlib.sha256(b'secret').hexdigest()}"
    application = app(grpc_port=0, api_keys=hashed)
    with serving(application), triton.InferenceServerClient(f"127.0.0.1:{application.state.rpc.port}") as server:
        with pytest.raises(InferenceServerException, match="UNAUTHENTICATED"):
            server.is_server_live()
        assert server.is_server_live(headers={"authorization": "Bearer secret"})


def test_a_deadline_of_the_client_cancels_the_computation() -> None:
    application = app(grpc_port=0)
    engine = application.state.engine
    with serving(application), triton.InferenceServerClient(f"127.0.0.1:{application.state.rpc.port}") as server:
        large = tensor("input", np.ones((40_000, 64), np.float32))
        with pytest.raises(InferenceServerException, match="Deadline Exceeded"):
            server.infer("attention", [large], outputs=[triton.InferRequestedOutput("output")], client_timeout=0.5)
        until(lambda: engine.admission.slots_taken == 0)
