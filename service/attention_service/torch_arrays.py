"""Arrays of NumPy as tensors of torch on the CPU, and back, with the same memory.

NumPy has neither bfloat16 nor float8 of its own, and torch does not know those of ml_dtypes: their bits go by another
type.
"""

from __future__ import annotations

from typing import Final

import ml_dtypes
import numpy as np
import torch

from attention_service.attention.arrays import BFLOAT16

# Types of torch that NumPy has from ml_dtypes, each with the type of NumPy that its bits go by.
FOREIGN: Final[dict[torch.dtype, tuple[np.dtype, np.dtype]]] = {
    torch.bfloat16: (BFLOAT16, np.dtype(np.int16)),
    torch.float8_e4m3fn: (np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(np.int8)),
    torch.float8_e5m2: (np.dtype(ml_dtypes.float8_e5m2), np.dtype(np.int8)),
    torch.float8_e4m3fnuz: (np.dtype(ml_dtypes.float8_e4m3fnuz), np.dtype(np.int8)),
}


def as_tensor(array: np.ndarray) -> torch.Tensor:
    """The array, which is writeable, as a tensor."""
    for dtype, (own, bits) in FOREIGN.items():
        if array.dtype == own:
            return torch.from_numpy(array.view(bits)).view(dtype)
    return torch.from_numpy(array)


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """The tensor as an array; a copy for a tensor of another device, or one whose bits torch has yet to conjugate."""
    if tensor.dtype in FOREIGN:
        own, bits = FOREIGN[tensor.dtype]
        return tensor.view(torch.int16 if bits.itemsize == 2 else torch.int8).numpy(force=True).view(own)
    return tensor.numpy(force=True)
