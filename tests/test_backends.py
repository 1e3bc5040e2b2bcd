"""The choice of the backend, its warm-up, and the memory of a device that requests share."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import grpc
import httpx
import numpy as np
import pytest

from attention_service import attend
from attention_service.attention.spec import Output
from attention_service.backends.base import OutOfMemory
from attention_service.backends.numpy.backend import NumpyBackend
from attention_service.backends.registry import Backends
from attention_service.backends.torch.memory import DeviceMemory
from attention_service.codecs.decoded import Decoded
from attention_service.pipeline.admission import memory_limit_error
from attention_service.pipeline.engine import Engine
from attention_service.runtime.machine import memory_left
from attention_service.settings import Settings
from benchmarks.serving import free_port
from tests.conftest import app, serving
from tests.helpers import wire
from tests.helpers.backends import BACKENDS
from tests.helpers.devices import missing_gpu
from tests.helpers.messages import request
from tests.helpers.oip import INFER
from tests.helpers.rpc import remote
from tests.helpers.waiting import TIMEOUT, until
from tests.test_compare_calls import RAGGED, VARLEN
from tests.test_engines_wire import as_json

# A request that asks for a cluster.
FOR_RAY: Final = {"input": [[1]], "backend": "ray"}


def do_nothing() -> None:
    """A check for cancellation that never raises."""


def test_requests_share_a_device_s_memory() -> None:
    memory, order = DeviceMemory(lambda: 100), list[str]()
    waits = threading.Event()

    def second() -> None:
        with memory.reserve(60, waits.set):
            order.append("second")

    with memory.reserve(60, do_nothing), memory.reserve(40, do_nothing):
        thread = threading.Thread(target=second)
        thread.start()
        assert waits.wait(TIMEOUT)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_a_reservation_that_never_fits_is_refused_and_a_waiting_one_can_be_cancelled() -> None:
    memory = DeviceMemory(lambda: 100)
    with pytest.raises(OutOfMemory) as refused:
        memory.reserve(101, do_nothing).__enter__()
    assert (refused.value.needed, refused.value.available) == (101, 100)

    def cancel() -> None:
        raise TimeoutError

    with memory.reserve(60, do_nothing):
        with pytest.raises(TimeoutError):
            memory.reserve(60, cancel).__enter__()
        with memory.reserve(40, cancel):  # enough is free, so that it does not wait
            pass
    with memory.reserve(100, cancel):
        pass


# The default backend.


# Makes torch appear as not installed.
WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from attention_service.cli import main
from attention_service.pipeline.engine import Engine
from attention_service.settings import Settings
assert Engine(Settings.model_construct(backend="auto")).ready
sys.exit(main(["serve"]))
"""


@pytest.mark.parametrize("workers", ["1", "2"])
def test_without_torch_auto_is_numpy_and_the_setting_torch_is_an_error(workers: str) -> None:
    environment = os.environ | {"ATTENTION_BACKEND": "torch", "ATTENTION_WORKERS": workers}
    command = [sys.executable, "-c", WITHOUT_TORCH]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert (done.returncode, done.stderr.splitlines()) == (
        2,
        [
            "ATTENTION_BACKEND=auto: torch is not there, or sees no GPU; NumPy computes",
            "ATTENTION_BACKEND: torch is not there; install attention-service[torch]",
        ],
    )


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed")
def test_a_request_for_ray_without_ray_names_the_extra() -> None:
    with serving(app(ray_address="10.0.0.5:6379")) as client:
        response = client.post("/attention", json=FOR_RAY)
    assert (response.status_code, response.json()["code"]) == (422, "unknown_backend")
    (fault,) = response.json()["errors"]
    assert (fault["pointer"], fault["got"]) == ("/backend", "ray without ray")
    assert fault["hint"] == "install attention-service[ray] where the service runs"


# Requests that ask for ray, by the paths of the operations that compute with the backend of a request.
ASKING = {
    "attention": ("/attention", FOR_RAY),
    "a call": ("/attention/call", {"call": VARLEN, "arguments": as_json(RAGGED), "backend": "ray"}),
    "the inference protocol": (INFER, {
        "inputs": [{"name": "input", "datatype": "FP64", "shape": [1, 1], "data": [1]}],
        "parameters": {"backend": "ray"},
    }),
}  # fmt: skip
SETTINGS = "ATTENTION_RAY_ADDRESS or ATTENTION_BACKEND=ray"


@pytest.mark.parametrize(("path", "body"), ASKING.values(), ids=ASKING)
def test_ray_is_refused_unless_a_setting_names_it(client: httpx.Client, path: str, body: dict[str, Any]) -> None:
    response = client.post(path, json=body)
    assert response.status_code == 422
    assert "/backend" in response.text
    assert f"{SETTINGS} must be set where the service runs" in response.text


def test_ray_is_refused_over_grpc() -> None:
    with remote() as server, pytest.raises(grpc.RpcError, match=SETTINGS) as error:
        server.infer(request({"input": np.eye(2)}, {"backend": "ray"}))
    assert error.value.code().name == "INVALID_ARGUMENT"


@pytest.mark.parametrize("path", ["/attention/compare", "/attention/heatmap"])
def test_comparisons_and_heatmaps_need_no_ray(client: httpx.Client, path: str) -> None:
    assert client.post(path, json=FOR_RAY).status_code == 200


def test_a_refused_backend_is_not_waited_for() -> None:
    """So that a small request which names it is answered inline, without a slot."""
    assert not Backends(ray_address=None).may_wait("ray", "auto")
    assert Backends().may_wait("ray", "auto")


@pytest.mark.torch
def test_auto_is_torch_only_with_a_gpu() -> None:
    expected = "numpy" if missing_gpu() else "torch"
    assert Backends("auto").preferred == expected
    assert Backends("torch").preferred == "torch"
    assert Backends("numpy").preferred == "numpy"


@pytest.mark.torch
def test_requests_without_a_backend_use_that_of_the_settings() -> None:
    def backend(client: httpx.Client, **options: str) -> str:
        answer = client.post("/attention", json={"input": [[1.0]]} | options).json()
        return str(answer["metadata"]["backend"])

    with serving(app(backend="torch")) as client:
        assert [backend(client), backend(client, backend="numpy")] == ["torch", "numpy"]
        assert backend(client, device="cpu") == "torch"
    with serving(app()) as client:
        assert [backend(client), backend(client, backend="torch")] == ["numpy", "torch"]


READY = ("/health/ready", "/v2/health/ready", "/v2/models/attention/ready", "/v2/models/attention/versions/1/ready")


def test_a_service_is_ready_after_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    warm = threading.Event()
    monkeypatch.setattr(NumpyBackend, "warm_up", lambda self, device: warm.wait(TIMEOUT))
    service = app()
    service.state.engine.ready = False  # as if torch had to be loaded
    with serving(service) as client:
        assert client.get("/health/live").status_code == 200
        for path in READY:
            response = client.get(path)
            assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert client.get("/health/ready").json()["code"] == "busy"
        assert client.post("/attention", json={"input": [[1.0]]}).status_code == 200, "it computes, if it is asked"
        warm.set()
        until(lambda: client.get("/health/ready").status_code == 200)
        assert {client.get(path).status_code for path in READY} == {200}


def test_a_service_that_cannot_warm_up_never_becomes_ready(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: NumpyBackend, device: str) -> None:
        raise RuntimeError("the driver is too old")

    monkeypatch.setattr(NumpyBackend, "warm_up", fail)
    service = app()
    service.state.engine.ready = False
    with serving(service) as client:
        until(lambda: "the driver is too old" in caplog.text)
        assert client.get("/health/ready").status_code == 503
        assert client.get("/health/live").status_code == 200


@pytest.mark.torch
def test_torch_warms_up_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    from attention_service.backends.torch.backend import TorchBackend

    warm: list[str] = []
    warm_up = TorchBackend.warm_up

    def recorded(self: TorchBackend, device: str) -> None:
        warm_up(self, device)
        warm.append(device)

    monkeypatch.setattr(TorchBackend, "warm_up", recorded)
    with serving(app(backend="torch")) as client:
        until(lambda: client.get("/health/ready").status_code == 200)
        assert warm == ["auto"]


# Allocations that fail.

LIMITED = """
import resource, sys
import attention_service.app
if sys.argv[2] == "torch":
    import attention_service.backends.torch.backend
from pathlib import Path
pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
from attention_service.cli import main
sys.exit(main(["serve", "--port", sys.argv[1], "--threads", "1"]))
"""


def assert_refused(response: httpx.Response) -> None:
    assert (response.status_code, response.json()["code"]) == (413, "memory_limit")
    (fault,) = response.json()["errors"]
    size = r"[\d.]+([KMG]i)?B"
    assert re.fullmatch(f"a request that needs about {size}, while {size} is (free|allowed)", fault["got"])
    assert "top_k" in fault["hint"]


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_failed_allocation_is_a_413_and_the_service_continues(backend: str) -> None:
    """The operating system limits the address space; the service's own limit would allow the request."""
    port = free_port()
    environment = os.environ | {"ATTENTION_MEMORY_LIMIT": "64GiB", "ATTENTION_LOG_LEVEL": "error"}
    process = subprocess.Popen([sys.executable, "-c", LIMITED, str(port), backend, str(2**30)], env=environment)
    long = wire.write({"input": np.ones((20_000, 1), np.float32), "backend": backend}, "safetensors")
    headers = {"Content-Type": "application/vnd.safetensors", "Accept": "application/json"}
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            until(lambda: listens(client, process))
            for _ in range(3):
                assert_refused(client.post("/attention", content=long, headers=headers))
                small = client.post("/attention", json={"input": [[1.0]], "backend": backend})
                assert (small.status_code, small.json()["output"]) == (200, [[1.0]])
    finally:
        process.terminate()
        assert process.wait(TIMEOUT) == 0


@pytest.mark.slow
def test_a_body_that_does_not_fit_is_a_413_and_the_service_continues() -> None:
    """The parser needs several times as much memory as is left, which no estimate can predict."""
    port = free_port()
    limits = {"ATTENTION_MEMORY_LIMIT": "64GiB", "ATTENTION_LOG_LEVEL": "error"}
    process = subprocess.Popen([sys.executable, "-c", LIMITED, str(port), "numpy", str(2**28)], env=os.environ | limits)
    body = b'{"input": [[' + b"1," * (12 * 2**20) + b"1]]}"
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            until(lambda: listens(client, process))
            refused = client.post("/attention", content=body, headers={"Content-Type": "application/json"})
            assert (refused.status_code, refused.json()["code"]) == (413, "memory_limit")
            small = client.post("/attention", json={"input": [[1.0]]})
            assert (small.status_code, small.json()["output"]) == (200, [[1.0]])
    finally:
        process.terminate()
        assert process.wait(TIMEOUT) == 0


def listens(client: httpx.Client, process: subprocess.Popen[bytes]) -> bool:
    """True if the service responds; asserts that its process runs."""
    with suppress(httpx.TransportError):
        return client.get("/health/ready").status_code == 200
    assert process.poll() is None
    return False


@pytest.mark.torch
@pytest.mark.parametrize("text", ["CUDA out of memory. Tried to allocate 9.00 GiB.", ""])
def test_a_failed_gpu_allocation_is_a_413_and_the_service_continues(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocation raises the exception that torch raises on a GPU without free memory."""
    import torch

    from attention_service.backends.torch import devices, staging

    given_back: list[torch.device] = []
    monkeypatch.setattr(devices, "release_unused", given_back.append)
    to_device, failures = staging.to_device, [True, True]

    def fail_first(array: np.ndarray, device: torch.device) -> torch.Tensor:
        if failures and failures.pop():
            raise torch.OutOfMemoryError(text)
        return to_device(array, device)

    monkeypatch.setattr(staging, "to_device", fail_first)
    request = {"input": [[1.0]], "backend": "torch"}
    with serving(app()) as client:
        for _ in range(2):
            assert_refused(client.post("/attention", json=request))
        assert client.post("/attention", json=request).json()["output"] == [[1.0]]
    assert given_back == [devices.CPU] * 2


@pytest.mark.torch
def test_other_errors_of_torch_do_not_count_as_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from attention_service.backends.torch import staging

    def fail(*given: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(staging, "to_device", fail)
    with pytest.raises(RuntimeError, match="illegal"):
        attend(input=[[1.0]], backend="torch")


def test_the_memory_left_is_none_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    left = memory_left()
    assert left is not None
    assert left > 2**20

    def no_file(*given: object, **options: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", no_file)
    assert memory_left() is None
    refusal = memory_limit_error(5 * 2**20, None, "")
    assert "expected a request that fits into memory, got a request that needs about 5.0MiB" in str(refusal)


@pytest.mark.parametrize(
    ("include", "hint"),
    [
        ((), "fewer queries or keys"),
        (("attention_weights",), "top_k"),
        (("scores", "attention_weights"), "include without attention_weights, scores"),
    ],
)
def test_the_problem_of_a_refused_request_names_options_that_need_less_memory(
    include: tuple[Output, ...], hint: str
) -> None:
    attention = Engine(Settings.model_construct()).attention
    request = attention.prepare(Decoded({"input": np.ones((1, 1)), "include": list(include)}, frozenset()))
    assert hint in str(memory_limit_error(2, 1, attention.advice(request)))


def test_a_full_device_is_a_413_with_the_amount_of_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: object) -> None:
        raise OutOfMemory(5 * 2**30, 3 * 2**30)

    monkeypatch.setattr(NumpyBackend, "execute", full)
    with serving(app()) as client:
        response = client.post("/attention", json={"input": [[1.0]], "is_causal": True})
    assert response.status_code == 413
    (fault,) = response.json()["errors"]
    assert fault["got"] == "a request that needs about 5.0GiB, while 3.0GiB is free"


def test_numpy_needs_no_warm_up() -> None:
    engine = Engine(Settings.model_construct())
    assert engine.ready
    engine.warm_up()
    assert engine.ready
