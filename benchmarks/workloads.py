"""The workloads: the same arrays for every server, and the expected answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

# A name that the service is asked by, and what httpx sends beside the length and type of the body.
HOST = "attention.example"
HTTPX = {
    "Host": HOST,
    "Accept": "*/*",
    "Accept-Encoding": "gzip, deflate",
    "Connection": "keep-alive",
    "User-Agent": "python-httpx/0.28.1",
}
# The name of the same requests through nginx.
BEHIND_NGINX = "W1 nginx"


@dataclass(frozen=True)
class Workload:
    """Query, key and value, and how to measure a server with them.

    weights: True if the request asks for the attention weights; binary: True for the server's best binary format,
    False for JSON; times: requests per measurement of latency; bursts: measurements of latency per round (short
    requests need several, as their latency depends on which processors the scheduler gives to server and client);
    headers: of the request, beside those of its format
    """

    name: str
    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    weights: bool
    binary: bool
    times: int
    bursts: int = 1
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        return {"query": self.query, "key": self.key, "value": self.value}

    @property
    def answers(self) -> tuple[str, ...]:
        """The names of the requested arrays."""
        return ("output", "attention_weights") if self.weights else ("output",)

    def check(self, found: dict[str, np.ndarray]) -> None:
        """Compare an answer with plain NumPy in float64. Errors: ValueError."""
        query, key, value = (array.astype(np.float64) for array in self.arrays.values())
        scores = query @ key.swapaxes(-1, -2) / np.sqrt(query.shape[-1])
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        for name, right in {"output": weights @ value, "attention_weights": weights}.items():
            if name not in self.answers:
                continue
            if name not in found or found[name].size != right.size:
                raise ValueError(f"{self.name}: no {name} of {right.shape}")
            if not np.allclose(found[name].reshape(right.shape), right, rtol=1e-4, atol=1e-5):
                raise ValueError(f"{self.name}: wrong {name}")
        if "attention_weights" in found and not self.weights:
            raise ValueError(f"{self.name}: weights that were not requested")


def workloads() -> dict[str, Workload]:
    """Return W1 to W4 by name; W1 also with the headers of a usual client."""
    random = np.random.default_rng(0)

    def arrays(*shape: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        query, key, value = (random.normal(size=shape).astype(np.float32) for _ in range(3))
        return query, key, value

    first, third = arrays(6, 4), arrays(512, 64)
    loads = [
        Workload("W1", *first, weights=True, binary=False, times=200, bursts=4),
        Workload("W1 httpx", *first, weights=True, binary=False, times=200, bursts=4, headers=HTTPX),
        Workload("W2", *arrays(128, 64), weights=True, binary=False, times=100),
        Workload("W3", *third, weights=True, binary=False, times=25),
        Workload("W3 binary", *third, weights=True, binary=True, times=25),
        Workload("W4", *arrays(8, 1024, 64), weights=False, binary=True, times=15),
    ]
    return {load.name: load for load in loads}
