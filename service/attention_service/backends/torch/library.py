"""torch as an array library of the dense computation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, TypeVar

import array_api_compat.torch as xp
import numpy as np
import torch

from attention_service.attention.plan import Plan
from attention_service.attention.tiles import Tiling
from attention_service.backends.dense.library import Array, ArrayLibrary
from attention_service.backends.torch import devices, staging

# Tiles that may be queued on a GPU before the thread waits.
AHEAD: Final = 2

S = TypeVar("S")
T = TypeVar("T")


class TorchLibrary(ArrayLibrary):
    """torch on a device. dtype: of loaded floats, by default the type that the plan is computed in"""

    xp = xp

    def __init__(self, plan: Plan, device: torch.device, tiling: Tiling, dtype: np.dtype | None = None) -> None:
        super().__init__(plan)
        self.device = device
        self.tiling = tiling
        self.is_asynchronous = device.type != "cpu"  # type: ignore[misc]  # a class variable of other libraries
        self._loaded = self.native(dtype or plan.compute_dtype)

    def load(self, array: np.ndarray) -> Array:
        """The array on the device; floats in the type of this library."""
        tensor = staging.to_device(array, self.device)
        return tensor.to(self._loaded) if tensor.is_floating_point() else tensor

    def store(self, arrays: dict[str, Array]) -> dict[str, np.ndarray]:
        """Tensors in NumPy, each in the type that it is returned in."""
        return staging.to_host(
            {
                name: tensor.to(self.native(self.plan.output_dtype(name))) if tensor.is_floating_point() else tensor
                for name, tensor in arrays.items()
            }
        )

    def native(self, dtype: np.dtype) -> torch.dtype:
        """The type of torch for a type of NumPy."""
        found: torch.dtype = getattr(torch, dtype.name)
        return found

    def matmul(self, left: Array, right: Array, out: Array | None = None) -> Array:
        """The product over the last two axes; on the CPU entry by entry if matrices of the right meet several.

        torch repeats such matrices if there are several entries, and then multiplies them in another way.
        """
        if self.is_asynchronous or len(left) == 1 or left.shape[:-2] == right.shape[:-2]:
            return left @ right
        found = torch.empty((*left.shape[:-1], right.shape[-1]), dtype=left.dtype)
        for i, entry in enumerate(found):
            torch.matmul(left[i : i + 1], right[i : i + 1], out=entry[None])
        return found

    def linear(self, tokens: Array, weight: Array) -> Array:
        """tokens @ weight.T; on the CPU entry by entry, as torch would join their tokens to one product."""
        if self.is_asynchronous or len(tokens) == 1:
            return tokens @ weight.T
        out = torch.empty((*tokens.shape[:-1], len(weight)), dtype=tokens.dtype)
        for entry, mapped in zip(tokens, out, strict=True):
            torch.mm(entry, weight.T, out=mapped)
        return out

    def hide(self, array: Array, visible: Array, number: float) -> None:
        """Put a number wherever `visible` is False, in place."""
        array.masked_fill_(~visible, number)

    def top_indices(self, array: Array, count: int) -> Array:
        """The indices of the largest numbers of the last axis, in descending order, equal ones by lower index.

        Number and index of a float32 fit into one integer. Then no two are equal, and the largest few are found without
        sorting the rest.
        """
        if array.dtype != torch.float32:
            return torch.sort(array, dim=-1, descending=True, stable=True).indices[..., :count]
        keys = (array + 0.0).view(torch.int32).to(torch.int64)  # without -0
        keys ^= (keys >> 63) & 0x7FFFFFFF  # the bits of negative numbers are in the opposite order
        keys <<= 32
        keys |= torch.arange(keys.shape[-1] - 1, -1, -1, device=keys.device)
        return keys.topk(count, dim=-1).indices

    def sums_at(self, array: Array, places: np.ndarray, count: int) -> Array:
        """The numbers (…, x) with the same place in the last axis summed: (…, count)."""
        sums = torch.zeros((*array.shape[:-1], count), dtype=array.dtype, device=array.device)
        return sums.scatter_add_(-1, self.load(places), array)

    def take(self, array: Array, indices: Array, out: Array) -> None:
        """Write rows at indices to an array, ten times as fast as by indexing."""
        torch.index_select(array, 0, indices.reshape(-1).clamp(min=0), out=out.view(-1, array.shape[1]))

    def run(self, function: Callable[[S], T], tiles: Iterable[S]) -> Iterable[T]:
        """The results of a function for each tile or part, in order. The thread stays a few tiles ahead of a GPU."""
        pace = devices.Pace(self.device, AHEAD)
        for tile in tiles:
            yield function(tile)
            pace.step()
