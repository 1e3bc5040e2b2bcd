# mypy: disable-error-code="import-not-found,misc,no-any-unimported,attr-defined"
"""Ray Serve: JSON by its own encoder; safetensors as raw bytes."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import ray
from ray import serve
from safetensors.numpy import load, save
from starlette.requests import Request
from starlette.responses import Response

from benchmarks.peers.attention import attention, port

NAMES = ("query", "key", "value")


# Without num_cpus a replica computes with one thread.
@serve.deployment(num_replicas=1, max_ongoing_requests=64, ray_actor_options={"num_cpus": os.cpu_count()})
class Attention:
    """One replica, behind Ray's proxy in another process."""

    async def __call__(self, request: Request) -> Any:
        if request.headers["content-type"] == "application/json":
            body = await request.json()
            output, weights = attention(*(np.array(body[name], np.float32) for name in NAMES))
            return {"output": output, "attention_weights": weights}
        given = load(await request.body())
        output, weights = attention(*(given[name] for name in NAMES))
        found = {"output": output} if "no_weights" in given else {"output": output, "attention_weights": weights}
        return Response(save(found), media_type="application/octet-stream")


if __name__ == "__main__":
    # Served on this machine only, so no token in the home directory is needed.
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    ray.init(include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
    serve.start(http_options={"host": "127.0.0.1", "port": port()}, logging_config={"enable_access_log": False})
    serve.run(Attention.bind(), blocking=True)
