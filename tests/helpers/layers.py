"""A stored layer made by hand, the same fields inline, files with any tensors, and a store with a clock of its own."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from attention_service.layers.files import write_layer
from attention_service.layers.store import LayerStore

HEADS, FEATURES, LENGTH = 2, 8, 5
ROLES = ("query", "key", "value", "output")
OPTIONS: dict[str, Any] = {"num_heads": HEADS, "scale": 0.3, "rotary": {"base": 100.0}, "is_causal": True}
GIB = 2**30


def numbers(*shape: int, seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def arrays(seed: int = 0, features: int = FEATURES) -> dict[str, np.ndarray]:
    found = {f"projection.{role}.weight": numbers(features, features, seed=seed + i) for i, role in enumerate(ROLES)}
    return found | {"projection.query.bias": numbers(features, seed=seed + 9), "sinks": numbers(HEADS, seed=seed + 10)}


def inline(seed: int = 0) -> dict[str, Any]:
    """The fields of a request that are the layer of `arrays`, as lists."""
    found: dict[str, Any] = {}
    for name, array in arrays(seed).items():
        *path, last = name.split(".")
        inner = found
        for step in path:
            inner = inner.setdefault(step, {})
        inner[last] = array.tolist()
    return found | OPTIONS


INPUT = numbers(LENGTH, FEATURES, seed=20, dtype=np.float64)


def ask(client: httpx.Client, **fields: Any) -> httpx.Response:
    return client.post("/attention", json={"input": INPUT.tolist()} | fields)


def store(folder: Path, limit: int = GIB, **more: Any) -> tuple[LayerStore, list[float]]:
    """A store whose clock is the first number of a list."""
    now = [0.0]
    return LayerStore(folder, limit, clock=lambda: now[0], pause=more.pop("pause", lambda seconds: None)), now


def write_layers(folder: Path, *seeds: int) -> Path:
    """Write the layers bert-0, bert-1 and so on into the folder, one for each seed of `arrays`."""
    for i, seed in enumerate(seeds):
        write_layer(folder, f"bert-{i}", arrays(seed), OPTIONS, "made by hand")
    return folder


def hashed(folder: Path, content: bytes, name: str = "bad", **more: Any) -> None:
    """Write a layer with any tensors, and a hash that agrees with them."""
    (folder / f"{name}.safetensors").write_bytes(content)
    about = {"hash": hashlib.sha256(content).hexdigest(), "options": {"num_heads": HEADS}} | more
    (folder / f"{name}.json").write_text(json.dumps(about))


def safetensors(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(shape: Any, begin: Any, end: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


WEIGHT = "projection.query.weight"
GOOD = {WEIGHT: entry([2, 2], 0, 16)}


def listed(layers: LayerStore) -> dict[str, str]:
    """Why each layer cannot be used, as the list says it; "" for those that can."""
    return {layer.name: layer.error or "" for layer in layers.describe_all()}
