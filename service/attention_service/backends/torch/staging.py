"""Copies between NumPy and a device.

Arrays go to a GPU in chunks, through pinned memory, which a GPU copies by itself: while one chunk is copied, the thread
fills the next. torch keeps pinned memory for later chunks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np
import torch

from attention_service.backends.base import no_check
from attention_service.backends.torch.devices import CPU, Pace, reserved
from attention_service.torch_arrays import as_array, as_tensor

CHUNK = 8 * 2**20  # bytes
AHEAD = 3


def warm_up(device: torch.device) -> None:
    """Have torch allocate the pinned memory for one transfer, which takes longer than the transfer."""
    numbers = np.zeros((AHEAD + 2) * CHUNK, np.uint8)
    with reserved(device, numbers.nbytes, no_check):
        fetch({"": send(numbers, device)})


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """The array as a tensor on a device, of the same type. On the CPU it shares memory, unless that is read-only.

    A copy to a GPU may not be complete yet; what the stream runs afterwards waits for it.
    """
    if device != CPU:
        return send(array, device)
    if array.flags.c_contiguous and array.flags.writeable:  # torch has no read-only tensors, and warns
        return as_tensor(array)
    copied = torch.empty(array.shape, dtype=as_tensor(np.empty(0, array.dtype)).dtype)  # which begins at 64 bytes
    as_array(copied)[...] = array
    return copied


def send(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy of the array on a device, row-major. Axes are put in order there, which is faster than on the CPU."""
    axes = sorted(range(array.ndim), key=lambda axis: -array.strides[axis])
    straight = array.transpose(axes)
    if not straight.flags.c_contiguous:
        axes, straight = list(range(array.ndim)), np.ascontiguousarray(array)
    source = as_tensor(_writeable(straight.reshape(-1)))
    target = torch.empty_like(source, device=device)
    pace = Pace(device, AHEAD)
    for here, there in _chunks(source, target):
        staged = torch.empty_like(here, pin_memory=device != CPU)
        staged.copy_(here)
        there.copy_(staged, non_blocking=True)
        pace.step()
    back = [axes.index(axis) for axis in range(array.ndim)]
    return target.reshape(straight.shape).permute(back).contiguous()


def to_host(tensors: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """The tensors as arrays, of the same types. Waits until the device has computed them."""
    if all(tensor.device == CPU for tensor in tensors.values()):
        return {name: as_array(tensor) for name, tensor in tensors.items()}
    return fetch(tensors)


def fetch(tensors: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Copies of the tensors, which lie on one device, as arrays."""
    found: dict[str, np.ndarray] = {}
    device = next(iter(tensors.values())).device
    pace = Pace(device, AHEAD)
    for name, tensor in tensors.items():
        # Of NumPy, which asks the system for large pages: a fresh page takes longer than the copy into it.
        found[name] = np.empty(tensor.shape, as_array(torch.empty(0, dtype=tensor.dtype)).dtype)
        target = as_tensor(found[name])
        for there, here in _chunks(tensor.contiguous().reshape(-1), target.reshape(-1)):
            staged = torch.empty_like(here, pin_memory=device != CPU)
            staged.copy_(there, non_blocking=True)
            pace.step(partial(here.copy_, staged))
    pace.wait()
    return found


def _chunks(one: torch.Tensor, other: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of chunks of two vectors of the same length."""
    size = max(1, CHUNK // one.element_size())
    return zip(one.split(size), other.split(size), strict=True)


def _writeable(array: np.ndarray) -> np.ndarray:
    """The array as writeable, which torch requires. The memory is only read, and only while `array` exists."""
    if array.flags.writeable or not array.size:
        return array
    memory = (ctypes.c_byte * array.nbytes).from_address(array.ctypes.data)
    return np.frombuffer(memoryview(memory), array.dtype)
