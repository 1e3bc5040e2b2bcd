"""The base of operand steps: what is done to query, key and value before the scores, and to head outputs."""

from __future__ import annotations

from typing import Self

import numpy as np

from attention_service.attention.array_functions import Array, ArrayFunctions
from attention_service.attention.score_term import Bound, Frame
from attention_service.attention.spec import AttentionSpec

# Gradients of arrays of a step, by their names in the field of the request.
Parameters = dict[str, Array]


class OperandStep:
    """Base of all steps. Subclasses are frozen dataclasses."""

    __slots__ = ()

    @classmethod
    def of(cls, spec: AttentionSpec, frame: Frame) -> dict[str, Self]:
        """The steps of a request by role, or "output"; without what it does not change. Errors: InvalidRequest."""
        raise NotImplementedError

    @property
    def needs_all_heads(self) -> bool:
        """True if no head can be computed without the others."""
        return False

    def part(self, batches: np.ndarray, heads: np.ndarray, tokens: np.ndarray) -> Self:
        """The step for these batch entries, heads and new tokens of the operand."""
        return self

    def apply(self, array: Array, functions: ArrayFunctions, bound: Bound) -> Array:
        """A new array: the operand (b, h, l, d) after the step, where no entry changes the bits of another.

        bound: on the Euclidean norm of each entry of `array`
        """
        raise NotImplementedError

    def backward(self, array: Array, grad: Array, functions: ArrayFunctions, bound: Bound) -> tuple[Array, Parameters]:
        """The gradient (b, h, l, d) of the operand before the step, and those of the parameters of the step by name.

        array: the operand before the step; grad: the gradient of the operand after it; bound: as of `apply`
        """
        raise NotImplementedError

    def bound(self, before: Bound, shape: tuple[int, ...], dtype: np.dtype) -> Bound:
        """A bound on the Euclidean norm of each entry of the operand after the step; inf if none is known.

        before: that of the operand before the step; shape: (b, h, l, d) of the operand; dtype: computed in
        """
        raise NotImplementedError

    def bytes(self, size: int, length: int) -> int:
        """Upper bound of the bytes that `apply` takes, its result included. size: of the operand; length: its tokens"""
        raise NotImplementedError

    def error(self, array: np.ndarray, errors: np.ndarray, epsilon: float) -> np.ndarray:
        """The error of the numbers of each token (b, h, l) after the step, in steps of ε/4 (see comparison.floors).

        array: the operand before the step; errors: those of its numbers, (b, h, l); epsilon: ε of the computing type
        """
        raise NotImplementedError
