"""Clipping of query, key and value."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import numpy as np

from attention_service.attention.array_functions import Array, ArrayFunctions
from attention_service.attention.score_term import Bound, Frame
from attention_service.attention.spec import ROLES, AttentionSpec
from attention_service.attention.steps.step import OperandStep, Parameters
from attention_service.errors import InvalidValue


@dataclass(frozen=True, slots=True)
class ClipStep(OperandStep):
    """Numbers below -limit become -limit, those above limit become limit."""

    limit: float

    @classmethod
    def of(cls, spec: AttentionSpec, frame: Frame) -> dict[str, Self]:
        """The `clip_qkv` of a request, for query, key and value."""
        if spec.clip_qkv is None:
            return {}
        if not 0 < spec.clip_qkv < math.inf:
            raise InvalidValue.of("/clip_qkv", "a finite number above 0", spec.clip_qkv, "leave it out for no clipping")
        return dict.fromkeys(ROLES, cls(float(spec.clip_qkv)))

    def apply(self, array: Array, functions: ArrayFunctions, bound: Bound) -> Array:
        return functions.xp.clip(array, -self.limit, self.limit)

    def backward(self, array: Array, grad: Array, functions: ArrayFunctions, bound: Bound) -> tuple[Array, Parameters]:
        """The gradient where a number is within the limit, 0 where it is clipped."""
        xp = functions.xp
        return xp.where(xp.abs(array) <= self.limit, grad, xp.zeros_like(grad)), {}

    def bound(self, before: Bound, shape: tuple[int, ...], dtype: np.dtype) -> Bound:
        return np.minimum(before, self.limit * math.sqrt(math.prod(shape[1:])))

    def bytes(self, size: int, length: int) -> int:
        return size

    def error(self, array: np.ndarray, errors: np.ndarray, epsilon: float) -> np.ndarray:
        return errors  # two numbers are never further apart afterwards
