# mypy: disable-error-code="import-not-found"
"""The torch backend on a GPU, beside torch's kernels, the copies and the HTTP floor by themselves.

    python -m benchmarks.gpu [--step kernel|gradients|end-to-end|small]

Each step takes under eight minutes; without --step all run. --device cpu runs them with small sizes as a test that they
run: its numbers mean nothing.
"""

from __future__ import annotations

import argparse
import http.client
import os
import platform
import re
import resource
import selectors
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
import torch
from safetensors.torch import save
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from attention_service.attention.operands import make_operands
from attention_service.attention.plan import Plan
from attention_service.attention.planning import make_plan
from attention_service.attention.spec import AttentionSpec
from attention_service.backends.torch import devices
from attention_service.backends.torch.backend import TorchBackend
from attention_service.backends.torch.library import TorchLibrary
from attention_service.runtime.machine import cpu_count
from benchmarks.client import Connection, latency
from benchmarks.forms import SAFETENSORS, Request, lists
from benchmarks.serving import Running, serving
from benchmarks.table import FLOOR
from benchmarks.workloads import workloads

JSON = "application/json"
# Sets of operands, used in turn, so that none is still in the GPU's cache when it is used again.
SETS = 3
# Cycles (about 2 ms) that the GPU sleeps before a call, so that all kernels are queued when the first one starts, and
# launch overhead is not measured.
SLEEP_CYCLES = 4 * 10**6


@dataclass(frozen=True)
class Size:
    """The shape of a large request in bfloat16 and its repetitions; the number of clients and their rounds."""

    heads: int
    tokens: int
    features: int
    times: int
    clients: int
    rounds: int

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.heads, self.tokens, self.features

    @property
    def operations(self) -> int:
        """The floating-point operations of the two products."""
        return 4 * self.heads * self.tokens**2 * self.features


FULL = Size(16, 4096, 128, times=30, clients=1000, rounds=5)
SMOKE = Size(2, 128, 32, times=3, clients=20, rounds=10)


class Table:
    """A Markdown table."""

    def __init__(self, *heads: str) -> None:
        self._rows = [heads, tuple("---" for _ in heads)]

    def add(self, *cells: str) -> None:
        self._rows.append(cells)

    def __str__(self) -> str:
        return "\n".join(f"| {' | '.join(row)} |" for row in self._rows)


def median_ms(device: str, call: Callable[[int], object], times: int) -> float:
    """Return the median milliseconds of a call with its turn as argument, by the GPU's clock if there is one."""
    for turn in range(SETS):
        call(turn)
    found = []
    for turn in range(times):
        if device == "cpu":
            start = time.perf_counter()
            call(turn)
            found.append((time.perf_counter() - start) * 1e3)
            continue
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        torch.cuda._sleep(SLEEP_CYCLES)
        begin.record()
        call(turn)
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end))
    return statistics.median(found)


def bare_kernels(device: str, size: Size) -> dict[str, float]:
    """Return the milliseconds of each of torch's fused kernels, on operands on the device."""
    sets = [[torch.randn(1, *size.shape, dtype=torch.bfloat16, device=device) for _ in range(3)] for _ in range(SETS)]
    found: dict[str, float] = {}
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        try:
            with sdpa_kernel(backend):
                call = lambda turn: scaled_dot_product_attention(*sets[turn % SETS])  # noqa: E731
                found[backend.name.lower()] = median_ms(device, call, size.times)
        except RuntimeError as error:
            print(f"{backend.name.lower()} is not available: {str(error).splitlines()[0]}", file=sys.stderr)
    return found


def pinned_copies(device: str, size: Size) -> float:
    """Return the milliseconds to copy query, key and value to the device and an output back, in pinned memory."""
    pinned = device != "cpu"
    here = [torch.empty(3, *size.shape, dtype=torch.bfloat16, pin_memory=pinned) for _ in range(SETS)]
    there = torch.empty(3, *size.shape, dtype=torch.bfloat16, device=device)

    def copy(turn: int) -> None:
        there.copy_(here[turn % SETS], non_blocking=True)
        here[turn % SETS][0].copy_(there[0], non_blocking=True)

    return median_ms(device, copy, size.times)


def arrays(size: Size) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    names = ("query", "key", "value")
    return {name: random.normal(size=size.shape).astype(np.float32).astype(ml_dtypes.bfloat16) for name in names}


def planned(size: Size, *, gradients: bool = False) -> tuple[AttentionSpec, Plan]:
    """Return a request without weights, and its plan. gradients: True to ask for all, with the query as cotangent"""
    given = arrays(size)
    spec = AttentionSpec(query=given["query"], key=given["key"], value=given["value"], layout="hld", include=())
    spec = spec._replace(grad_output=spec.query, gradients="all") if gradients else spec
    return spec, make_plan(spec)


def in_process(device: str, size: Size) -> tuple[float, str]:
    """Return the milliseconds of the backend from NumPy arrays to NumPy output, and the kernel that ran."""
    backend = TorchBackend(cpu_count())
    spec, plan = planned(size)
    found, kernel = [], ""
    for turn in range(SETS + size.times):
        operands = make_operands(spec, plan, spec.sources)
        start = time.perf_counter()
        kernel = backend.execute(plan, operands, device).kernel
        if turn >= SETS:
            found.append((time.perf_counter() - start) * 1e3)
    return statistics.median(found), kernel


class WithoutCopies(TorchLibrary):
    """torch, whose results stay on the device."""

    def store(self, arrays: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
        """Return an empty array for each."""
        return dict.fromkeys(arrays, np.empty(0))


def on_the_device(device: str, size: Size, *, gradients: bool = False) -> float:
    """Return the milliseconds of the backend's work on the device, without the copies there and back."""
    spec, plan = planned(size, gradients=gradients)
    where = devices.resolve(device)
    backend = TorchBackend(cpu_count())
    lib = WithoutCopies(plan, where, backend.tiling)
    with torch.inference_mode(), devices.reserved(where, 0, lambda: None):
        sets = [backend.load(plan, make_operands(spec, plan, spec.sources), lib) for _ in range(SETS)]

        def call(turn: int) -> None:
            backend.attend(plan, lib, sets[turn % SETS], lambda: None)

        return median_ms(device, call, size.times)


def large_request(size: Size) -> Request:
    """Return a request without weights in safetensors."""
    halves = {name: torch.from_numpy(array.view(np.int16)) for name, array in arrays(size).items()}
    fields = {"request": '{"layout": "hld", "include": []}'}
    body = save({name: tensor.view(torch.bfloat16) for name, tensor in halves.items()}, fields)
    return Request("/attention", {"Content-Type": SAFETENSORS}, body)


@contextmanager
def service(device: str, **settings: str) -> Iterator[Running]:
    """Run the service with the torch backend on the device, and yield once it is ready.

    settings: setting names without their prefix, which replace these defaults
    """
    backend = {"ATTENTION_BACKEND": "torch" if device == "cpu" else "auto"}
    chosen = backend | {f"ATTENTION_{name.upper()}": value for name, value in settings.items()}
    before = {name: os.environ.get(name) for name in chosen}
    os.environ.update(chosen)

    def ready(port: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", "/health/ready")
        if connection.getresponse().status != 200:
            raise ConnectionError
        connection.close()

    try:
        with serving([sys.executable, "-m", "attention_service", "serve"], ready) as running:
            yield running
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def asked(port: int, request: Request, times: int) -> tuple[float, dict[str, float], Mapping[str, str]]:
    """Return one client's median milliseconds, those of each step from Server-Timing, and the last answer's headers."""
    found: list[float] = []
    steps: dict[str, list[float]] = {}
    headers: Mapping[str, str] = {}
    for turn in range(SETS + times):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        start = time.perf_counter()
        connection.request("POST", request.path, request.body, dict(request.headers))
        answer = connection.getresponse()
        size = len(answer.read())
        took = (time.perf_counter() - start) * 1e3
        connection.close()
        if answer.status != 200:
            raise SystemExit(f"{answer.status} of {size} bytes")
        headers = {name.lower(): value for name, value in answer.getheaders()} | {"bytes": str(size)}
        if turn >= SETS:
            found.append(took)
            for name, value in re.findall(r"(\w+);dur=([\d.]+)", headers["server-timing"]):
                steps.setdefault(name, []).append(float(value))
    return statistics.median(found), {name: statistics.median(values) for name, values in steps.items()}, headers


def kernel_step(device: str, size: Size) -> None:
    """Print the compute step of the server beside the kernels by themselves."""
    bare = bare_kernels(device, size)
    best = min(bare.values(), default=float("nan"))
    copies = pinned_copies(device, size)
    between = on_the_device(device, size)
    alone, kernel = in_process(device, size)
    with service(device) as running:
        _, steps, _ = asked(running.port, large_request(size), size.times)
    heads = "{} heads × {} × {}, bfloat16, without weights".format(*size.shape)
    table = Table(heads, "ms", "TFLOP/s", "× best")

    def add(name: str, milliseconds: float) -> None:
        rate = size.operations / milliseconds / 1e9
        table.add(name, f"{milliseconds:.3f}", f"{rate:.1f}", f"{milliseconds / best:.2f}")

    for name, milliseconds in bare.items():
        add(f"bare kernel: {name}", milliseconds)
    add("the backend on the device, between the copies", between)
    add("best bare kernel and pinned copies of the same bytes", best + copies)
    add(f"the backend, from NumPy to NumPy ({kernel})", alone)
    add("the server's compute step", steps["compute"])
    print(table)


def gradients_step(device: str, size: Size) -> None:
    """Print the gradients of query, key and value beside those of torch's autograd through its kernels."""
    shape = (1, *size.shape)
    table = Table("{} heads × {} × {}, output and gradients".format(*size.shape), "ms")
    for dtype in (torch.bfloat16, torch.float32):
        leaves = [torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for _ in range(3)]

        def differentiate(_: int, leaves: list[torch.Tensor] = leaves) -> object:
            return torch.autograd.grad(scaled_dot_product_attention(*leaves), leaves, leaves[0].detach())

        table.add(f"torch's autograd, {dtype}", f"{median_ms(device, differentiate, size.times):.3f}")
    between = on_the_device(device, size, gradients=True)
    table.add("the backend on the device, bfloat16 computed in float32", f"{between:.3f}")
    print(table)


def end_to_end_step(device: str, size: Size) -> None:
    """Print a binary request from end to end, beside the sum of kernel, copies and HTTP floor."""
    best = min(bare_kernels(device, size).values(), default=float("nan"))
    copies, request = pinned_copies(device, size), large_request(size)
    with service(device) as running:
        _, steps, headers = asked(running.port, request, size.times)
        whole = latency(running.port, request.message(), size.times)
    with FLOOR.started() as running:
        floor, keeping = (
            latency(running.port, Request(path, request.headers, request.body).message(), size.times)
            for path in (f"/{headers['bytes']}", f"/{headers['bytes']}?keep")
        )
    table = Table(f"{len(request.body) / 2**20:.0f} MiB there, {int(headers['bytes']) / 2**20:.0f} MiB back", "ms")
    table.add("best bare kernel", f"{best:.3f}")
    table.add("pinned copies of the same bytes", f"{copies:.3f}")
    table.add("HTTP floor: bare uvicorn, as many bytes", f"{floor:.3f}")
    table.add("the three together", f"{best + copies + floor:.3f}")
    table.add("bare uvicorn that keeps the body", f"{keeping:.3f}")
    table.add("the service", f"{whole:.3f}")
    for name, milliseconds in steps.items():
        table.add(f"of that {name}", f"{milliseconds:.3f}")
    table.add("the service / the three together", f"{whole / (best + copies + floor):.2f}")
    print(table)


def burst(port: int, messages: list[bytes]) -> tuple[float, list[float]]:
    """Send all messages at once, each by its own client; return the seconds until the last answer, and until each."""
    connections = [Connection(port) for _ in messages]
    selector = selectors.DefaultSelector()
    start = time.perf_counter()
    for connection, message in zip(connections, messages, strict=True):
        connection.send(message)
        selector.register(connection.socket, selectors.EVENT_READ, connection)
    found: list[float] = []
    while len(found) < len(messages):
        for key, _ in selector.select(60):
            if key.data.receive():
                found.append(time.perf_counter() - start)
                selector.unregister(key.fileobj)
    whole = time.perf_counter() - start
    for connection in connections:
        connection.close()
    return whole, found


def small_requests(count: int) -> list[bytes]:
    """Return so many requests of the shapes of W1 in JSON."""
    load, form = workloads()["W1"], lists("/attention", dtype="float32")
    random = np.random.default_rng(0)
    found = []
    for _ in range(count):
        query, key, value = (random.normal(size=load.query.shape).astype(np.float32) for _ in range(3))
        found.append(form.encode(replace(load, query=query, key=key, value=value)).message())
    return found


def small_step(device: str, size: Size) -> None:
    """Print many concurrent small requests, computed by NumPy and by torch."""
    table = Table(f"{size.clients} requests at once, JSON, with weights", "requests/s", "p50 ms", "p99 ms")
    for name, settings in (("NumPy, in the event loop", {"backend": "numpy"}), ("torch", {})):
        messages = small_requests(size.clients)
        with service(device, queue=str(size.clients), **settings) as running:  # none of which is refused
            burst(running.port, messages[:50])
            rates, times = [], []
            for _ in range(size.rounds):
                whole, found = burst(running.port, messages)
                rates.append(size.clients / whole)
                times += sorted(found)
            p50, p99 = (np.percentile(times, percent) * 1e3 for percent in (50, 99))
        rate = f"{statistics.median(rates):,.0f}"
        table.add(f"6 × 4: {name}", rate, f"{p50:.1f}", f"{p99:.1f}")
    print(table)


STEPS = {"kernel": kernel_step, "gradients": gradients_step, "end-to-end": end_to_end_step, "small": small_step}


def main() -> int:
    """Print the versions, then the table of each step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", choices=STEPS)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print(f"torch {torch.__version__} sees no GPU: nothing to measure.", file=sys.stderr)
        print("--device cpu runs everything with small sizes, as a test.", file=sys.stderr)
        return 1
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # one per connection
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard != resource.RLIM_INFINITY else max(soft, 65536), hard))
    name = "the CPU" if options.device == "cpu" else torch.cuda.get_device_name()
    cuda = "" if torch.version.cuda is None else f", CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
    print(f"{name}; {cpu_count()} processors; torch {torch.__version__}{cuda}, NumPy {np.__version__}, "
          f"Python {platform.python_version()}")  # fmt: skip
    for step, run in STEPS.items():
        if options.step in (None, step):
            print()
            run(options.device, FULL if options.device == "cuda" else SMOKE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
