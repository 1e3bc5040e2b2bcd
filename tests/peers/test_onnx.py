"""All tests of onnx for Attention and RotaryEmbedding pass over HTTP, on both backends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from attention_service.codecs.typed_arrays import decode
from tests.conftest import uncaptured
from tests.peers.compare import deviation
from tests.peers.onnx_cases import OnnxCase, attention_request, collect, rotary_request

# How many tests onnx has. Tests are named by numbers, so that only the process that runs them collects what onnx has.
ATTENTION, ROTARY = 93, 8
# Relative to the largest number of a tensor.
TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}


@pytest.fixture(scope="module")
def counts(request: pytest.FixtureRequest) -> Iterator[Counter[tuple[str, str]]]:
    """Counts of outcomes by group, printed as a table after the last test."""
    found: Counter[tuple[str, str]] = Counter()
    yield found
    with uncaptured(request):
        print("\n\nonnx tests over HTTP:           passed  not expressible  failed")
        for group in sorted({group for group, _ in found}):
            row = [found[group, outcome] for outcome in ("passed", "not expressible", "failed")]
            print(f"  {group:28} {row[0]:8} {row[1]:16} {row[2]:7}")


def test_onnx_has_the_expected_number_of_tests() -> None:
    assert len(collect("Attention")) == ATTENTION
    assert {case.opset for case in collect("Attention")} == {23, 24, 25}
    assert len(collect("RotaryEmbedding")) == ROTARY


def post(client: httpx.Client, request: dict[str, Any]) -> dict[str, Any]:
    response = client.post("/attention", json=request | {"encoding": "base64"})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def compare(ours: dict[str, Any], theirs: np.ndarray, name: str) -> None:
    tolerance = TOLERANCE[theirs.dtype.name]
    found = deviation(decode(ours, ""), theirs)
    assert found <= tolerance, f"{name}: {found:.2e} > {tolerance:.0e}"


@pytest.mark.parametrize("backend", ["numpy", "torch"])
@pytest.mark.parametrize("number", range(ATTENTION))
def test_attention_agrees_with_onnx(
    number: int, backend: str, client: httpx.Client, counts: Counter[tuple[str, str]]
) -> None:
    case = collect("Attention")[number]
    group = f"Attention, {backend}"
    counts[group, "failed"] += 1
    request, fields = attention_request(case)
    answer = post(client, request | {"backend": backend})
    for theirs, ours in fields.items():
        compare(answer[ours], case.outputs[theirs], f"{theirs} of {case.name}")
    assert answer["metadata"]["backend"] == backend
    counts[group, "failed"] -= 1
    counts[group, "passed"] += 1


def rotated(case: OnnxCase) -> np.ndarray:
    """The expected output of a test of RotaryEmbedding in the shape of our output `query`: (b, h, l, d)."""
    (theirs,) = case.outputs.values()
    if theirs.ndim == 3:  # (b, l, h·d)
        b, length, _ = theirs.shape
        heads = case.attributes["num_heads"]
        theirs = theirs.reshape(b, length, heads, -1).transpose(0, 2, 1, 3)
    return theirs


@pytest.mark.parametrize("backend", ["numpy", "torch"])
@pytest.mark.parametrize("number", range(ROTARY))
def test_rotary_embedding_agrees_with_onnx(
    number: int, backend: str, client: httpx.Client, counts: Counter[tuple[str, str]]
) -> None:
    case = collect("RotaryEmbedding")[number]
    group = f"RotaryEmbedding, {backend}"
    counts[group, "failed"] += 1
    answer = post(client, rotary_request(case) | {"backend": backend})
    compare(answer["query"], rotated(case), f"Y of {case.name}")
    counts[group, "failed"] -= 1
    counts[group, "passed"] += 1
