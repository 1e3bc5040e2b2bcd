"""Rotary position embedding of query and key."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final, Self

import numpy as np

from attention_service.attention.array_functions import Array, ArrayFunctions
from attention_service.attention.arrays import cast, per_token, within
from attention_service.attention.score_term import Bound, Frame
from attention_service.attention.spec import AttentionSpec, Rotary
from attention_service.attention.steps.step import OperandStep, Parameters
from attention_service.errors import FieldConflict, InvalidArray, InvalidValue, MissingField, ShapeMismatch, shape

# Numbers of tables that are made with the plan, which may be kept for other requests. Larger ones are made after
# admission, when they are needed: a small body with a projection may ask for tables of any size.
MADE_WITH_PLAN: Final = 2**18
# Bytes for each number of a table while it is made: the angle, its cosine in float64, and in the type computed in; and
# of both tables afterwards.
MAKING: Final = 8 + 8 + 8
MADE: Final = 2 * 8


@dataclass(frozen=True, slots=True)
class RotationStep(OperandStep):
    """Pairs (x, y) of the first dim features become (x cos - y sin, x sin + y cos).

    frequencies: (dim/2,) in float64, by which positions are multiplied; else tables
    cos, sin: (positions, dim/2), looked up by position; or (b or 1, l, dim/2), those of each token as it stands
    positions: (b or 1, l) of the tokens; None for `start` + index
    interleaved: pairs (0, 1), (2, 3), … instead of halves
    reach: the largest position whose angles are computed; 0 for tables of a request
    """

    frequencies: np.ndarray | None = None
    cos: np.ndarray | None = None
    sin: np.ndarray | None = None
    positions: np.ndarray | None = None
    start: int = 0
    interleaved: bool = False
    reach: int = 0

    @classmethod
    def of(cls, spec: AttentionSpec, frame: Frame, most: int = MADE_WITH_PLAN) -> dict[str, Self]:
        """The `rotary` of a request, for the query and the new keys. most: numbers of tables that are made now"""
        rotary, sizes = spec.rotary, frame.sizes
        if rotary is None:
            return {}
        tables = _tables(rotary, sizes.head_dim, frame.dtype)
        frequencies = _frequencies(rotary, sizes.head_dim) if tables is None else None
        made = {}
        for role, length in {"query": sizes.query_length, "key": sizes.key_length - frame.past}.items():
            positions = _positions(rotary, tables, role, length, frame)
            reach = _reach(rotary, frequencies, positions, sizes.key_length)
            cos, sin = tables or (None, None)
            step = cls(frequencies, cos, sin, positions, frame.past, rotary.interleaved, reach)
            made[role] = step.with_tables(length, frame.dtype) if step.count(length) <= most else step
        return made

    @property
    def half(self) -> int:
        """The number of pairs of features that turn."""
        table = self.cos if self.frequencies is None else self.frequencies
        assert table is not None
        return int(table.shape[-1])

    def count(self, length: int) -> int:
        """The numbers of a table for so many tokens."""
        return self.half * (length if self.positions is None else self.positions.size)

    def _of_tokens(self, length: int, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
        """The cosines and sines of the tokens, (b or 1, l, dim/2)."""
        if self.cos is not None and self.sin is not None and self.cos.ndim == 3:
            return self.cos, self.sin
        positions = self.start + np.arange(length)[None] if self.positions is None else self.positions
        if self.frequencies is None:
            assert self.cos is not None
            assert self.sin is not None
            return self.cos[positions], self.sin[positions]
        angles = positions[..., None] * self.frequencies
        cos = np.cos(angles).astype(dtype, copy=False)
        return cos, np.sin(angles, out=angles).astype(dtype, copy=False)

    def with_tables(self, length: int, dtype: np.dtype) -> Self:
        """The same step with a row of its tables for each of so many tokens."""
        cos, sin = self._of_tokens(length, dtype)
        return replace(self, frequencies=None, cos=cos, sin=sin, positions=None)

    def part(self, batches: np.ndarray, heads: np.ndarray, tokens: np.ndarray) -> Self:
        if self.cos is not None and self.sin is not None and self.cos.ndim == 3:
            cos, sin = (_part(table, batches, tokens) for table in (self.cos, self.sin))
            return replace(self, cos=cos, sin=sin)
        own = self.start + tokens[None] if self.positions is None else _part(self.positions, batches, tokens)
        return replace(self, positions=own)

    def apply(self, array: Array, functions: ArrayFunctions, bound: Bound) -> Array:
        return self._rotated(array, functions)

    def backward(self, array: Array, grad: Array, functions: ArrayFunctions, bound: Bound) -> tuple[Array, Parameters]:
        """The transpose of a rotation is the rotation by the negative angle."""
        return self._rotated(grad, functions, direction=-1), {}

    def _rotated(self, array: Array, functions: ArrayFunctions, direction: int = 1) -> Array:
        """An operand (b, h, l, d) rotated by its angles, or by the negative angles if the direction is -1."""
        xp = functions.xp
        cos, sin = (
            functions.load(table)[:, None] for table in self._of_tokens(array.shape[2], functions.compute_dtype)
        )
        if direction < 0:
            sin = -sin
        half = cos.shape[-1]  # b 1 l dim/2
        turned, rest = array[..., : 2 * half], array[..., 2 * half :]
        if self.interleaved:
            x, y = turned[..., 0::2], turned[..., 1::2]
            pairs = xp.stack([x * cos - y * sin, x * sin + y * cos], axis=-1)
            turned = xp.reshape(pairs, turned.shape)
        else:
            x, y = turned[..., :half], turned[..., half:]
            turned = xp.concat([x * cos - y * sin, x * sin + y * cos], axis=-1)
        return xp.concat([turned, rest], axis=-1)

    @property
    def _largest(self) -> tuple[float, float]:
        """The largest magnitudes of a cosine and a sine: tables of a request may hold anything."""
        if self.cos is None or self.sin is None:
            return 1.0, 1.0
        return float(np.max(np.abs(self.cos))), float(np.max(np.abs(self.sin)))

    def bound(self, before: Bound, shape: tuple[int, ...], dtype: np.dtype) -> Bound:
        return before * (1.0 if self.cos is None else max(1.0, math.hypot(*self._largest)))

    def bytes(self, size: int, length: int) -> int:
        made = 0 if self.cos is not None and self.cos.ndim == 3 else self.count(length)
        return max(MAKING * made, 2 * size + MADE * made)

    def error(self, array: np.ndarray, errors: np.ndarray, epsilon: float) -> np.ndarray:
        """It adds two products, and cosine and sine have the error of their angles, computed in float64."""
        angles = 2 * self.reach * float(np.finfo(np.float64).eps) / epsilon
        found: np.ndarray = (
            max(1.0, *self._largest) * math.sqrt(2) * (errors + (1 + angles) * np.abs(array).max(axis=-1))
        )
        return found


def _part(array: np.ndarray, batches: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """The rows (b or 1, l, …) of these batch entries and tokens."""
    return array[batches if len(array) > 1 else slice(None)][:, tokens]


def _tables(rotary: Rotary, head_dim: int, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray] | None:
    """The tables cos and sin of a request, checked; None if it has none."""
    if (rotary.cos is None) != (rotary.sin is None):
        missing = "cos" if rotary.cos is None else "sin"
        raise MissingField.at(f"/rotary/{missing}", "both cos and sin", "one of them")
    if rotary.cos is None or rotary.sin is None:
        return None
    if rotary.base is not None:
        raise FieldConflict.at("/rotary/base", "base, or cos and sin", "both")
    cos, sin = cast(rotary.cos, dtype, "/rotary/cos"), cast(rotary.sin, dtype, "/rotary/sin")
    half = cos.shape[-1] if cos.ndim in (2, 3) else 0
    if not 1 <= half <= head_dim // 2 or (rotary.dim is not None and rotary.dim != 2 * half):
        wanted = f"at most {head_dim // 2}" if rotary.dim is None else str(rotary.dim // 2)
        doubled = half == (head_dim if rotary.dim is None else rotary.dim)
        hint = (
            "of doubled ones, as in Hugging Face, send one of each pair: [..., :d/2], or [..., ::2]" if doubled else ""
        )
        raise ShapeMismatch.of("/rotary/cos", f"(positions, dim/2) or (b, l, dim/2) with dim/2 {wanted}", cos, hint)
    if sin.shape != cos.shape:
        raise ShapeMismatch.of("/rotary/sin", f"{shape(cos.shape)}, as cos", sin)
    return cos, sin


def _positions(
    rotary: Rotary, tables: tuple[np.ndarray, np.ndarray] | None, role: str, length: int, frame: Frame
) -> np.ndarray | None:
    """The positions (b or 1, l) of the new tokens of query or key, checked; None if they follow each other."""
    given = rotary.query_positions if role == "query" else rotary.key_positions
    pointer, batch = f"/rotary/{role}_positions", frame.sizes.batch_size
    if tables is not None and tables[0].ndim == 3:
        if given is not None:
            raise FieldConflict.at(pointer, "no positions beside cos and sin for each token", "both")
        if tables[0].shape[0] not in (1, batch) or tables[0].shape[1] != length:
            wanted = shape((batch, length, tables[0].shape[-1]))
            raise ShapeMismatch.of("/rotary/cos", f"{wanted}, as the {role} has {length} new tokens", tables[0])
        return None
    positions = None if given is None else per_token(given, pointer, batch, length)
    if tables is not None and positions is None and frame.past + length > len(tables[0]):
        raise InvalidArray.of("/rotary/cos", f"at least {frame.past + length} positions", tables[0])
    if tables is not None and positions is not None:
        within(positions, 0, len(tables[0]) - 1, pointer)
    return positions


def _frequencies(rotary: Rotary, head_dim: int) -> np.ndarray:
    """The angle (dim/2,) by which each pair of features turns from one position to the next."""
    base = 10000.0 if rotary.base is None else rotary.base
    if base <= 0:
        raise InvalidValue.of("/rotary/base", "a number above 0", base)
    dim = head_dim if rotary.dim is None else rotary.dim
    if dim % 2 or dim > head_dim or dim < 2:
        pointer = "/rotary" if rotary.dim is None else "/rotary/dim"
        raise InvalidValue.of(pointer, f"an even number of features to turn, at most head_dim = {head_dim}", dim)
    with np.errstate(over="ignore"):
        frequencies: np.ndarray = base ** (-np.arange(0, dim, 2) / dim)
    return frequencies


def _reach(rotary: Rotary, frequencies: np.ndarray | None, positions: np.ndarray | None, key_length: int) -> int:
    """The largest position whose angles are computed. Errors: InvalidValue for a base whose angles are infinite."""
    if frequencies is None:
        return 0
    reach = max(key_length, 0 if positions is None else int(np.max(np.abs(positions))))
    with np.errstate(over="ignore"):
        if not math.isfinite(reach * float(frequencies.max())):
            raise InvalidValue.of("/rotary/base", "a base whose angles are finite", rotary.base)
    return reach
