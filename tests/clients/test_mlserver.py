"""MLServer's codecs: the tensors that they make of arrays and strings are requests, and they read the answers.

Its server, which the package loads first, is left out: it wants other packages, and older ones.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import httpx
import numpy as np
import pytest

found = find_spec("mlserver")
assert found is not None
assert found.submodule_search_locations is not None
sys.modules["mlserver"] = ModuleType("mlserver")
sys.modules["mlserver"].__path__ = list(found.submodule_search_locations)

# Below the lines that leave its server out, which the import would load.
from mlserver.codecs import NumpyCodec, StringCodec  # noqa: E402
from mlserver.types import InferenceRequest, InferenceResponse, Parameters, RequestOutput  # noqa: E402

INFER = "/v2/models/attention/infer"
EYE = np.eye(2)
# softmax of (1, 0)
PAIR = np.array([np.e, 1]) / (1 + np.e)
WEIGHTS = np.array([PAIR, PAIR[::-1]])


def infer(client: httpx.Client, inputs: list[Any], **parameters: Any) -> InferenceResponse:
    request = InferenceRequest(
        id="5",
        inputs=inputs,
        outputs=[RequestOutput(name="output"), RequestOutput(name="attention_weights")],
        parameters=Parameters(**parameters),
    )
    content = request.model_dump_json(exclude_none=True).encode()
    answer = client.post(INFER, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 200, answer.text
    return InferenceResponse.model_validate_json(answer.content)


@pytest.mark.parametrize(
    "kind", ["float16", "float32", "float64", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
)
def test_arrays_of_every_type(kind: str, client: httpx.Client) -> None:
    answer = infer(client, [NumpyCodec.encode_input("input", EYE.astype(kind))], scale=1.0)
    assert (answer.id, answer.model_name) == ("5", "attention")
    weights = {output.name: NumpyCodec.decode_output(output) for output in answer.outputs}["attention_weights"]
    np.testing.assert_allclose(weights, WEIGHTS, rtol=1e-3 if kind == "float16" else 1e-6)
    assert weights.dtype == (kind if kind.startswith("float") else np.float64)


def test_a_mask_and_strings(client: httpx.Client) -> None:
    """Strings have the shape [n, 1]; each query may attend to the other token only."""
    inputs = [
        NumpyCodec.encode_input("input", EYE),
        NumpyCodec.encode_input("mask", ~np.eye(2, dtype=bool)),
        StringCodec.encode_input("query_tokens", ["kitten", "lézard"]),
    ]
    assert inputs[2].shape == [2, 1]
    answer = infer(client, inputs, scale=1.0)
    assert {output.name: NumpyCodec.decode_output(output).tolist() for output in answer.outputs} == {
        "output": [[0, 1], [1, 0]],
        "attention_weights": [[0, 1], [1, 0]],
    }


def test_an_array_of_strings(client: httpx.Client) -> None:
    labels = NumpyCodec.encode_input("key_tokens", np.array(["a", "b"]))
    assert labels.shape == [2, 1]
    answer = infer(client, [NumpyCodec.encode_input("input", EYE), labels], scale=1.0)
    np.testing.assert_allclose(NumpyCodec.decode_output(answer.outputs[1]), WEIGHTS, rtol=1e-15)


def test_minus_infinity_is_null(client: httpx.Client) -> None:
    """Which the codec writes for NaN, and reads as NaN."""
    bias = np.array([[0, np.nan], [0, 0]])
    answer = infer(client, [NumpyCodec.encode_input("input", EYE), NumpyCodec.encode_input("bias", bias)], scale=1.0)
    np.testing.assert_allclose(NumpyCodec.decode_output(answer.outputs[1]), [[1, 0], PAIR[::-1]], rtol=1e-15)
