"""The torch backend as on a GPU, as far as torch can pretend that there is one: no number is computed.

torch follows where tensors lie, and their types and shapes. To mix two devices or two types is an error, and so is to
look at a number, for which a thread would wait until a GPU has computed it. Put in place of a GPU: the crossing to it
and back, its events, and its choice of a kernel.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from service.attention.arrays import BFLOAT16
from service.attention.operands import make_operands
from service.attention.plan import make_plan
from service.library import backends
from service.schemas.request import AttentionRequest
from service.schemas.validate import validate
from tests.cases import CASES, Case
from tests.helpers.backends import HAS_TORCH, compute_as_if_large
from tests.helpers.by_flex import random_request
from tests.test_corner_cases import CORNERS, Corner, finite, include

if HAS_TORCH:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.nn.attention import SDPBackend
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    from service.backends.torch import devices, sdpa, staging
    from service.backends.torch.backend import TorchBackend

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def gpu() -> Any:
    """A kind of device that torch knows no kernels for."""
    _setup_privateuseone_for_python_backend("pretended")
    return torch.device("pretended", 0)


class Pace:
    """Of devices that are never behind."""

    def __init__(self, device: Any, ahead: int) -> None:
        pass

    def step(self) -> None:
        pass


def send(array: np.ndarray, device: Any) -> Any:
    return torch.empty(array.shape, dtype=staging._tensor(np.empty(0, array.dtype)).dtype, device=device)


def fetch(tensors: dict[str, Any]) -> dict[str, np.ndarray]:
    assert {tensor.device.type for tensor in tensors.values()} == {"pretended"}
    return {name: zeros(tensor) for name, tensor in tensors.items()}


def zeros(tensor: Any) -> np.ndarray:
    name = str(tensor.dtype).removeprefix("torch.")
    return np.zeros(tuple(tensor.shape), BFLOAT16 if name == "bfloat16" else name)


@pytest.fixture(params=["a kernel fits", "none fits"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    fits = request.param == "a kernel fits"
    choice = SDPBackend.EFFICIENT_ATTENTION if fits else SDPBackend.MATH
    monkeypatch.setattr(sdpa, "choose", lambda *given: choice.value)
    monkeypatch.setattr(staging, "send", send)
    monkeypatch.setattr(staging, "fetch", fetch)
    monkeypatch.setattr(devices, "Pace", Pace)
    return "efficient_attention" if fits else "dense"


def check(fields: dict[str, Any], gpu: Any, kernel: str) -> str:
    """Which kernel ran, of those that may; all that comes back is of the shapes and types that the CPU gives."""
    untyped = {name for name, value in fields.items() if isinstance(value, list)}
    spec = validate(AttentionRequest, fields).attention_spec(untyped, allow_non_finite=True)
    plan = make_plan(spec)
    operands = make_operands(spec, plan, spec.sources)
    backend = backends().choose("torch", "cpu")
    assert isinstance(backend, TorchBackend)
    with FakeTensorMode(), torch.inference_mode():
        found = backend.compute(plan, operands, gpu, lambda: None)
    expected = backend.execute(plan, operands, "cpu")
    for computed in (found, expected):
        computed.arrays.pop("top_indices", None)
    assert {name: (array.shape, array.dtype) for name, array in found.arrays.items()} == {
        name: (array.shape, array.dtype) for name, array in expected.arrays.items()
    }
    assert found.device == "pretended:0"
    assert found.kernel in ("dense", kernel)
    return found.kernel


@pytest.mark.parametrize("case", [case for case in CASES if case.request.get("normalization") != "sum"],
                         ids=lambda case: case.name)  # fmt: skip
def test_golden_cases(case: Case, gpu: Any, kernel: str) -> None:
    check(case.request, gpu, kernel)


def watched(corner: Corner) -> bool:
    """Whether numbers must be looked at: what is not finite, sums that may be 0, scores that may overflow."""
    request = corner.request
    largest = max(np.max(np.abs(x)) for x in map(np.asarray, request.values()) if x.dtype.kind == "f" and x.size)
    divides_by_anything = request.get("query_norm", {}).get("eps") == 0
    return not finite(request) or request.get("normalization") == "sum" or largest > 1e15 or divides_by_anything


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("corner", [corner for corner in CORNERS if not watched(corner)],
                         ids=lambda corner: corner.name)  # fmt: skip
def test_corners(corner: Corner, dtype: str, gpu: Any, kernel: str) -> None:
    check({"dtype": dtype} | corner.request | {"include": include(corner.expected)}, gpu, kernel)


@pytest.mark.parametrize("seed", range(40))
def test_random_requests(seed: int, gpu: Any, kernel: str) -> None:
    request = random_request(seed)
    for dtype in {request.dtype, "bfloat16"}:
        check({**request.fields, "dtype": dtype}, gpu, kernel)


def test_what_no_scores_are_asked_of_takes_a_fused_kernel(gpu: Any, kernel: str) -> None:
    query = np.ones((1, 4, 6, 8), np.float32)
    arrays = {"query": query, "key": query[:, :2], "value": query[:, :2], "include": []}
    for options in ({}, {"is_causal": True}, {"key_lengths": [3]}, {"mask": query[0, 0, :, :6] > 0}):
        assert check(arrays | options, gpu, kernel) == kernel
    assert check(arrays | {"dtype": "bfloat16", "is_causal": True}, gpu, kernel) == kernel
    assert check(arrays | {"dtype": "float64"}, gpu, kernel) == "dense"


CHOSEN: dict[str, dict[str, Any]] = {
    "heads": {"select_heads": [3, 1]},
    "queries": {"select_queries": [4, 0, 2], "is_causal": True},
    "both": {"select_heads": [2], "select_queries": [5, 6], "window": {"left": 2}},
    "an average": {"average_heads": True, "select_heads": [0, 3]},
    "the largest": {"top_k": 2, "select_queries": [1, 3], "key_lengths": [6]},
}


@pytest.mark.parametrize("tile", [1, 40, 2**20])
@pytest.mark.parametrize("name", CHOSEN)
def test_parts(name: str, tile: int, gpu: Any, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the scores, in one tile and in many."""
    compute_as_if_large(monkeypatch, tile)
    stages = [] if "top_k" in CHOSEN[name] else ["scores", "masked_scores"]
    returned = {"include": ["attention_weights", "received", "entropy", "logsumexp", *stages]}
    check({"input": np.ones((7, 8)), "num_heads": 4} | returned | CHOSEN[name], gpu, kernel)
