# mypy: disable-error-code="import-not-found,misc,no-any-unimported"
"""LitServe: JSON by its own encoder; safetensors as raw bytes."""

from typing import Annotated, Any

import litserve
import numpy as np
from fastapi import Body, Response
from safetensors.numpy import load, save

from benchmarks.peers.attention import attention, port

NAMES = ("query", "key", "value")


class Attention(litserve.LitAPI):
    """Receives a dict from FastAPI if the request is JSON, else bytes."""

    def setup(self, device: str) -> None:
        """Nothing to load."""

    def decode_request(self, request: Annotated[Any, Body()]) -> dict[str, Any]:
        if isinstance(request, bytes):
            return {**load(request), "binary": True}
        return {**{name: np.array(request[name], np.float32) for name in NAMES}, "binary": False}

    def predict(self, x: dict[str, Any]) -> dict[str, Any]:
        output, weights = attention(*(x[name] for name in NAMES))
        found = {"output": output, "attention_weights": weights}
        if "no_weights" in x:
            del found["attention_weights"]
        return {**found, "binary": x["binary"]}

    def encode_response(self, output: dict[str, Any]) -> Any:
        if output.pop("binary"):
            return Response(save(output), media_type="application/octet-stream")
        return {name: array.tolist() for name, array in output.items()}


if __name__ == "__main__":
    server = litserve.LitServer(Attention(), accelerator="cpu", workers_per_device=1, fast_queue=True)
    server.run("127.0.0.1", port(), num_api_servers=1, log_level="warning", generate_client_file=False)
