"""The norms of query, key and value of a request, checked and in the axes of operands."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from attention_service.attention.arrays import cast
from attention_service.attention.spec import Norm
from attention_service.errors import InvalidValue, ShapeMismatch, shape


def make_norm(norm: Norm | None, field: str, heads: int, features: int, dtype: np.dtype) -> Norm | None:
    """A norm of a request with `weight` and `bias` in a type: (d,), or one for each head (h, 1, d).

    field: of the request; heads, features: of what is normalised

    Errors: InvalidValue, InvalidArray, ShapeMismatch, Overflow.
    """
    if norm is None:
        return None
    if not 0 <= norm.eps < math.inf:
        raise InvalidValue.of(f"/{field}/eps", "a finite number of at least 0", norm.eps)
    if norm.position == "after" and field == "value_norm":
        raise InvalidValue.of("/value_norm/position", "before, as values are not rotated", "after")
    is_over_all = norm.over == "all"

    def made(array: np.ndarray | None, pointer: str) -> np.ndarray | None:
        if array is None:
            return None
        allowed = [(heads * features,)] if is_over_all else [(features,), (heads, features)]
        if array.shape not in allowed:
            wanted = " or ".join(shape(one) for one in allowed)
            raise ShapeMismatch.of(pointer, f"{wanted}, as over is {norm.over}", array)
        found = cast(array, dtype, pointer)
        return found if array.shape == (features,) and not is_over_all else found.reshape(heads, 1, features)

    return replace(norm, weight=made(norm.weight, f"/{field}/weight"), bias=made(norm.bias, f"/{field}/bias"))
