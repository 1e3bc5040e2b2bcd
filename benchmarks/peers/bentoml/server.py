# mypy: disable-error-code="import-not-found,misc,no-any-unimported,untyped-decorator"
"""BentoML: NumPy arrays in JSON; safetensors as raw bytes."""

import os
import sys
from typing import Annotated

import bentoml
import numpy as np
from bentoml.validators import ContentType, DType
from safetensors.numpy import load, save

from benchmarks.peers.attention import attention, port

Array = Annotated[np.ndarray, DType("float32")]


class Answer(bentoml.IODescriptor):
    """The JSON answer."""

    output: Array
    attention_weights: Array


@bentoml.service(workers=1, metrics={"enabled": False}, logging={"access": {"enabled": False}})
class Attention:
    """One method per request format."""

    @bentoml.api
    def attention(self, query: Array, key: Array, value: Array) -> Answer:
        output, weights = attention(query, key, value)
        return Answer(output=output, attention_weights=weights)

    @bentoml.api
    def tensors(self, body: bytes, /) -> Annotated[bytes, ContentType("application/octet-stream")]:
        given = load(body)
        output, weights = attention(given["query"], given["key"], given["value"])
        return save({"output": output} if "no_weights" in given else {"output": output, "attention_weights": weights})


if __name__ == "__main__":
    # Keep its files out of the home directory, and its telemetry off.
    os.environ |= {"BENTOML_HOME": f"{sys.prefix}/home", "BENTOML_DO_NOT_TRACK": "True"}
    serve = ["-m", "bentoml", "serve", "benchmarks.peers.bentoml.server:Attention", "--host", "127.0.0.1"]
    os.execv(sys.executable, [sys.executable, *serve, "--port", str(port())])
