"""KServe's Python client over gRPC, unmodified."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import grpc
import ml_dtypes
import numpy as np
import pytest
from kserve import InferenceGRPCClient, InferInput, InferRequest
from kserve.protocol.grpc import grpc_predict_v2_pb2
from kserve.protocol.infer_type import RequestedOutput

from benchmarks.serving import free_port
from tests.attack.server import live
from tests.cases import CASES, Case
from tests.clients.messages import compare
from tests.helpers.oip import NAMES, arrays_of

EYE = np.eye(2, dtype=np.float32)
# softmax of (1, 0), times the identity
WEIGHTS = np.array([[1, np.exp(-1)], [np.exp(-1), 1]]) / (1 + np.exp(-1))
# Cases without fractional options, which KServe's messages cannot express.
INTEGER_CASES = [case for case in CASES if case.request.get("scale", 1) == 1]

Question = Callable[[InferenceGRPCClient], Awaitable[Any]]


@pytest.fixture(scope="module")
def ask() -> Iterator[Callable[[Question], Any]]:
    """A function that runs a call of the client in a new event loop, on a server in a separate process."""
    port = free_port()

    async def answer(question: Question) -> Any:
        async with InferenceGRPCClient(f"127.0.0.1:{port}") as client:
            return await question(client)

    with live(grpc_port=port):
        yield lambda question: asyncio.run(answer(question))


def tensor(name: str, array: np.ndarray, raw: bool = True) -> InferInput:
    found = InferInput(name, list(array.shape), NAMES[array.dtype])
    if raw and array.dtype == ml_dtypes.bfloat16:
        found._raw_data = array.tobytes()  # the client does not know bfloat16, and sends these bytes unchanged
    else:
        found.set_data_from_numpy(array, binary_data=raw)
    return found


def test_messages_match_those_of_the_client() -> None:
    compare(grpc_predict_v2_pb2.DESCRIPTOR)


def test_health_and_readiness(ask: Callable[[Question], Any]) -> None:
    assert ask(lambda client: client.is_server_live()) is True
    assert ask(lambda client: client.is_server_ready()) is True
    assert ask(lambda client: client.is_model_ready("attention")) is True
    with pytest.raises(grpc.RpcError, match="the model attention") as error:
        ask(lambda client: client.is_model_ready("other"))
    assert error.value.code() == grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("raw", [True, False])
def test_inference_returns_the_requested_outputs(raw: bool, ask: Callable[[Question], Any]) -> None:
    outputs = [RequestedOutput(name) for name in ("output", "scores")]
    request = InferRequest(
        "attention", [tensor("input", EYE, raw)], "5", parameters={"scale": 1}, request_outputs=outputs
    )
    answer = ask(lambda client: client.infer(request))
    assert (answer.id, answer.model_name) == ("5", "attention")
    found = {output.name: output for output in answer.outputs}
    assert all((output._raw_data is not None) == raw for output in found.values())
    np.testing.assert_allclose(found["output"].as_numpy(), WEIGHTS, rtol=1e-6)
    assert found["scores"].as_numpy().tolist() == EYE.tolist()
    assert answer.parameters["dtype"].string_param == "float32"
    assert answer.parameters["query_length"].int64_param == 2


@pytest.mark.parametrize("case", INTEGER_CASES[:10], ids=lambda case: case.name)
def test_golden_cases_give_the_expected_numbers(case: Case, ask: Callable[[Question], Any]) -> None:
    arrays, parameters = arrays_of(case.request)
    inputs = [tensor(name, array) for name, array in arrays.items()]
    answer = ask(lambda client: client.infer(InferRequest("attention", inputs, parameters=parameters)))
    found = {output.name: output.as_numpy().tolist() for output in answer.outputs}
    for expected in case.expected:
        expected.compare(found)


@pytest.mark.parametrize("kind", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_floating_types_are_returned_unchanged(kind: Any, ask: Callable[[Question], Any]) -> None:
    """With one key, whose weight is 1, the output is the value. The client sends BF16, but cannot read it."""
    value, one = np.array([[1, -2.5, 3]], kind), np.ones((1, 1), kind)
    inputs = [tensor("query", one), tensor("key", one), tensor("value", value)]
    back = np.float32 if kind is ml_dtypes.bfloat16 else kind
    request = InferRequest("attention", inputs, parameters={"dtype": np.dtype(back).name})
    (output, _) = ask(lambda client: client.infer(request)).outputs
    assert output.datatype == NAMES[np.dtype(back)]
    assert output._raw_data == value.astype(back).tobytes()


@pytest.mark.parametrize("raw", [True, False])
def test_a_boolean_mask_hides_keys(raw: bool, ask: Callable[[Question], Any]) -> None:
    """Each query may attend to the other token's key only."""
    inputs = [tensor("input", EYE, raw), tensor("mask", ~np.eye(2, dtype=bool), raw)]
    answer = ask(lambda client: client.infer(InferRequest("attention", inputs)))
    found = {output.name: output.as_numpy() for output in answer.outputs}
    assert found["attention_weights"].tolist() == [[0, 1], [1, 0]]


@pytest.mark.parametrize(
    ("name", "model", "status", "message"),
    [
        ("quary", "attention", "INVALID_ARGUMENT", r"did you mean query\?"),
        ("input", "other", "NOT_FOUND", "the model attention"),
        ("query", "attention", "INVALID_ARGUMENT", "expected query, key and value"),
    ],
)
def test_errors_have_a_status_and_a_message(
    name: str, model: str, status: str, message: str, ask: Callable[[Question], Any]
) -> None:
    request = InferRequest(model, [tensor(name, EYE)])
    with pytest.raises(grpc.RpcError, match=message) as error:
        ask(lambda client: client.infer(request))
    assert error.value.code().name == status
