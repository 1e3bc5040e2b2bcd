"""Fields of a request as JSON has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from attention_service.attention.arrays import is_float


def json_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a request without ndarrays: nested lists, and the type that they had as `dtype`."""
    dtype = next(value.dtype for value in fields.values() if isinstance(value, np.ndarray) and is_float(value.dtype))
    return {"dtype": dtype.name} | {name: _as_lists(value) for name, value in fields.items()}


def _as_lists(value: Any) -> Any:
    """A value of a request without ndarrays; numbers of halves as the numbers that they are."""
    if isinstance(value, Mapping):
        return {name: _as_lists(inner) for name, inner in value.items()}
    if isinstance(value, np.ndarray):
        return (value if value.dtype.kind in "biu" else value.astype(np.float64)).tolist()
    return value
