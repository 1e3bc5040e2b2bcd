"""Normalisation of query, key, value and head outputs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from attention_service.attention.array_functions import Array, ArrayFunctions
from attention_service.attention.arrays import cast, norm
from attention_service.attention.score_term import Bound, Frame
from attention_service.attention.spec import AttentionSpec, Norm, NormKind, NormOver, NormPosition
from attention_service.attention.steps.step import OperandStep, Parameters
from attention_service.errors import InvalidValue, ShapeMismatch, shape


@dataclass(frozen=True, slots=True)
class NormStep(OperandStep):
    """x / sqrt(mean(x²) + eps) · weight + bias, see `Norm`. weight, bias: (d,), for each head (h, 1, d), or None"""

    kind: NormKind = "rms"
    over: NormOver = "head"
    position: NormPosition = "before"
    weight: np.ndarray | None = None
    bias: np.ndarray | None = None
    eps: float = 1e-6

    @classmethod
    def of(cls, spec: AttentionSpec, frame: Frame) -> dict[str, Self]:
        """The `query_norm`, `key_norm`, `value_norm` and `output_norm` of a request."""
        h, g, *_, d, e = frame.sizes
        made = {}
        for role, heads, features in (("query", h, d), ("key", g, d), ("value", g, e), ("output", h, e)):
            given: Norm | None = getattr(spec, f"{role}_norm")
            if given is not None:
                made[role] = cls._checked(given, f"{role}_norm", heads, features, frame.dtype)
        return made

    @classmethod
    def _checked(cls, given: Norm, field: str, heads: int, features: int, dtype: np.dtype) -> Self:
        """The step of one field. heads, features: of what is normalised"""
        if not 0 <= given.eps < math.inf:
            raise InvalidValue.of(f"/{field}/eps", "a finite number of at least 0", given.eps)
        if given.position == "after" and field in ("value_norm", "output_norm"):
            what = field.removesuffix("_norm")
            raise InvalidValue.of(f"/{field}/position", f"before, as {what}s are not rotated", "after")
        is_over_all = given.over == "all"
        allowed = [(heads * features,)] if is_over_all else [(features,), (heads, features)]

        def checked(array: np.ndarray | None, pointer: str) -> np.ndarray | None:
            if array is None:
                return None
            if array.shape not in allowed:
                expected = " or ".join(map(shape, allowed))
                raise ShapeMismatch.of(pointer, f"{expected}, as over is {given.over}", array)
            numbers = cast(array, dtype, pointer)
            return numbers if array.shape == (features,) and not is_over_all else numbers.reshape(heads, 1, features)

        weight, bias = checked(given.weight, f"/{field}/weight"), checked(given.bias, f"/{field}/bias")
        return cls(given.kind, given.over, given.position, weight, bias, given.eps)

    @property
    def needs_all_heads(self) -> bool:
        return self.over == "all"

    @property
    def _axes(self) -> tuple[int, ...]:
        """The axes of (b, h, l, d) that one mean is taken over."""
        return (1, 3) if self.over == "all" else (3,)

    def part(self, batches: np.ndarray, heads: np.ndarray, tokens: np.ndarray) -> Self:
        weight, bias = (
            numbers[heads] if numbers is not None and numbers.ndim == 3 else numbers
            for numbers in (self.weight, self.bias)
        )
        return replace(self, weight=weight, bias=bias)

    def apply(self, array: Array, functions: ArrayFunctions, bound: Bound) -> Array:
        scaled, _ = self._normalised(array, functions, bound)
        if self.weight is not None:
            scaled *= functions.load(self.weight)
        if self.bias is not None:
            scaled += functions.load(self.bias)
        return scaled

    def backward(self, array: Array, grad: Array, functions: ArrayFunctions, bound: Bound) -> tuple[Array, Parameters]:
        """y = x / size: dx = (dy - y · mean(dy · y)) / size, for layer minus its mean. 0 where the size is 0."""
        xp, axes = functions.xp, self._axes
        scaled, size = self._normalised(array, functions, bound)
        parameters: Parameters = {}
        if self.bias is not None:
            parameters["bias"] = _summed(grad, self.bias, xp)
        if self.weight is not None:
            parameters["weight"] = _summed(grad * scaled, self.weight, xp)
            grad = grad * functions.load(self.weight)
        before = (grad - scaled * xp.mean(grad * scaled, axis=axes, keepdims=True)) / xp.where(size == 0, 1, size)
        before = xp.where(size == 0, xp.zeros_like(before), before)
        if self.kind == "layer":
            before = before - xp.mean(before, axis=axes, keepdims=True)
        return before, parameters

    def _normalised(self, array: Array, functions: ArrayFunctions, bound: Bound) -> tuple[Array, Array]:
        """An operand (b, h, l, d) divided by its size, without weight and bias; and the size it was divided by."""
        xp, axis, eps, limits = functions.xp, self._axes, self.eps, np.finfo(functions.compute_dtype)
        # Where squares could overflow or underflow.
        careful = ~np.atleast_1d(bound < math.sqrt(float(limits.max) / 4)) | (eps < float(limits.tiny))
        largest = None
        if careful.any():
            low, high = xp.min(array, axis=axis, keepdims=True), xp.max(array, axis=axis, keepdims=True)
            largest = xp.maximum(high, -low)
            counts = largest > 0
            if not careful.all():  # dividing by 1 changes no bit of the other entries
                counts = counts & functions.load(careful[:, None, None, None])
            largest = xp.where(counts, largest, xp.ones_like(largest))
            array, eps = array / largest, eps / largest / largest
        if self.kind == "layer":
            # The first feature goes first, so that equal ones become 0, however the mean is rounded.
            array = array - (array[:, :1, :, :1] if self.over == "all" else array[..., :1])
            array -= xp.mean(array, axis=axis, keepdims=True)
        size = xp.sqrt(xp.mean(array * array, axis=axis, keepdims=True) + eps)
        scaled = array / xp.where(size == 0, xp.ones_like(size), size)
        return scaled, size if largest is None else size * largest

    def bound(self, before: Bound, shape: tuple[int, ...], dtype: np.dtype) -> Bound:
        if self.eps < float(np.finfo(dtype).tiny):  # so small that a zero vector may be divided by 0
            return math.inf
        weight = 1.0 if self.weight is None else float(np.max(np.abs(self.weight)))
        bias = 0.0 if self.bias is None else norm(self.bias) * math.sqrt(math.prod(shape[1:3]))
        return weight * math.sqrt(math.prod(shape[1:])) + bias  # the root mean square is 1, times the weights

    def bytes(self, size: int, length: int) -> int:
        return 2 * size

    def error(self, array: np.ndarray, errors: np.ndarray, epsilon: float) -> np.ndarray:
        """It sums the squares of features; a layer norm also sums features."""
        axes = self._axes
        root = math.sqrt(math.prod(array.shape[axis] for axis in axes))
        if self.kind == "layer":
            errors = errors + (root + 1) * np.abs(array).max(axis=axes, keepdims=True)[..., 0]
            array = array - np.mean(array, axis=axes, keepdims=True)
        size = np.sqrt(np.mean(array * array, axis=axes, keepdims=True) + self.eps)
        most = np.abs(array / size).max(axis=-1)
        scaled = errors / size[..., 0] * (1 + most) + (root / 4 + 2) * most
        weight = 1.0 if self.weight is None else float(np.max(np.abs(self.weight)))
        return np.asarray(scaled * weight + (0.0 if self.bias is None else float(np.max(np.abs(self.bias)))))


def _summed(grad: Array, parameter: np.ndarray, xp: Any) -> Array:
    """The gradient (b, h, l, d) of each number summed for a parameter (d,) or (h, 1, d)."""
    if parameter.ndim == 1:
        return xp.sum(grad, axis=(0, 1, 2))
    return xp.sum(grad, axis=(0, 2))[:, None]
