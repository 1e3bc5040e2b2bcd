"""Devices of torch: which there are, their memory, their streams."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from threading import get_ident

import torch

from attention_service.backends.base import Check, no_check
from attention_service.backends.torch.memory import DeviceMemory
from attention_service.errors import UnknownBackend

CPU = torch.device("cpu")


@cache
def count() -> int:
    """The number of GPUs."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def resolve(device: str) -> torch.device:
    """The device of this name; auto is a GPU where there is one. Errors: UnknownBackend."""
    if device == "auto":
        device = "cuda" if count() else "cpu"
    if device == "cpu":
        return CPU
    index = int(device.partition(":")[2] or 0)
    if index >= count():
        got = f"{count()} CUDA devices" if count() else "no CUDA device"
        raise UnknownBackend.at("/device", f"a device that is there, not {device}", got)
    return torch.device("cuda", index)


def free(device: torch.device) -> int | None:
    """Bytes of a GPU that this process may take, with what torch has taken for it already; None for the CPU."""
    if device.type == "cpu":
        return None
    return int(torch.cuda.mem_get_info(device)[0]) + int(torch.cuda.memory_reserved(device))


@cache
def memory(device: torch.device) -> DeviceMemory:
    """The memory of a GPU, which all backends of the process share."""
    return DeviceMemory(lambda: free(device) or 0)


@contextmanager
def reserved(device: torch.device, needed: int, check: Check) -> Iterator[None]:
    """Context in which bytes of a GPU are reserved and this thread uses its own stream; nothing for the CPU.

    Streams let one request copy while another computes. Errors: OutOfMemory, and what `check` raises.
    """
    if device.type == "cpu":
        yield
        return
    stream = torch.cuda.stream(_stream(device, get_ident()))
    with memory(device).reserve(needed, check), torch.cuda.device(device), stream:
        yield


@cache
def _stream(device: torch.device, thread: int) -> torch.cuda.Stream:
    """The stream of a thread."""
    return torch.cuda.Stream(device)


class Pace:
    """Keeps a thread at most `ahead` steps before its GPU, so that a computation can be ended soon."""

    def __init__(self, device: torch.device, ahead: int) -> None:
        self._is_gpu = device.type != "cpu"
        self._ahead = ahead
        self._pending: deque[tuple[torch.cuda.Event | None, Callable[[], object]]] = deque()

    def step(self, done: Callable[[], object] = no_check) -> None:
        """Wait, after a step, until the GPU is at most `ahead` steps behind. done: called when the step is complete"""
        event = torch.cuda.Event(blocking=True) if self._is_gpu else None
        if event is not None:
            event.record()
        self._pending.append((event, done))
        self.wait(self._ahead)

    def wait(self, most: int = 0) -> None:
        """Wait until at most so many steps are not complete."""
        while len(self._pending) > most:
            event, done = self._pending.popleft()
            if event is not None:
                event.synchronize()
            done()


def is_out_of_memory(error: BaseException) -> bool:
    """True if an allocation failed, on a GPU or on the CPU, for which torch has no error class."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    signs = ("out of memory", "not enough memory", "can't allocate memory", "bad_alloc", "ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(sign in text for sign in signs)


def is_lost(device: torch.device) -> bool:
    """True if a kernel on a GPU failed so that CUDA refuses all that this process asks of it from then on."""
    if device.type != "cpu":
        try:
            torch.cuda.synchronize(device)
        except RuntimeError:
            return True
    return False


def release_unused(device: torch.device) -> None:
    """Release the memory of a GPU that torch keeps for later allocations."""
    if device.type != "cpu":
        torch.cuda.empty_cache()
