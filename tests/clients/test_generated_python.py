"""The generated Python client."""

from __future__ import annotations

import base64
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "build" / "clients" / "python"))

from attention_client import Client
from attention_client import models as m
from attention_client.api.attention import compare_call, compute_attention, compute_call
from attention_client.api.inference_protocol import infer
from attention_client.api.operations import describe_problem

EYE = [[1.0, 0.0], [0.0, 1.0]]


@pytest.fixture(scope="module")
def generated(client: httpx.Client) -> Iterator[Client]:
    with Client(base_url=str(client.base_url)) as found:
        yield found


def ask(generated: Client, **fields: Any) -> Any:
    answer = compute_attention.sync(client=generated, body=m.AttentionRequest(**fields))
    assert answer is not None
    return answer


def test_attention_returns_outputs_and_scores(generated: Client) -> None:
    answer = ask(generated, query=EYE, key=EYE, value=[[1.0], [2.0]], scale=0.0, include=[m.IncludedOutput.SCORES])
    assert (answer.output, answer.scores) == ([[1.5], [1.5]], EYE)
    assert answer.metadata.num_heads == 1


def test_a_projection_is_applied(generated: Client) -> None:
    """A projection of the values doubles them."""
    double = m.LinearMap(kernel=[[2.0, 0.0], [0.0, 2.0]])
    answer = ask(generated, input_=EYE, scale=0.0, projection=m.Projection(value=double))
    assert answer.output == [[1, 1], [1, 1]]


def test_a_mask_and_a_window_hide_keys(generated: Client) -> None:
    assert ask(generated, input_=EYE, mask=[[False, True], [True, True]]).attention_weights[0] == [0, 1]
    answer = ask(generated, input_=EYE, layout=m.Layout.LD, window=m.Window(left=0, right=0), query_offset=0)
    assert answer.attention_weights == EYE


def test_base64_arrays_are_received_and_returned(generated: Client) -> None:
    data = base64.b64encode(np.eye(2, dtype="<f4").tobytes()).decode()
    tensor = m.EncodedTensor(dtype=m.ElementType.FLOAT32, shape=[2, 2], data=data)
    answer = ask(generated, input_=tensor, scale=0.0, encoding=m.Encoding.BASE64)
    assert isinstance(answer.output, m.EncodedTensor)
    assert (answer.output.dtype, answer.output.shape) == (m.ElementType.FLOAT32, [2, 2])
    assert np.frombuffer(base64.b64decode(answer.output.data), "<f4").tolist() == [0.5] * 4


def test_a_call_is_computed_and_judged(generated: Client) -> None:
    """Of two equal keys: the mean of their values."""
    token = [[[[1.0]]]]
    keys = {"k": [[[[0.0]], [[0.0]]]], "v": [[[[1.0]], [[3.0]]]]}
    call: dict[str, Any] = {"call": "flash_attn.flash_attn_func"}
    call["arguments"] = m.CallRequestArguments.from_dict({"q": token, **keys})
    request = m.CallRequest(**call, include=[m.CallOutput.ATTENTION_WEIGHTS])
    answer = compute_call.sync(client=generated, body=request)
    assert isinstance(answer, m.CallResponse)
    assert (answer.output, answer.attention_weights) == ([[[[2.0]]]], [[[[0.5, 0.5]]]])
    call["arguments"] = m.CompareCallRequestArguments.from_dict({"q": token, **keys})
    judged = m.CompareCallRequest(**call, actual=m.ActualOfCall(output=token))
    report = compare_call.sync(client=generated, body=judged)
    assert isinstance(report, m.CompareReport)
    assert report.verdict.status == m.ComparisonStatus.WRONG


def test_an_error_is_a_problem(generated: Client) -> None:
    problem = ask(generated, query=EYE, key=[[1.0]], value=[[1.0]])
    assert isinstance(problem, m.Problem)
    assert (problem.status, problem.code, problem.errors[0].pointer) == (422, "shape_mismatch", "/key")
    described = describe_problem.sync(problem.code, client=generated)
    assert isinstance(described, m.ProblemType)
    assert described.status == 422


def test_inference_returns_outputs_or_an_error(generated: Client) -> None:
    tensor = m.InferenceInput(name="input", shape=[2, 2], datatype=m.TensorDatatype.FP32, data=[1, 0, 0, 1])
    parameters = m.InferenceParameters.from_dict({"scale": 0})
    request = m.InferenceRequest(inputs=[tensor], parameters=parameters)
    answer = infer.sync("attention", client=generated, body=request)
    assert isinstance(answer, m.InferenceResponse)
    assert answer.outputs[0].data == [0.5] * 4
    error = infer.sync("other", client=generated, body=request)
    assert isinstance(error, m.InferenceError)
    assert "the model attention" in error.error
