"""Every operation ends within its limits of time and memory, whatever its valid body asks for.

A real server with small limits is sent large bodies of unusual shapes. What is measured is its peak of resident memory
and the processor time until the answer, whatever the status: most bodies are refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import pytest

from tests.attack.server import Live, live, post
from tests.helpers.oip import INFER
from tests.helpers.wire import JSON, NPZ, SAFETENSORS, write

TIME_LIMIT: Final = 2.0
MEMORY_LIMITS: Final = (384, 1536)
BODY: Final = 16
# A busy machine may disturb a measurement: the best of so many rounds counts.
ROUNDS: Final = 3
PATIENCE: Final = 600.0


def heads(h: int, g: int, q: int, k: int, d: int, e: int, dtype: type = np.float16) -> dict[str, Any]:
    random = np.random.default_rng(0)
    shapes = {"query": (h, q, d), "key": (g, k, d), "value": (g, k, e)}
    arrays: dict[str, Any] = {
        name: random.standard_normal(shape, np.float32).astype(dtype) for name, shape in shapes.items()
    }
    return {**arrays, "layout": "hld"}


# Fields whose arrays take nearly all of the largest body, in one shape each.
SHAPES: Final[dict[str, Callable[[], dict[str, Any]]]] = {
    "very wide": lambda: heads(1, 1, 2, 2, 1_500_000, 4),
    "wide values": lambda: heads(1, 1, 2, 2, 4, 3_000_000),
    "wide and square": lambda: heads(1, 1, 60, 60, 50_000, 16),
    "many keys": lambda: heads(1, 1, 1, 200_000, 16, 16),
    "many keys for many heads": lambda: heads(500, 1, 1, 20_000, 64, 64),
    "many queries": lambda: heads(1, 1, 400_000, 1, 8, 8),
    "many heads": lambda: heads(20_000, 20_000, 4, 4, 16, 16),
    "long and narrow": lambda: heads(1, 1, 20_000, 20_000, 64, 64),
    "few numbers, many scores": lambda: heads(1, 1, 8_000, 8_000, 1, 1),
    "float64": lambda: heads(4, 4, 1000, 1000, 64, 64, np.float64),
}
OPERATIONS: Final = {
    "attention in npz": ("/attention", NPZ),
    "attention in safetensors": ("/attention", SAFETENSORS),
    "compare": ("/attention/compare", SAFETENSORS),
    "heatmap": ("/attention/heatmap", SAFETENSORS),
}
# Text takes several times the bytes of each number.
TEXT: Final[dict[str, Callable[[], dict[str, Any]]]] = {
    "very wide": lambda: heads(1, 1, 2, 2, 200_000, 4),
    "many keys": lambda: heads(1, 1, 1, 30_000, 8, 8),
    "few numbers, many scores": lambda: heads(1, 1, 8_000, 8_000, 1, 1),
}


class Limited(NamedTuple):
    """A running server, and its limit of memory in MiB."""

    server: Live
    limit: int


@pytest.fixture(scope="module", params=MEMORY_LIMITS)
def limited(request: pytest.FixtureRequest) -> Iterator[Limited]:
    """A server that refuses most of the bodies by their estimate, and one that computes most of them."""
    memory, body = f"{request.param}MiB", f"{BODY}MiB"
    with live(
        memory_limit=memory, max_body_bytes=body, time_limit=TIME_LIMIT, threads=1, log_level="critical"
    ) as started:
        for path in ("/attention", "/attention/compare", "/attention/heatmap"):  # what a process needs once
            started.ask(post(write(heads(2, 1, 300, 300, 16, 16), SAFETENSORS), SAFETENSORS, path), PATIENCE)
        yield Limited(started, request.param)


def check_limits(limited: Limited, request: bytes) -> None:
    """Send a request until time and memory are within the limits. Errors: AssertionError after ROUNDS rounds."""
    server, limit = limited
    idle = server.running.resident()
    for left in reversed(range(ROUNDS)):
        server.running.forget_peak()
        before = server.running.processor_seconds()
        status, _ = server.ask(request, PATIENCE)
        used, peak = server.running.processor_seconds() - before, server.running.peak()
        print(f"{status}: {used:.1f} s of processor time, {peak:.0f} MB of {limit} + {idle:.0f}")
        assert status in (200, 413, 422, 503, 504)
        assert peak <= (limit + idle) * 1.1
        if used <= TIME_LIMIT + 1:
            return
        assert left, f"{used:.1f} s"


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_time_and_memory_are_within_the_limits(limited: Limited, operation: str, shape: str) -> None:
    path, media_type = OPERATIONS[operation]
    fields = SHAPES[shape]()
    if operation == "compare":
        (h, q, _), e = fields["query"].shape, fields["value"].shape[2]
        fields["actual"] = {"output": np.zeros((h, q, e), np.float16)}
    check_limits(limited, post(write(fields, media_type), media_type, path))


@pytest.mark.parametrize("path", ["/attention", "/attention/compare", "/attention/heatmap"])
@pytest.mark.parametrize("shape", TEXT)
def test_text_is_within_the_limits(limited: Limited, path: str, shape: str) -> None:
    # The limit of time ends with the computation: weights as text would take longer to write.
    more: dict[str, Any] = {"include": []} if path == "/attention" else {}
    check_limits(limited, post(write(TEXT[shape]() | more, JSON), JSON, path))


@pytest.mark.parametrize("shape", TEXT)
def test_the_inference_protocol_is_within_the_limits(limited: Limited, shape: str) -> None:
    arrays = {name: array for name, array in TEXT[shape]().items() if isinstance(array, np.ndarray)}
    inputs = [
        {"name": name, "shape": list(array.shape), "datatype": "FP32", "data": array.astype(float).ravel().tolist()}
        for name, array in arrays.items()
    ]
    body = {"inputs": inputs, "outputs": [{"name": "output"}], "parameters": {"layout": "hld"}}
    check_limits(limited, post(json.dumps(body).encode(), JSON, INFER))


def test_the_list_of_layers_is_within_the_limits(limited: Limited) -> None:
    check_limits(limited, b"GET /layers HTTP/1.1\r\nHost: x\r\n\r\n")


def resident_after(server: Live, count: int) -> float:
    """Resident memory in MB after so many comparisons of several sizes, most of them wrong."""
    for n in range(count):
        h, tokens, d = [(1, 256, 64), (2, 300, 16), (4, 128, 128), (16, 256, 64)][n % 4]
        fields = heads(h, h, tokens, tokens, d, d)
        fields["actual"] = {"output": np.zeros((h, tokens, d), np.float16)}
        server.ask(post(write(fields, SAFETENSORS), SAFETENSORS, "/attention/compare"), PATIENCE)
    return server.running.resident()


def test_comparisons_leave_no_memory_behind() -> None:
    # A thread that joins keeps the arena of its first comparisons, once. A leak grows with each round.
    with live(memory_limit="1GiB", threads=1, log_level="critical") as server:
        after = [resident_after(server, 20) for _ in range(5)]
        assert min(np.diff(after)) <= after[0] * 0.01, after
        assert after[-1] <= after[0] * 1.5, after
