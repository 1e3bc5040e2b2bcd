"""The torch backend on a simulated GPU: a device that torch tracks, but on which it computes no number.

torch tracks the devices, dtypes and shapes of tensors. Mixing two devices or two dtypes is an error, and so is
reading a number, for which a thread would wait until a GPU has computed it. Replaced by test code: the transfer to it
and back, its events, and its choice of a kernel.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from attention_service.attention.arrays import BFLOAT16
from attention_service.attention.operands import make_operands
from attention_service.attention.planning import make_plan
from attention_service.library import backends
from attention_service.schemas.request import AttentionRequest
from attention_service.schemas.validate import validate
from tests.cases import CASES, Case
from tests.helpers.backends import HAS_TORCH, compute_as_if_large
from tests.helpers.by_flex import random_request
from tests.test_corner_cases import CORNERS, Corner, finite, include

if HAS_TORCH:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.nn.attention import SDPBackend
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    from attention_service import torch_arrays
    from attention_service.backends.torch import devices, sdpa, staging
    from attention_service.backends.torch.backend import TorchBackend

pytestmark = pytest.mark.torch


@pytest.fixture(scope="session")  # torch knows one such device in a process
def gpu() -> Any:
    """A device for which torch has no kernels."""
    _setup_privateuseone_for_python_backend("pretended")
    return torch.device("pretended", 0)


class Pace:
    """The pace of a device that is never behind the CPU."""

    def __init__(self, device: Any, ahead: int) -> None:
        pass

    def step(self) -> None:
        pass


def send(array: np.ndarray, device: Any) -> Any:
    return torch.empty(array.shape, dtype=torch_arrays.as_tensor(np.empty(0, array.dtype)).dtype, device=device)


def fetch(tensors: dict[str, Any]) -> dict[str, np.ndarray]:
    assert {tensor.device.type for tensor in tensors.values()} == {"pretended"}
    return {name: zeros(tensor) for name, tensor in tensors.items()}


def zeros(tensor: Any) -> np.ndarray:
    name = str(tensor.dtype).removeprefix("torch.")
    return np.zeros(tuple(tensor.shape), BFLOAT16 if name == "bfloat16" else name)


@pytest.fixture(params=["a kernel fits", "no kernel fits"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    fits = request.param == "a kernel fits"
    choice = SDPBackend.EFFICIENT_ATTENTION if fits else SDPBackend.MATH
    monkeypatch.setattr(sdpa, "choose", lambda *given: choice.value)
    attention = torch.nn.functional.scaled_dot_product_attention

    def with_whole_rows(query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        """CUDA kernels read masks in 16 bytes: torch pads rows that are not, but not a column that is repeated."""
        if mask is not None and query.device.type != "cpu":
            assert mask.shape[-1] == key.shape[2]
        return attention(query, key, value, mask, **options)

    monkeypatch.setattr(sdpa, "scaled_dot_product_attention", with_whole_rows)
    monkeypatch.setattr(staging, "send", send)
    monkeypatch.setattr(staging, "fetch", fetch)
    monkeypatch.setattr(devices, "Pace", Pace)
    return "efficient_attention" if fits else "dense"


def check(fields: dict[str, Any], gpu: Any, kernel: str) -> str:
    """The kernel that ran. Asserts that it may run, and that results have the shapes and dtypes of those on the CPU."""
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
def test_golden_cases_have_the_shapes_of_the_cpu(case: Case, gpu: Any, kernel: str) -> None:
    check(case.request, gpu, kernel)


def needs_checks(corner: Corner) -> bool:
    """True if numbers must be read: for those that are not finite, sums that may be 0, scores that may overflow."""
    request = corner.request
    largest = max(np.max(np.abs(x)) for x in map(np.asarray, request.values()) if x.dtype.kind == "f" and x.size)
    divides_by_anything = request.get("query_norm", {}).get("eps") == 0
    return not finite(request) or request.get("normalization") == "sum" or largest > 1e15 or divides_by_anything


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("corner", [corner for corner in CORNERS if not needs_checks(corner)],
                         ids=lambda corner: corner.name)  # fmt: skip
def test_edge_cases_have_the_shapes_of_the_cpu(corner: Corner, dtype: str, gpu: Any, kernel: str) -> None:
    check({"dtype": dtype} | corner.request | {"include": include(corner.expected)}, gpu, kernel)


@pytest.mark.parametrize("seed", range(40))
def test_random_requests_have_the_shapes_of_the_cpu(seed: int, gpu: Any, kernel: str) -> None:
    request = random_request(seed)
    for dtype in {request.dtype, "bfloat16"}:
        check({**request.fields, "dtype": dtype}, gpu, kernel)


def test_a_fused_kernel_runs_without_scores(gpu: Any, kernel: str) -> None:
    query = np.ones((1, 4, 6, 8), np.float32)
    arrays = {"query": query, "key": query[:, :2], "value": query[:, :2], "include": []}
    for options in (
        {},
        {"is_causal": True},
        {"key_lengths": [3]},
        {"query_lengths": [3]},
        {"mask": query[0, 0, :, :6] > 0},
    ):
        assert check(arrays | options, gpu, kernel) == kernel
    in_halves: list[dict[str, Any]] = [{"is_causal": True}, {"bias": query[0, 0, :, :6]}, {"alibi_slopes": np.ones(4)}]
    for more in in_halves:
        assert check(arrays | {"dtype": "bfloat16"} | more, gpu, kernel) == kernel
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
def test_tiles_have_the_shapes_of_the_cpu(
    name: str, tile: int, gpu: Any, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scores are computed in one tile and in many."""
    compute_as_if_large(monkeypatch, tile)
    stages = [] if "top_k" in CHOSEN[name] else ["scores", "masked_scores"]
    stages += [] if "average_heads" in CHOSEN[name] else ["hidden_by"]
    returned = {"include": ["attention_weights", "received", "entropy", "logsumexp", *stages]}
    check({"input": np.ones((7, 8)), "num_heads": 4} | returned | CHOSEN[name], gpu, kernel)
