"""The linear maps of a projection in one form: weight (out, in), bias (out,)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from attention_service.attention.arrays import cast
from attention_service.attention.spec import LinearMap
from attention_service.errors import FieldConflict, MissingField, ShapeMismatch, shape


@dataclass(frozen=True, slots=True)
class DenseMap:
    """y = x Wᵀ + bias, all heads stacked in `out`.

    weight: (out, in)    bias: (out,) or None    heads: of a weight of rank 3, else None
    pointer: the place in the request
    """

    weight: np.ndarray
    pointer: str
    bias: np.ndarray | None = None
    heads: int | None = None

    @property
    def features(self) -> int:
        """The numbers per token that come out of the map."""
        return int(self.weight.shape[0])


def dense(linear: LinearMap, name: str, in_features: int | None, dtype: np.dtype) -> DenseMap:
    """A map of a request as a DenseMap, its bias unchecked. in_features: numbers per token that go in, None for any

    Errors: MissingField, FieldConflict (not exactly one of weight and kernel), ShapeMismatch.
    """
    base = f"/projection/{name}"
    given = [(name, x) for name, x in (("weight", linear.weight), ("kernel", linear.kernel)) if x is not None]
    if len(given) != 1:
        error, got = (FieldConflict, "both") if given else (MissingField, "neither")
        raise error.at(base, "weight (out, in) or kernel (in, out)", got)
    [(field, matrix)] = given
    pointer = f"{base}/{field}"
    ranks = (2,) if name == "output" else (2, 3)
    axes = "(out, in)" if linear.kernel is None else "(in, out)"
    if matrix.ndim not in ranks or 0 in matrix.shape:
        per_head = "" if name == "output" else f", or (heads, {axes[1:-1]})"
        raise ShapeMismatch.of(pointer, f"{axes}{per_head}", matrix)
    oriented = matrix if linear.kernel is None else matrix.swapaxes(-1, -2)
    if in_features is not None and oriented.shape[-1] != in_features:
        wanted = ("·", in_features) if linear.kernel is None else (in_features, "·")
        leading = ("·",) if matrix.ndim == 3 else ()
        raise ShapeMismatch.of(pointer, shape(leading + wanted), matrix, f"{in_features} features go in")
    heads = matrix.shape[0] if matrix.ndim == 3 else None
    flat = cast(oriented, dtype, pointer).reshape(-1, oriented.shape[-1])
    return DenseMap(flat, pointer, linear.bias, heads)


def with_bias(found: DenseMap, heads: int | None, dtype: np.dtype) -> DenseMap:
    """A map with its bias checked and flattened to (out,).

    heads: that the features are split into; None for the output map, whose bias has no form per head

    Errors: ShapeMismatch, InvalidArray, Overflow.
    """
    if found.bias is None:
        return found
    out = found.features
    shapes: list[tuple[int, ...]] = [(out,), (out, 1)]
    if heads is not None and out % heads == 0:
        shapes += [(heads, out // heads), (heads, out // heads, 1)]
    pointer = found.pointer.rpartition("/")[0] + "/bias"
    if found.bias.shape not in shapes:
        raise ShapeMismatch.of(pointer, " or ".join(map(shape, dict.fromkeys(shapes))), found.bias)
    return replace(found, bias=cast(found.bias, dtype, pointer).reshape(out))
