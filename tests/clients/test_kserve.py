"""KServe's Python client over REST, unmodified."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import numpy as np
import pytest
from kserve import InferenceRESTClient, InferInput, InferRequest, RESTConfig
from kserve.protocol.infer_type import RequestedOutput

EYE = np.eye(2, dtype=np.float32)
# softmax of (1, 0), times the identity
WEIGHTS = np.array([[1, np.exp(-1)], [np.exp(-1), 1]]) / (1 + np.exp(-1))


def ask(client: httpx.Client, question: Callable[[InferenceRESTClient, str], Awaitable[Any]]) -> Any:
    async def answer() -> Any:
        async with InferenceRESTClient(RESTConfig(protocol="v2")) as rest:
            return await question(rest, str(client.base_url))

    return asyncio.run(answer())


def test_health_and_readiness(client: httpx.Client) -> None:
    assert ask(client, lambda rest, url: rest.is_server_live(url)) is True
    assert ask(client, lambda rest, url: rest.is_server_ready(url)) is True
    assert ask(client, lambda rest, url: rest.is_model_ready(url, "attention")) is True
    assert ask(client, lambda rest, url: rest.is_model_ready(url, "other")) is False


@pytest.mark.parametrize("binary_output", [True, False])
@pytest.mark.parametrize("binary", [True, False])
def test_inference_returns_the_requested_outputs(client: httpx.Client, binary: bool, binary_output: bool) -> None:
    tensor = InferInput("input", [2, 2], "FP32")
    tensor.set_data_from_numpy(EYE, binary_data=binary)
    outputs = [RequestedOutput(name, parameters={"binary_data": binary_output}) for name in ("output", "scores")]
    request = InferRequest("attention", [tensor], request_id="5", parameters={"scale": 1.0}, request_outputs=outputs)
    answer = ask(client, lambda rest, url: rest.infer(url, request, model_name="attention"))
    assert (answer.id, answer.model_name) == ("5", "attention")
    found = {output.name: output.as_numpy() for output in answer.outputs}
    np.testing.assert_allclose(found["output"], WEIGHTS, rtol=1e-6)
    assert found["scores"].tolist() == EYE.tolist()
    assert answer.parameters["dtype"] == "float32"


def test_errors_have_a_status_and_a_message(client: httpx.Client) -> None:
    tensor = InferInput("quary", [2, 2], "FP32")
    tensor.set_data_from_numpy(EYE)
    request = InferRequest("attention", [tensor])
    with pytest.raises(httpx.HTTPStatusError, match=r"did you mean query\?.*422"):
        ask(client, lambda rest, url: rest.infer(url, request, model_name="attention"))
