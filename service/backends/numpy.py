"""The NumPy backend."""

from __future__ import annotations

import numpy as np

from service.attention.arrays import is_float
from service.attention.plan import Plan
from service.attention.result import Computed
from service.backends.dense import Library, compute, load_operands
from service.errors import UnknownBackend, quote


# Overflow is found by looking at the numbers, with an error that says what to do; a warning would add nothing.
@np.errstate(all="ignore")
def execute(plan: Plan, device: str) -> Computed:
    """Compute what the plan includes, on the CPU. Errors: Overflow, UnknownBackend for another device."""
    if device not in ("auto", "cpu"):
        raise UnknownBackend.at(
            "/device", "cpu, all that the numpy backend has", quote(device), "ask for backend torch"
        )
    computing = plan.compute_dtype

    def load(array: np.ndarray) -> np.ndarray:
        return array.astype(computing, copy=False) if is_float(array.dtype) else array

    def store(array: np.ndarray) -> np.ndarray:
        return array

    lib = Library(np, "cpu", load, store)
    return compute(plan, lib, load_operands(plan, lib), "numpy")
