# mypy: disable-error-code="import-not-found,misc,no-any-unimported"
"""Triton through PyTriton: the v2 protocol, in JSON and with binary tensors."""

from __future__ import annotations

import os
import sysconfig

import numpy as np
from pytriton.model_config import ModelConfig, Tensor
from pytriton.proxy.types import Request
from pytriton.triton import Triton, TritonConfig

from benchmarks.peers.attention import attention, port

# Triton starts another Python, which finds libpython on the path of the dynamic linker.
LIBRARIES = "LD_LIBRARY_PATH"
THREE_AXES = (-1, -1, -1)


def infer(requests: list[Request]) -> list[dict[str, np.ndarray]]:
    """Return the requested outputs only, as all that is returned is copied between processes."""
    return [answer(request) for request in requests]


def answer(request: Request) -> dict[str, np.ndarray]:
    """Return the outputs that one request asks for."""
    output, weights = attention(*(request[name] for name in ("query", "key", "value")))
    found = {"output": output, "attention_weights": weights}
    return {name: found[name] for name in request.requested_output_names or found}


def main() -> None:
    """Serve one instance of the model."""
    config = TritonConfig(
        http_address="127.0.0.1", http_port=port(), allow_grpc=False, allow_metrics=False, allow_gpu_metrics=False
    )
    with Triton(config=config) as triton:
        triton.bind(
            model_name="attention",
            infer_func=infer,
            inputs=[Tensor(name=name, dtype=np.float32, shape=THREE_AXES) for name in ("query", "key", "value")],
            outputs=[Tensor(name=name, dtype=np.float32, shape=THREE_AXES) for name in ("output", "attention_weights")],
            config=ModelConfig(batching=False),
        )
        triton.serve()


if __name__ == "__main__":
    paths = [str(sysconfig.get_config_var("LIBDIR")), *filter(None, [os.environ.get(LIBRARIES)])]
    os.environ[LIBRARIES] = os.pathsep.join(paths)
    main()
