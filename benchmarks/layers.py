"""What a stored layer saves: requests with `layer` beside the same with its projections inline, and without any.

    python -m benchmarks.layers

A layer of BERT's size: 768 features, 12 heads, 128 tokens. All in one process, over HTTP, one request at a time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import httpx
import numpy as np

from service.layers.files import write_layer
from tests.conftest import app, serving
from tests.helpers import wire

FEATURES: Final = 768
HEADS: Final = 12
TOKENS: Final = 128
ROLES: Final = ("query", "key", "value", "output")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    options.add_argument("--requests", type=int, default=20, help="of each kind (default: 20)")
    count = options.parse_args().requests
    random = np.random.default_rng(0)
    maps = {role: random.normal(size=(FEATURES, FEATURES), scale=FEATURES**-0.5).astype(np.float32) for role in ROLES}
    tokens = random.normal(size=(TOKENS, FEATURES)).astype(np.float32)
    inline = {"projection": {role: {"weight": weight} for role, weight in maps.items()}, "num_heads": HEADS}
    common: dict[str, Any] = {"input": tokens, "include": []}
    with TemporaryDirectory() as folder:
        weights = {f"projection.{role}.weight": weight for role, weight in maps.items()}
        write_layer(Path(folder), "bert", weights, {"num_heads": HEADS}, "random")
        with serving(app(layers=Path(folder))) as client:
            times = {
                f"{kind}, {name}": measured(client, wire.write(common | fields, media_type), media_type, count)
                for kind, media_type in (("JSON", wire.JSON), ("safetensors", wire.SAFETENSORS))
                for name, fields in (("layer", {"layer": "bert"}), ("inline", inline), ("none", {"num_heads": HEADS}))
            }
    for name, (seconds, size, timing) in times.items():
        print(f"{name:22} {seconds * 1e3:8.1f} ms   {size / 1e6:7.2f} MB   {timing}")
    for kind in ("JSON", "safetensors"):
        ratio = times[f"{kind}, inline"][0] / times[f"{kind}, layer"][0]
        print(f"{kind}: with a layer {ratio:.1f} times as fast as inline")


def measured(client: httpx.Client, body: bytes, media_type: str, count: int) -> tuple[float, int, str]:
    """The median time of a request, its size, and the times of its steps."""
    post: Callable[[], httpx.Response] = lambda: client.post(  # noqa: E731
        "/attention", content=body, headers={"Content-Type": media_type}
    )
    for _ in range(2):
        post().raise_for_status()
    taken = []
    for _ in range(count):
        start = time.perf_counter()
        response = post()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken), len(body), response.headers["Server-Timing"]


if __name__ == "__main__":
    main()
