"""The torch backend on a GPU: `make test-gpu`. Not collected without a GPU.

Expected numbers have the same sources as in the tests of other backends: notebooks, hand calculation, torch's
FlexAttention in float64 on the CPU, onnx.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import httpx
import numpy as np
import pytest

from attention_service import attend
from attention_service.attention.arrays import FLOATS
from attention_service.attention.operands import make_operands
from attention_service.attention.planning import make_plan
from attention_service.attention.spec import AttentionSpec, Window
from attention_service.backends.base import OutOfMemory
from tests.cases import CASES, Case
from tests.conftest import app, serving
from tests.helpers import wire
from tests.helpers.by_flex import compare, random_request
from tests.helpers.devices import missing_gpu
from tests.helpers.waiting import until
from tests.test_corner_cases import CORNERS, Corner, finite, include

pytestmark = pytest.mark.gpu
ON_GPU: dict[str, Any] = {"backend": "torch", "device": "cuda"}
HALVES = ("float16", "bfloat16")

if not missing_gpu():
    import torch

    from attention_service.backends.torch.backend import TorchBackend


def normal(*shape: int, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


# Results.


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_golden_cases_give_the_expected_numbers(case: Case) -> None:
    result = attend(**case.request, **ON_GPU)
    for expected in case.expected:
        expected.compare(result.arrays)
    assert result.metadata.device == "cuda:0"


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("corner", CORNERS, ids=lambda corner: corner.name)
def test_an_edge_case_gives_the_expected_numbers(corner: Corner, dtype: str) -> None:
    result = attend(**{"dtype": dtype} | corner.request, include=include(corner.expected), **ON_GPU)
    tolerance = 1e-14 if result.metadata.dtype == "float64" else 2e-6
    for name, expected in corner.expected.items():
        for part, value in expected.items() if isinstance(expected, dict) else [(None, expected)]:
            ours = result[name] if part is None else result[name][part]
            np.testing.assert_allclose(ours, np.array(value, float), rtol=tolerance, atol=tolerance, err_msg=name)
    assert result.metadata.fully_masked_rows == corner.masked_rows


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("corner", CORNERS, ids=lambda corner: corner.name)
def test_the_output_does_not_depend_on_include(corner: Corner, dtype: str) -> None:
    """Without scores another kernel may run, and its output must be the same."""
    request = {name: value for name, value in corner.request.items() if name not in ("top_k", "select_queries")}
    request = {"dtype": dtype} | request
    alone = attend(**request, include=[], **ON_GPU)
    beside = attend(**request, include=["logsumexp", "scores"], **ON_GPU) if finite(request) else alone
    tolerance = 1e-13 if alone.metadata.dtype == "float64" else 2e-6
    np.testing.assert_allclose(alone.output, beside.output, rtol=tolerance, atol=tolerance * 10)
    assert alone.metadata.fully_masked_rows == corner.masked_rows


@pytest.mark.parametrize("seed", range(500))
def test_random_requests_agree_with_flex_attention(seed: int) -> None:
    request = random_request(seed, longest=300)
    compare(attend(**request.fields, dtype=request.dtype, **ON_GPU).arrays, request)


@pytest.mark.skipif(find_spec("onnx") is None, reason="onnx is not installed")
@pytest.mark.parametrize("operator", ["Attention", "RotaryEmbedding"])
def test_onnx_cases_give_the_expected_numbers(operator: str) -> None:
    onnx_cases, test_onnx_cases_give_the_expected_numbers = (
        import_module(f"tests.peers.{name}") for name in ("onnx_cases", "test_onnx")
    )
    with serving(app()) as client:
        for case in onnx_cases.collect(operator):
            if operator == "Attention":
                request, fields = onnx_cases.attention_request(case)
                answer = test_onnx_cases_give_the_expected_numbers.post(client, request | ON_GPU)
                for theirs, ours in fields.items():
                    test_onnx_cases_give_the_expected_numbers.compare(
                        answer[ours], case.outputs[theirs], f"{case.name}: {theirs}"
                    )
            else:
                answer = test_onnx_cases_give_the_expected_numbers.post(
                    client, onnx_cases.rotary_request(case) | ON_GPU
                )
                test_onnx_cases_give_the_expected_numbers.compare(
                    answer["query"], test_onnx_cases_give_the_expected_numbers.rotated(case), case.name
                )
            assert answer["metadata"]["device"] == "cuda:0"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_tensors_on_the_gpu_are_taken_as_they_are(backend: str, dtype: str) -> None:
    tensor = torch.from_numpy(normal(5, 4)).to("cuda", getattr(torch, dtype)).requires_grad_()
    expected = attend(input=tensor.detach().cpu(), backend="numpy")
    found = attend(input=tensor, projection={"query": {"weight": torch.eye(4, device="cuda")}}, backend=backend)
    assert found.metadata.dtype == expected.metadata.dtype == dtype
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    np.testing.assert_allclose(
        found.output.astype(np.float64), expected.output.astype(np.float64), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("tokens", [512, 2048])
def test_float32_is_not_computed_in_tf32(tokens: int) -> None:
    """TF32 keeps ten bits, so that the deviation would be a thousand times as large."""
    query, key, value = (normal(1, 2, tokens, 64, seed=seed) for seed in range(3))
    exact = attend(query, key, value, dtype="float64", include=["logsumexp"])
    for wanted in ([], ["attention_weights", "logsumexp"]):
        ours = attend(query, key, value, include=wanted, **ON_GPU)
        largest = np.max(np.abs(exact.output))
        assert np.max(np.abs(ours.output - exact.output)) <= 2e-6 * np.sqrt(tokens) * largest
        if wanted:
            np.testing.assert_allclose(ours["logsumexp"], exact["logsumexp"], rtol=2e-6, atol=2e-6)


GRADIENTS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "causal": lambda: {"is_causal": True, "query_offset": -3, "softcap": 3.0},  # rows without a key
    "added": lambda: {"bias": normal(4, 150, 200), "sinks": normal(4), "alibi_slopes": np.ones(4, np.float32)},
    "padding": lambda: {"key_lengths": 170, "scale": np.array([0.1, 0.2, 0.0, -0.1])},
    "sigmoid": lambda: {"normalization": "sigmoid", "bias": normal(150, 200)},
}


@pytest.mark.parametrize("dtype", ["float64", "float32", *HALVES])
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_those_of_the_numpy_backend_in_float64(name: str, dtype: str) -> None:
    """Halves are computed in float32 and rounded once, by up to half a unit in the last place."""
    kind, shapes = FLOATS[dtype], {"query": (4, 150, 64), "key": (2, 200, 64), "value": (2, 200, 32)}
    arrays: dict[str, Any] = {
        field: normal(*shape, dtype=kind, seed=seed) for seed, (field, shape) in enumerate(shapes.items())
    }
    arrays["grad_output"] = normal(4, 150, 32, dtype=kind, seed=3)
    options: dict[str, Any] = {"layout": "hld", "query_offset": 50, "gradients": "all"} | GRADIENTS[name]()
    wide: dict[str, Any] = {field: array.astype(np.float64) for field, array in arrays.items()}
    exact = attend(**wide, **options, backend="numpy")
    if name == "padding":
        arrays["key"][:, 170:], arrays["value"][:, 170:] = np.nan, np.inf
    found = attend(**arrays, **options, **ON_GPU)
    assert found.metadata.device == "cuda:0"
    names = [each for each in exact if each.startswith("grad_")]
    assert {"grad_query", "grad_key", "grad_value"} <= {*names}
    relative = {"float16": 2.0**-11, "bfloat16": 2.0**-8}.get(dtype, 0.0)
    for each in names:
        right = np.asarray(exact[each])
        absolute = (1e-12 if dtype == "float64" else 1e-5) * (1 + np.abs(right).max())
        np.testing.assert_allclose(found[each].astype(np.float64), right, rtol=relative, atol=absolute, err_msg=each)
    if name == "padding":
        assert not found.grad_key[:, 170:].any()
        assert not found.grad_value[:, 170:].any()


@pytest.mark.parametrize("dtype", ["float64", "float32", *HALVES])
def test_a_mask_that_is_the_same_for_all_keys(dtype: str) -> None:
    """Lengths of queries alone: kernels read masks in 16 bytes, and a repeated column has none."""
    for keys in (8, 109, 189):
        query, key = normal(3, 2, 76, 16, dtype=FLOATS[dtype]), normal(3, 1, keys, 16, dtype=FLOATS[dtype], seed=1)
        options: dict[str, Any] = {"layout": "bhld", "include": [], "query_lengths": [0, 3, 76]}
        found, right = (attend(query, key, key, backend=backend, **options).output for backend in ("torch", "numpy"))
        assert not found[0].any()
        assert not found[1, :, 3:].any()
        tolerance = {"float64": 1e-13, "float32": 1e-5}.get(dtype, 2e-2)
        np.testing.assert_allclose(found.astype(np.float64), right.astype(np.float64), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", ["float32", *HALVES])
@pytest.mark.parametrize("core", ["MATH", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"])
def test_outputs_and_gradients_of_kernels_of_torch_are_judged_right(core: str, dtype: str) -> None:
    """The tensors that are judged are on the GPU."""
    requests, judged = (getattr(import_module("tests.peers.test_judged_gradients"), n) for n in ("requests", "judged"))
    count = 0
    for fields, options in requests(20, 0, getattr(torch, dtype)):
        inputs = [fields[name].cuda().requires_grad_() for name in ("query", "key", "value")]
        there = {name: value.cuda() if name == "attn_mask" else value for name, value in options.items()}
        try:
            with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, core)):
                output = torch.nn.functional.scaled_dot_product_attention(*inputs, **there)
        except RuntimeError as error:  # a mask, a type or a number of features that the kernel does not take
            assert "No available kernel" in str(error)
            continue
        found = torch.autograd.grad(output, inputs, fields["grad_output"].cuda())
        actual = dict(zip(("grad_query", "grad_key", "grad_value"), found, strict=True))
        verdict = judged({"output": output.detach()} | actual, fields, options)
        assert verdict.status in ("correct", "inconclusive"), (verdict, fields["query"].shape, options.keys())
        count += 1
    assert count > 3 or (dtype == "float32" and core in ("FLASH_ATTENTION", "CUDNN_ATTENTION"))


LOST = """
import torch
from tests.conftest import app, serving
from tests.helpers.waiting import until
with serving(app(backend="torch")) as client:
    until(lambda: client.get("/health/ready").status_code == 200)
    ask = lambda: client.post("/attention", json={"input": [[1.0]], "device": "cuda", "include": []}).status_code
    print(ask(), client.get("/health/live").status_code, flush=True)
    with torch.inference_mode():
        torch.ones(1, device="cuda")[torch.tensor([9], device="cuda")]
    print(ask(), client.get("/health/live").status_code, client.get("/health/ready").status_code)
    print(client.post("/attention", json={"input": [[1.0]], "backend": "numpy"}).status_code)
"""


def test_a_process_that_lost_its_gpu_says_that_it_must_be_restarted() -> None:
    """After a number was read from behind the end of an array, CUDA refuses this process all that follows.

    torch may end the process by itself, when it frees a tensor.
    """
    found = subprocess.run([sys.executable, "-W", "ignore", "-c", LOST], capture_output=True, text=True, timeout=120)
    said = found.stdout.split()
    assert said[:2] == ["200", "200"], found.stderr
    assert said[2:] == ["500", "503", "503", "200"] or found.returncode == -signal.SIGABRT, found.stderr


# Choice of the kernel, and memory.


def kernel(request: dict[str, Any]) -> str:
    return str(attend(**{"layout": "bhld", "include": []} | request, **ON_GPU).metadata.kernel)


@pytest.mark.parametrize("dtype", ["float32", *HALVES])
def test_a_fused_kernel_runs_without_scores(dtype: str) -> None:
    arrays = {name: normal(1, 8, 1024, 64) for name in ("query", "key", "value")}
    fast = "flash_attention" if dtype in HALVES else "efficient_attention"
    for options in ({}, {"is_causal": True}, {"num_kv_heads": 8}):
        assert kernel(arrays | {"dtype": dtype} | options) == fast
    assert kernel(arrays | {"dtype": dtype, "mask": normal(1024, 1024) < 1}) != "dense"
    for added in ({"bias": normal(1024, 1024)}, {"alibi_slopes": np.ones(8)}):
        assert kernel(arrays | {"dtype": dtype} | added) == "efficient_attention"
    assert kernel(arrays | {"dtype": dtype, "include": ["attention_weights"]}) == "dense"
    assert kernel(arrays | {"dtype": "float64"}) == "dense"


LARGE: dict[str, dict[str, Any]] = {
    "top_k": {"include": ("attention_weights",), "top_k": 8},
    "entropy": {"include": ("entropy",)},
    "received": {"include": ("received",)},
    "some queries": {"include": ("attention_weights", "masked_scores"), "select_queries": np.arange(0, 32768, 4096)},
    "causal top_k": {"include": ("attention_weights",), "top_k": 8, "is_causal": True},
}


@pytest.mark.parametrize("name", LARGE)
def test_a_score_matrix_of_32k_by_32k_is_never_allocated(name: str) -> None:
    """The score matrix of one head would take 4 GiB."""
    length = 32768
    arrays: dict[str, Any] = {"query": normal(length, 64), "key": normal(length, 64, seed=1)}
    arrays["value"] = arrays["key"]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attend(**arrays | LARGE[name], **ON_GPU)
    assert torch.cuda.max_memory_allocated() - before < 2 * 2**30


# Functions, so that the large arrays are made only where there is a GPU.
OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "causal": lambda: {"is_causal": True},
    "weights": lambda: {"include": ("attention_weights",)},
    "stages": lambda: {"include": ("scores", "masked_scores", "attention_weights"), "softcap": 2.0},
    "top_k": lambda: {"include": ("attention_weights", "entropy"), "top_k": 8},
    "mask": lambda: {"mask": np.random.default_rng(0).random((4096, 4096)) < 0.5},
    "bias": lambda: {"bias": normal(4, 4096, 4096)},
    "window": lambda: {"window": Window(100, 100)},
    "alibi": lambda: {"alibi_slopes": np.ones(4)},
}


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("name", OPTIONS)
def test_peak_memory_stays_within_the_estimate(name: str, dtype: Any) -> None:
    arrays = {field: normal(4, 4096, 64, seed=seed) for seed, field in enumerate(("query", "key", "value"))}
    spec = AttentionSpec(**{"include": (), "layout": "hld", "dtype": dtype, **arrays} | OPTIONS[name]())
    plan = make_plan(spec)
    operands = make_operands(spec, plan, spec.sources)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    backend = TorchBackend()
    backend.execute(plan, operands, "cuda")
    taken = torch.cuda.max_memory_allocated() - before
    assert taken <= backend.device_bytes(plan, operands)


ASYNCHRONOUS: list[dict[str, Any]] = [
    {},
    {"is_causal": True},
    {"include": ["attention_weights", "received"]},
    {"include": ["attention_weights"], "top_k": 4, "key_lengths": 900},
    {"include": ["scores"], "select_heads": [2, 0], "select_queries": [900, 7]},
]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")  # once a process, by torch
@pytest.mark.parametrize("options", ASYNCHRONOUS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_cpu_waits_for_the_gpu_only_for_the_result(dtype: str, options: dict[str, Any]) -> None:
    """torch's sync debug mode turns every operation that waits into an error."""
    arrays: dict[str, Any] = {name: normal(1, 4, 1024, 64) for name in ("query", "key", "value")}
    run = partial(attend, **arrays, dtype=dtype, **{"include": []} | options, **ON_GPU)
    first = run()  # loads modules and kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing"):
            torch.ones(1, device="cuda").item()
        second = run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    np.testing.assert_array_equal(second.output, first.output)


# Allocations that fail.


def test_a_request_that_cannot_fit_is_refused_before_allocating() -> None:
    everything = torch.cuda.mem_get_info()[1]
    length = int((everything / 4) ** 0.5)
    before = torch.cuda.memory_allocated()
    with pytest.raises(OutOfMemory) as refused:
        attend(input=np.ones((length, 1), np.float32), include=["attention_weights", "scores"], **ON_GPU)
    assert refused.value.available is not None
    assert refused.value.needed > refused.value.available
    assert torch.cuda.memory_allocated() == before


def test_a_failed_allocation_is_a_413_and_the_service_continues() -> None:
    """torch limits the process to a small fraction of the GPU's memory, which the service does not know."""
    large = wire.write({"input": np.ones((20_000, 1), np.float32), **ON_GPU}, "safetensors")
    headers = {"Content-Type": "application/vnd.safetensors", "Accept": "application/json"}
    with serving(app(memory_limit=64 * 2**30)) as client:
        assert client.post("/attention", json={"input": [[1.0]], **ON_GPU}).status_code == 200
        torch.cuda.empty_cache()
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**29) / total)
        try:
            for _ in range(2):
                response = client.post("/attention", content=large, headers=headers)
                assert (response.status_code, response.json()["code"]) == (413, "memory_limit")
                small = client.post("/attention", json={"input": [[1.0]], **ON_GPU})
                assert (small.status_code, small.json()["output"]) == (200, [[1.0]])
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        assert client.post("/attention", content=large, headers=headers).status_code == 200


# The service.


@pytest.fixture(scope="module")
def service() -> Iterator[httpx.Client]:
    with serving(app(backend="auto")) as client:
        until(lambda: client.get("/health/ready").status_code == 200)
        yield client


def test_the_backend_auto_uses_the_gpu(service: httpx.Client) -> None:
    for options, expected in (({}, ("torch", "cuda:0")), ({"backend": "numpy"}, ("numpy", "cpu"))):
        answer = service.post("/attention", json={"input": [[1.0]]} | options).json()["metadata"]
        assert (answer["backend"], answer["device"]) == expected


def test_concurrent_requests_do_not_mix() -> None:
    """Each thread has its own CUDA stream."""
    requests = [random_request(seed, longest=200) for seed in range(1000, 1016)]
    right = [attend(**one.fields, dtype=one.dtype, **ON_GPU).output for one in requests]
    started = threading.Barrier(4)

    def run(worker: int) -> None:
        started.wait()
        for turn in range(3 * len(requests)):
            place = (turn + 4 * worker) % len(requests)
            ours = attend(**requests[place].fields, dtype=requests[place].dtype, **ON_GPU).output
            np.testing.assert_array_equal(ours, right[place])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, range(4)))


def test_a_long_computation_ends_at_its_deadline() -> None:
    body = wire.write(
        {"input": np.ones((16_384, 64)), "include": ["entropy"], "num_heads": 64, **ON_GPU}, "safetensors"
    )
    headers = {"Content-Type": "application/vnd.safetensors", "Accept": "application/json"}
    with serving(app(time_limit=0.05)) as client:
        response = client.post("/attention", content=body, headers=headers)
        assert (response.status_code, response.json()["code"]) == (504, "time_limit")
