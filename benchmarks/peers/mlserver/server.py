# mypy: disable-error-code="import-not-found,misc,no-any-unimported"
"""MLServer: the v2 protocol in JSON; arrays as lists, or as base64 with datatype BYTES."""

from __future__ import annotations

import asyncio

import numpy as np
import uvloop
from mlserver import MLModel, MLServer, ModelSettings, Settings
from mlserver.codecs import Base64Codec, NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse, RequestInput, ResponseOutput

from benchmarks.peers.attention import attention, port


class Attention(MLModel):
    """Returns the requested outputs in the encoding of the inputs."""

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        output, weights = attention(*map(decode, payload.inputs))
        binary = payload.inputs[0].datatype == "BYTES"
        found = {"output": output, "attention_weights": weights}
        outputs = [encode(asked.name, found[asked.name], binary) for asked in payload.outputs]
        return InferenceResponse(model_name=self.name, outputs=outputs)


def decode(given: RequestInput) -> np.ndarray:
    """Return an input as an array. MLServer has no binary tensors; base64 is the fastest encoding that it reads."""
    if given.datatype != "BYTES":
        array: np.ndarray = NumpyCodec.decode_input(given)
        return array
    shape: list[int] = given.parameters.shape
    return np.frombuffer(Base64Codec.decode_input(given)[0], np.float32).reshape(shape)


def encode(name: str, array: np.ndarray, binary: bool) -> ResponseOutput:
    """Return a tensor of the answer."""
    return Base64Codec.encode_output(name, [array.tobytes()]) if binary else NumpyCodec.encode_output(name, array)


async def main() -> None:
    """Serve and compute in one process: small requests are faster without the queue to a worker."""
    settings = Settings(
        host="127.0.0.1", http_port=port(), grpc_port=0, parallel_workers=0, metrics_endpoint=None, debug=False
    )
    await MLServer(settings).start([ModelSettings(name="attention", implementation=Attention)])


if __name__ == "__main__":
    uvloop.install()
    asyncio.run(main())
