"""The torch backend without a GPU: transfers to a device and back, the choice of the kernel, memory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention_service import attend
from attention_service.attention.planning import make_plan
from attention_service.attention.spec import AttentionSpec
from attention_service.backends.base import OutOfMemory
from tests.conftest import app, serving
from tests.helpers.backends import HAS_TORCH
from tests.helpers.by_flex import OPTIONS, compare, random_request

if HAS_TORCH:
    import torch

    from attention_service.backends.torch import devices, sdpa, staging
    from attention_service.backends.torch.backend import TorchBackend, keeps_halves

    BACKEND = TorchBackend()

pytestmark = pytest.mark.torch


PLAN = make_plan(AttentionSpec(input=np.ones((1, 1))))


def normal(*shape: int, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


# Transfers to a device and back.


def views() -> dict[str, np.ndarray]:
    array = normal(2, 3, 5, 4)
    read_only = array.copy()
    read_only.flags.writeable = False
    return {
        "as it lies": array,
        "read only": read_only,
        "axes in another order": array.transpose(0, 2, 1, 3),
        "columns": array.transpose(0, 1, 3, 2),
        "every other": array[:, ::2, ::-1],
        "broadcast": np.broadcast_to(array[:1, :1], (2, 3, 5, 4)),
        "nothing": array[:, :0],
        "one number": np.array(3.5, np.float32),
        "booleans": array > 0,
        "bytes": np.arange(200, dtype=np.uint8),
        "int32": np.arange(7, dtype=np.int32)[::2],
        "int64": np.arange(60).reshape(3, 4, 5).T,
        "float64": array.astype(np.float64),
        "float16": array.astype(np.float16).swapaxes(0, 2),
        "bfloat16": array.astype(ml_dtypes.bfloat16).swapaxes(1, 3),
    }


@pytest.mark.parametrize("chunk", [8, 64, 2**20])
@pytest.mark.parametrize("name", views())
def test_arrays_are_transferred_unchanged(name: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The arrays are sent to the CPU in chunks, as they would be to a GPU."""
    monkeypatch.setattr(staging, "CHUNK", chunk)
    array = views()[name]
    before = array.copy()
    tensor = staging.send(array, devices.CPU)
    assert tensor.is_contiguous()
    back = staging.fetch({"a": tensor, "b": tensor.permute(tuple(reversed(range(tensor.ndim))))})
    for found, wanted in ((back["a"], array), (back["b"], array.T)):
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        assert found.tobytes() == np.ascontiguousarray(wanted).tobytes()
    tensor.zero_()
    np.testing.assert_array_equal(array, before)


def test_read_only_arrays_are_not_copied() -> None:
    array = np.frombuffer(normal(100).tobytes(), np.float32)
    shown = staging._writeable(array)
    assert shown.ctypes.data == array.ctypes.data
    np.testing.assert_array_equal(shown, array)


def test_out_of_memory_is_recognised() -> None:
    with pytest.raises(RuntimeError) as failed:
        torch.empty(2**60)
    for error in (failed.value, torch.OutOfMemoryError("CUDA out of memory."), MemoryError(), OutOfMemory(1)):
        assert devices.is_out_of_memory(error)
    for other in (RuntimeError("shapes do not fit"), ValueError("out of memory")):
        assert not devices.is_out_of_memory(other)


# Memory.

MEASURE = """
import sys
from pathlib import Path
import numpy as np
from attention_service.attention.operands import make_operands
from attention_service.attention.planning import make_plan
from attention_service.attention.spec import AttentionSpec
from attention_service.backends.registry import Backends

def memory(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024

def prepared(length, **options):
    array = np.random.default_rng(0).normal(size=(2, length, 64)).astype(np.float32)
    spec = AttentionSpec(query=array, key=array, value=array, layout="hld", **{"include": ()} | options)
    plan = make_plan(spec)
    return plan, make_operands(spec, plan, spec.sources)

torch, length = Backends(threads=2).choose("torch", "cpu"), 3072
torch.execute(*prepared(64), "cpu")
torch.execute(*prepared(64, include=("attention_weights",), top_k=2), "cpu")
random = np.random.default_rng(0)
options = {
    "bias": lambda: {"bias": random.normal(size=(2, length, length)).astype(np.float32)},
    "alibi and mask": lambda: {"alibi_slopes": np.ones(2), "mask": random.random((length, length)) < 0.5},
    "weights": lambda: {"include": ("attention_weights",), "is_causal": True},
    "stages": lambda: {"include": ("scores", "masked_scores", "attention_weights"), "softcap": 2.0},
    "top_k": lambda: {"include": ("attention_weights", "entropy"), "top_k": 8},
}[sys.argv[1]]()
plan, operands = prepared(length, **options)
Path("/proc/self/clear_refs").write_text("5")
before = memory("VmRSS")
kept = torch.execute(plan, operands, "cpu")
print(memory("VmHWM") - before, torch.peak_bytes(plan, "cpu", copied=0))
"""


@pytest.mark.parametrize("name", ["bias", "alibi and mask", "weights", "stages", "top_k"])
def test_peak_memory_stays_within_the_estimate(name: str) -> None:
    done = subprocess.run([sys.executable, "-c", MEASURE, name], capture_output=True, text=True, check=True)
    taken, estimated = map(int, done.stdout.split())
    assert 20 * 2**20 < taken <= estimated < 7 * taken  # three tiles, which a fused kernel does not need


# The choice of the kernel.


def by_torch(request: dict[str, Any]) -> Any:
    return attend(**{"layout": "bhld", "backend": "torch", "include": []} | request)


@pytest.mark.parametrize("seed", range(60))
def test_random_requests_agree_with_flex_attention(seed: int) -> None:
    """torch's FlexAttention computes the expected results in float64."""
    request = random_request(seed)
    compare(attend(**request.fields, dtype=request.dtype, backend="torch").arrays, request)


def test_random_requests_have_every_option() -> None:
    assert frozenset[str]().union(*(random_request(seed).options for seed in range(60))) == frozenset(OPTIONS)


def test_a_kernel_that_holds_all_scores_is_not_used() -> None:
    """If values have other features than keys, all kernels of torch on the CPU hold all scores."""
    query, value = normal(1, 2, 5, 8), normal(1, 2, 5, 3)
    result = by_torch({"query": query, "key": query, "value": value})
    assert result.metadata.kernel == "dense"
    assert by_torch({"query": query, "key": query, "value": query}).metadata.kernel == sdpa.ON_CPU
    grouped = by_torch({"query": query, "key": query[:, :1], "value": value[:, :1]})
    assert grouped.metadata.kernel == "dense"


def test_the_general_path_replaces_a_kernel_that_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*given: Any, **options: Any) -> Any:
        raise RuntimeError("No execution plans support the graph.")

    query = normal(1, 2, 5, 8)
    right = by_torch({"query": query, "key": query, "value": query})
    monkeypatch.setattr(sdpa, "scaled_dot_product_attention", refuse)
    found = by_torch({"query": query, "key": query, "value": query})
    assert (right.metadata.kernel, found.metadata.kernel) == (sdpa.ON_CPU, "dense")
    np.testing.assert_allclose(found.output, right.output, rtol=1e-5, atol=1e-6)
    assert "kernel of torch failed" in caplog.text


def test_a_process_that_lost_its_gpu_must_be_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/test_gpu.py loses a real one."""

    def refuse(*given: Any) -> Any:
        raise RuntimeError("CUDA error: misaligned address")

    with serving(app(backend="numpy")) as client:
        checks = "/health/live", "/health/ready", "/v2/health/live"
        assert [client.get(path).status_code for path in checks] == [200] * 3
        monkeypatch.setattr(TorchBackend, "compute", refuse)
        request = {"input": [[1.0]], "backend": "torch"}
        assert client.post("/attention", json=request).status_code == 500
        assert [client.get(path).status_code for path in checks] == [200] * 3  # an error on the CPU loses nothing
        monkeypatch.setattr(devices, "is_lost", lambda device: True)
        assert client.post("/attention", json=request).status_code == 500
        assert [client.get(path).status_code for path in checks] == [503] * 3
        assert client.post("/attention", json={"input": [[1.0]]}).status_code == 200


def test_scores_are_checked_unless_bounds_exclude_an_overflow() -> None:
    large = normal(1, 1, 4, 8) * 1e18
    ways = [by_torch({"query": large, "key": large, "value": large, "scale": scale}) for scale in (1e-30, 1e-37)]
    assert [way.metadata.kernel for way in ways] == [sdpa.ON_CPU, sdpa.ON_CPU]
    watched = by_torch({"query": large, "key": large[:, :, :1] * 10, "value": large[:, :, :1], "scale": 1e-37})
    assert watched.metadata.kernel == "dense"


@given(st.integers(0, 2**32 - 1), st.integers(1, 30), st.booleans())
def test_top_k_is_sorted_and_equal_numbers_are_in_the_order_of_their_indices(seed: int, count: int, wide: bool) -> None:
    random = np.random.default_rng(seed)
    numbers = random.integers(-4, 5, size=(3, 2, 30)).astype(np.float32) * random.choice([-0.5, 1e-30, 1.0])
    tensor = torch.from_numpy(numbers).to(torch.float64 if wide else torch.float32)
    order = np.argsort(-numbers, axis=-1, stable=True)[..., :count]
    found = BACKEND.library(PLAN, devices.CPU).top_indices(tensor, count)
    np.testing.assert_array_equal(found.numpy(), order)


def test_float32_is_not_computed_in_lower_precision() -> None:
    torch.set_float32_matmul_precision("medium")
    TorchBackend(torch.get_num_threads())
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    assert not torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_operands_are_kept_only_for_kernels_that_add_nothing_to_scores(dtype: str) -> None:
    def stays(**options: Any) -> bool:
        spec = AttentionSpec(input=normal(1, 4, 8), dtype=dtype, include=(), **options)  # type: ignore[arg-type]
        return keeps_halves(make_plan(spec))

    assert stays()
    assert stays(is_causal=True, key_mask=np.arange(4) > 0)
    assert not stays(bias=np.zeros(4))
    assert not stays(alibi_slopes=np.ones(1))
    assert not stays(sinks=np.ones(1))  # which only the dense computation knows
    assert not keeps_halves(make_plan(AttentionSpec(input=normal(1, 4, 8))))


# The benchmark of GPUs, without one.


def benchmark(*options: str) -> subprocess.CompletedProcess[str]:
    """Run the benchmark with GPUs hidden from torch."""
    command = [sys.executable, "-m", "benchmarks.gpu", *options]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_the_benchmark_runs_on_the_cpu() -> None:
    done = benchmark("--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("the CPU; ")
    for row in (
        "bare kernel: flash_attention",
        "the server's compute step",
        "the backend on the device, bfloat16 computed in float32",
        "the three together",
        "6 × 4: torch",
    ):
        assert re.search(rf"^\| {row} .*\d", done.stdout, re.MULTILINE), done.stdout


def test_the_benchmark_reports_a_missing_gpu() -> None:
    done = benchmark()
    assert (done.returncode, done.stdout) == (1, "")
    assert "sees no GPU" in done.stderr
