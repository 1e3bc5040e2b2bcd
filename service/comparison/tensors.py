"""Arrays of other libraries as NumPy's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from service.attention.arrays import BFLOAT16


def as_numpy(value: Any) -> Any:
    """A value whose arrays are NumPy's: tensors of torch are taken from their device, bfloat16 stays bfloat16."""
    if isinstance(value, Mapping):
        return {name: as_numpy(inner) for name, inner in value.items()}
    if isinstance(value, list) and value and all(isinstance(row, np.ndarray) for row in value):
        return np.asarray(value)
    if isinstance(value, np.ndarray):
        return np.asarray(value)  # of a subclass, like matrix
    if isinstance(value, np.generic | list | str | int | float) or value is None:
        return value
    if hasattr(value, "detach"):  # torch, which has no bfloat16 to give to NumPy
        value = value.detach().cpu()
        if str(value.dtype) == "torch.bfloat16":
            return value.view(value.new_empty(0).short().dtype).numpy().view(BFLOAT16)
        return value.numpy()
    return np.asarray(value) if hasattr(value, "__array__") else value
