"""Devices of torch: which there are, their memory, their streams."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch

from service.backends.room import Room
from service.errors import UnknownBackend

CPU = torch.device("cpu")

_local = threading.local()


@cache
def count() -> int:
    """How many GPUs there are."""
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
def room(device: torch.device) -> Room:
    """The memory of a GPU."""
    return Room(lambda: free(device) or 0)


@contextmanager
def at_work(device: torch.device, needed: int, check: Callable[[], None]) -> Iterator[None]:
    """Inside, the memory is this thread's, and what it asks of a GPU goes into a stream of its own.

    So what one request copies passes beside what another one computes. Errors: NoRoom, and those of `check`.
    """
    if device.type == "cpu":
        yield
        return
    with room(device).hold(needed, check), torch.cuda.device(device), torch.cuda.stream(_stream(device)):
        yield


def _stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of this thread."""
    streams: dict[torch.device, torch.cuda.Stream] = _local.__dict__.setdefault("streams", {})
    if device not in streams:
        streams[device] = torch.cuda.Stream(device)
    return streams[device]


class Pace:
    """Keeps a thread from running far ahead of its GPU, so that it can still be stopped: at most so many steps."""

    def __init__(self, device: torch.device, ahead: int) -> None:
        self._is_apart = device.type != "cpu"
        self._ahead = ahead
        self._under_way: deque[torch.cuda.Event] = deque()

    def step(self) -> None:
        """Call after each step. The GPU has more to do when this returns, however long it waited."""
        if not self._is_apart:
            return
        event = torch.cuda.Event(blocking=True)
        event.record()
        self._under_way.append(event)
        if len(self._under_way) > self._ahead:
            self._under_way.popleft().synchronize()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on a GPU or on the CPU, where torch has no type for it."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    signs = ("out of memory", "not enough memory", "can't allocate memory", "bad_alloc", "ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(sign in text for sign in signs)


def forget_unused(device: torch.device) -> None:
    """Give back what torch keeps of a GPU's memory for later, after it was not enough."""
    if device.type != "cpu":
        torch.cuda.empty_cache()
