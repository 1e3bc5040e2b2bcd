# mypy: disable-error-code="import-not-found,misc,no-any-unimported"
"""KServe: the v2 protocol, in JSON and with binary tensors."""

from __future__ import annotations

import sys

import numpy as np
from kserve import InferOutput, InferRequest, InferResponse, Model, ModelServer
from kserve.utils.utils import generate_uuid

from benchmarks.peers.attention import attention, port


class Attention(Model):
    """Returns the requested outputs."""

    def __init__(self) -> None:
        super().__init__("attention")
        self.ready = True

    def predict(self, payload: InferRequest, headers: dict[str, str] | None = None) -> InferResponse:
        output, weights = attention(*(given.as_numpy() for given in payload.inputs))
        found = {"output": output, "attention_weights": weights}
        asked = payload.request_outputs
        return InferResponse(
            response_id=payload.id or generate_uuid(),
            model_name=self.name,
            infer_outputs=[tensor(out.name, found[out.name], bool(out.binary_data)) for out in asked],
            requested_outputs=asked,
        )


def tensor(name: str, array: np.ndarray, binary: bool) -> InferOutput:
    """Return a tensor of the answer: bytes after the JSON if binary, else a list in it."""
    found = InferOutput(name=name, shape=list(array.shape), datatype="FP32")
    if binary:
        found.set_data_from_numpy(array, binary_data=True)
    else:
        found.data = array.ravel().tolist()
    return found


if __name__ == "__main__":
    server_port = port()
    del sys.argv[1:]  # KServe parses them, too
    ModelServer(http_port=server_port, workers=1, enable_grpc=False, enable_latency_logging=False).start([Attention()])
