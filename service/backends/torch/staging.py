"""From NumPy to a device and back.

To a GPU numbers cross in chunks, by way of memory that the system may not move (pinned), as only that crosses by
itself: while one chunk does, the next is put in place. torch keeps such memory for the chunks to come.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterator, Mapping

import numpy as np
import torch

from service.attention.arrays import BFLOAT16
from service.backends.torch.devices import CPU, Pace, at_work

CHUNK = 8 * 2**20  # bytes
AHEAD = 3


def warm_up(device: torch.device) -> None:
    """Have torch make the pinned memory that is in use at a time, which takes longer than numbers take to cross."""
    numbers = np.zeros((AHEAD + 2) * CHUNK, np.uint8)
    with at_work(device, numbers.nbytes, lambda: None):
        fetch({"": send(numbers, device)})


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """The same numbers on a device, of the same type. What is asked of the device after this finds them there.

    On the CPU the same memory, unless it may not be written to.
    """
    if device == CPU:
        contiguous = np.ascontiguousarray(array)
        if not contiguous.flags.writeable:  # torch has no read-only tensors, and warns
            contiguous = contiguous.copy()
        return _tensor(contiguous)
    return send(array, device)


def send(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """The same numbers in memory of the device, row-major. Axes are put in order there, where that is quicker."""
    axes = sorted(range(array.ndim), key=lambda axis: -array.strides[axis])
    straight = array.transpose(axes)
    if not straight.flags.c_contiguous:
        axes, straight = list(range(array.ndim)), np.ascontiguousarray(array)
    source = _tensor(_writeable(straight.reshape(-1)))
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
    """The same numbers in NumPy, when all that was asked of the device before is done: this is what waits for it."""
    if all(tensor.device == CPU for tensor in tensors.values()):
        return {name: _array(tensor) for name, tensor in tensors.items()}
    return fetch(tensors)


def fetch(tensors: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """The same numbers in memory of their own."""
    found: dict[str, np.ndarray] = {}
    under_way: deque[tuple[torch.Tensor, torch.Tensor, torch.cuda.Event | None]] = deque()

    def put(staged: torch.Tensor, target: torch.Tensor, crossed: torch.cuda.Event | None) -> None:
        if crossed is not None:
            crossed.synchronize()
        target.copy_(staged)

    for name, tensor in tensors.items():
        target = torch.empty(tensor.shape, dtype=tensor.dtype)
        found[name] = _array(target)
        for there, here in _chunks(tensor.contiguous().reshape(-1), target.reshape(-1)):
            staged = torch.empty_like(here, pin_memory=there.device != CPU)
            staged.copy_(there, non_blocking=True)
            under_way.append((staged, here, _crossed(there.device)))
            if len(under_way) > AHEAD:
                put(*under_way.popleft())
    for waiting in under_way:
        put(*waiting)
    return found


def _crossed(device: torch.device) -> torch.cuda.Event | None:
    """What is reached when all that was asked of the device so far is done."""
    if device == CPU:
        return None
    event = torch.cuda.Event(blocking=True)
    event.record()
    return event


def _chunks(one: torch.Tensor, other: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Two vectors of one length, part by part."""
    size = max(1, CHUNK // one.element_size())
    return zip(one.split(size), other.split(size), strict=True)


def _writeable(array: np.ndarray) -> np.ndarray:
    """The same memory, as if it might be written to, which torch asks of all. It is only read, while `array` lives."""
    if array.flags.writeable or not array.size:
        return array
    memory = (ctypes.c_byte * array.nbytes).from_address(array.ctypes.data)
    return np.frombuffer(memoryview(memory), array.dtype)


def _tensor(array: np.ndarray) -> torch.Tensor:
    """The same memory; torch does not know NumPy's bfloat16."""
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _array(tensor: torch.Tensor) -> np.ndarray:
    """The same memory."""
    is_strange = tensor.dtype == torch.bfloat16
    array: np.ndarray = tensor.view(torch.int16).numpy().view(BFLOAT16) if is_strange else tensor.numpy()
    return array
