# mypy: disable-error-code="import-not-found"
"""The NumPy backend beside torch, fused and unfused, and onnxruntime. Needs torch and onnxruntime."""

from __future__ import annotations

import argparse
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import onnxruntime
import torch
from onnx import TensorProto, helper

from attention_service import attend
from attention_service.runtime.machine import cpu_count
from benchmarks.attend import plain_numpy
from benchmarks.ours import Attention, use_all_processors
from benchmarks.ratios import Ratio, rows
from benchmarks.serving import Others, blas_variables

HEADS, SHORT, LONG = (8, 1024, 64), (1, 2048, 64), (1, 8192, 64)
SHAPES = (HEADS, SHORT, LONG)
# Longest sequence measured with all weights: longer ones would only measure memory.
LONGEST_WEIGHTS = 2048
# Seconds of calls before each measurement, as caches and clock rates recover after the other processes ran.
WARM_UP = 0.1

OURS, CAUSAL, WEIGHTS, ATTEND = "ours", "ours, causal", "ours, all weights", "attend()"
GRADIENTS = "ours, with gradients"
FUSED, BY_HAND, ONNX = "torch SDPA", "torch by hand, all weights", "onnxruntime, all weights"


def by_hand(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and weights, from two products and a softmax."""
    weights = torch.softmax(query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5, dim=-1)
    return weights @ value, weights


def differentiate(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> list[torch.Tensor]:
    """Return the gradients of query, key and value by torch's fused kernel, with the query as cotangent."""
    leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
    output = torch.nn.functional.scaled_dot_product_attention(*leaves)
    return list(torch.autograd.grad(output, leaves, query))


def onnx(*arrays: np.ndarray) -> Callable[[], list[np.ndarray]]:
    """Return a call of ONNX's Attention node, which returns output and weights."""
    shape, names = list(arrays[0].shape), ("query", "key", "value")
    node = helper.make_node("Attention", names, ["output", "", "", "weights"], qk_matmul_output_mode=3)

    def declared(name: str, axes: list[int]) -> object:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, axes)

    results = [declared("output", shape), declared("weights", [*shape[:3], shape[2]])]
    graph = helper.make_graph([node], "attention", [declared(name, shape) for name in names], results)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = cpu_count()
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feed = dict(zip(names, arrays, strict=True))

    def run() -> list[np.ndarray]:
        found: list[np.ndarray] = session.run(None, feed)
        return found

    return run


def functions(heads: int, length: int, dim: int) -> dict[str, Callable[[], Callable[[], object]]]:
    """Return the implementations to measure for a shape, each as a factory of the call."""
    random = np.random.default_rng(0)
    arrays = [random.normal(size=(1, heads, length, dim)).astype(np.float32) for _ in range(3)]
    query, key, value = arrays
    tensors = [torch.from_numpy(array) for array in arrays]
    fused = torch.nn.functional.scaled_dot_product_attention
    found: dict[str, Callable[[], Callable[[], object]]] = {
        OURS: lambda: Attention(query, key, value).compute,
        CAUSAL: lambda: Attention(query, key, value, is_causal=True).compute,
        ATTEND: lambda: partial(attend, query, key, value, layout="bhld", include=[]),
        FUSED: lambda: partial(fused, *tensors),
        f"{FUSED}, causal": lambda: partial(fused, *tensors, is_causal=True),
        GRADIENTS: lambda: Attention(query, key, value, grad_output=query, gradients="all").compute,
        f"{FUSED}, with gradients": lambda: partial(differentiate, *tensors),
    }
    if length > LONGEST_WEIGHTS:
        return found
    return found | {
        WEIGHTS: lambda: _checked(Attention(query, key, value, include=("attention_weights",)), tensors),
        BY_HAND: lambda: partial(by_hand, *tensors),
        ONNX: lambda: _right(onnx(*arrays), tensors),
        "NumPy by hand, all weights": lambda: _right(partial(plain_numpy, *arrays), tensors),
    }


def _checked(attention: Attention, tensors: list[torch.Tensor]) -> Callable[[], object]:
    """Return our call, after comparing its results with torch's. Errors: AssertionError."""
    result = attention.result()
    _right(lambda: (result.output, result["attention_weights"]), tensors)
    return attention.compute


def _right(call: Callable[[], Iterable[Any]], tensors: list[torch.Tensor]) -> Callable[[], object]:
    """Return the call, after comparing its results with torch's. Errors: AssertionError."""
    for one, theirs in zip(call(), by_hand(*tensors), strict=True):
        np.testing.assert_allclose(one, theirs.numpy(), rtol=1e-4, atol=1e-5)
    return call


def work(pipe: Connection, shape: tuple[int, int, int], name: str) -> None:
    """Run in a process: for each message of the pipe, warm up, then send back the milliseconds of one call."""
    torch.set_num_threads(cpu_count() if name == ATTEND else use_all_processors())
    call = functions(*shape)[name]()
    pipe.send(0.0)
    while pipe.recv():
        began = start = time.perf_counter()
        while start - began < WARM_UP:
            call()
            start = time.perf_counter()
        call()
        pipe.send((time.perf_counter() - start) * 1e3)


def medians(shape: tuple[int, int, int], rounds: int) -> dict[str, float]:
    """Return the median milliseconds of each implementation, measured in turns.

    Each has its own process: in one process, idle threads of one library spin while another computes, and memory that
    one frees spares another its page faults.
    """
    context = get_context("spawn")
    found: dict[str, list[float]] = {name: [] for name in functions(*shape)}
    with ExitStack() as stack:
        pipes = {}
        for name in found:
            pipes[name], end = context.Pipe()
            process = context.Process(target=work, args=(end, shape, name), daemon=True)
            process.start()
            stack.callback(process.terminate)
            pipes[name].recv()  # ready
        for _ in range(rounds):
            for name, pipe in pipes.items():
                pipe.send(True)
                found[name].append(pipe.recv())
    return {name: statistics.median(values) for name, values in found.items()}


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Run so many processes that compute without pause."""
    running = [get_context("spawn").Process(target=_compute_always, daemon=True) for _ in range(count)]
    for process in running:
        process.start()
    try:
        yield
    finally:
        for process in running:
            process.terminate()


def _compute_always() -> None:
    while True:
        pass


def ratios(found: dict[tuple[int, int, int], dict[str, float]]) -> list[Ratio]:
    """Return every ratio that has a bound."""

    def ratio(shape: tuple[int, int, int], ours: str, theirs: str, bound: float) -> Ratio:
        name = f"{ours} / {theirs}, {'×'.join(map(str, shape))}"
        times = found.get(shape, {})
        return Ratio(name, times.get(ours, math.nan) / times.get(theirs, math.nan), bound)

    return [
        *(ratio(shape, OURS, FUSED, 1.2) for shape in SHAPES),
        *(ratio(shape, ATTEND, FUSED, 1.5) for shape in SHAPES),
        ratio(SHORT, WEIGHTS, BY_HAND, 0.6),
        ratio(HEADS, WEIGHTS, ONNX, 1.4),
        ratio(HEADS, CAUSAL, OURS, 0.8),
        ratio(LONG, CAUSAL, OURS, 0.65),
        *(ratio(shape, GRADIENTS, OURS, 3.5) for shape in (HEADS, LONG)),
        *(ratio(shape, GRADIENTS, f"{FUSED}, with gradients", 1.5) for shape in (HEADS, LONG)),
    ]


def main() -> None:
    """Print the times for each shape, and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--busy", type=int, default=0, help="processes that compute without pause meanwhile")
    options = parser.parse_args()
    rounds = options.rounds
    versions = f"NumPy {np.__version__}, torch {torch.__version__}, onnxruntime {onnxruntime.__version__}"
    print(f"{platform.machine()}, {cpu_count()} threads, {versions}, {blas_variables()}, {options.busy} busy processes")
    found, others = {}, Others()
    with busy_processes(options.busy):
        for shape in SHAPES:
            print("\n{} heads x {} x {} float32, median ms of {} rounds".format(*shape, rounds))
            found[shape] = medians(shape, rounds)
            for name, value in found[shape].items():
                print(f"  {name:28} {value:8.1f}", flush=True)
    print(f"\n{others.line()}\n\n{rows(ratios(found))}")


if __name__ == "__main__":
    main()
