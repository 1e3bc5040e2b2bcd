"""tritonclient over HTTP, unmodified."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import ml_dtypes
import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from tests.cases import CASES, Case
from tests.helpers.oip import arrays_of

EYE = np.eye(2, dtype=np.float32)


@pytest.fixture(scope="module")
def server(client: httpx.Client) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(f"127.0.0.1:{client.base_url.port}") as found:
        yield found


def tensor(name: str, array: np.ndarray, binary: bool = True) -> triton.InferInput:
    found = triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    found.set_data_from_numpy(array, binary_data=binary)
    return found


def test_health_and_metadata(server: triton.InferenceServerClient) -> None:
    assert server.is_server_live()
    assert server.is_server_ready()
    assert server.is_model_ready("attention")
    assert server.is_model_ready("attention", "1")
    assert not server.is_model_ready("attention", "2")
    assert not server.is_model_ready("other")
    assert server.get_server_metadata()["extensions"] == ["binary_tensor_data"]
    for version in ("", "1"):
        metadata = server.get_model_metadata("attention", version)
        assert metadata["versions"] == ["1"]
        assert "query" in {entry["name"] for entry in metadata["inputs"]}


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_golden_cases_give_the_expected_numbers(case: Case, binary: bool, server: triton.InferenceServerClient) -> None:
    arrays, parameters = arrays_of(case.request)
    if not binary and any(np.isneginf(array).any() for array in arrays.values()):
        pytest.skip("JSON has no infinity")
    inputs = [tensor(name, array, binary) for name, array in arrays.items()]
    names = parameters.pop("include", "attention_weights").split(",")
    outputs = [triton.InferRequestedOutput(name, binary_data=binary) for name in ("output", *filter(None, names))]
    result = server.infer("attention", inputs, outputs=outputs, parameters=parameters, request_id="9")
    assert result.get_response()["id"] == "9"
    for expected in case.expected:
        field = expected.name.partition("(")[2].rstrip(")") or expected.name
        array = result.as_numpy(field)
        if not binary and field == "masked_scores":  # null is minus infinity, which this client reads as NaN
            array = np.where(np.isnan(array), -np.inf, array)
        expected.compare({field: array.tolist()})


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
    for binary in (True, False):
        labels = tensor("key_tokens", np.array(["kitten", "lézard"], dtype=object), binary)
        assert server.infer("attention", [tensor("input", EYE), labels]).as_numpy("output").shape == (2, 2)


def test_asynchronous_requests_are_answered(server: triton.InferenceServerClient) -> None:
    requests = [server.async_infer("attention", [tensor("input", n * EYE)]) for n in range(1, 4)]
    outputs = [request.get_result().as_numpy("output") for request in requests]
    assert [output[0, 0] > output[0, 1] for output in outputs] == [True] * 3


BAD: dict[str, tuple[Callable[[triton.InferenceServerClient], Any], str, str]] = {
    "wrong shape": (lambda server: server.infer("attention", [tensor("query", EYE), tensor("key", EYE[:, :1]),
                    tensor("value", EYE)]), "422", "/key: expected "),
    "unknown input": (lambda server: server.infer("attention", [tensor("quary", EYE)]), "422", "did you mean query?"),
    "unknown output": (lambda server: server.infer("attention", [tensor("input", EYE)],
                       outputs=[triton.InferRequestedOutput("weights")]), "422", "/outputs/0/name: expected one of "),
    "unknown parameter": (lambda server: server.infer("attention", [tensor("input", EYE)],
                          parameters={"causal": True}), "422", "use is_causal"),
    "unknown model": (lambda server: server.infer("other", [tensor("input", EYE)]), "404", "the model attention"),
    "unknown version": (lambda server: server.infer("attention", [tensor("input", EYE)], "7"), "404", "version 1"),
    "numbers as mask": (lambda server: server.infer("attention", [tensor("input", EYE), tensor("mask",
                        np.ones((2, 2), np.uint8))]), "422", "/mask: expected "),
    "compressed": (lambda server: server.infer("attention", [tensor("input", EYE)],
                   request_compression_algorithm="gzip"), "415", "without Content-Encoding"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_errors_have_a_status_and_a_message(name: str, server: triton.InferenceServerClient) -> None:
    ask, status, message = BAD[name]
    with pytest.raises(InferenceServerException) as caught:
        ask(server)
    assert (caught.value.status(), message in caught.value.message()) == (status, True), caught.value
