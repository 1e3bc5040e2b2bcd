"""Arrays of NumPy as tensors of torch on the CPU, and back, with the same memory.

NumPy has no bfloat16 of its own, and torch does not know that of ml_dtypes: its bits go by another type.
"""

from __future__ import annotations

import numpy as np
import torch

from attention_service.attention.arrays import BFLOAT16


def as_tensor(array: np.ndarray) -> torch.Tensor:
    """The array, which is writeable, as a tensor."""
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """The tensor as an array; a copy for a tensor of another device, or one whose bits torch has yet to conjugate."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy(force=True).view(BFLOAT16)
    return tensor.numpy(force=True)
