"""Rotary position embedding of query and key."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from attention_service.attention.array_functions import Array, ArrayFunctions
from attention_service.attention.arrays import cast, per_token, within
from attention_service.attention.score_term import Frame
from attention_service.attention.shapes import Sizes
from attention_service.attention.spec import AttentionSpec, Rotary
from attention_service.attention.steps.step import OperandStep
from attention_service.errors import FieldConflict, InvalidArray, InvalidValue, MissingField, ShapeMismatch, shape


@dataclass(frozen=True, slots=True)
class RotationStep(OperandStep):
    """Pairs (x, y) of the first dim features become (x cos - y sin, x sin + y cos).

    cos, sin: (b or 1, l, dim/2); interleaved: pairs (0, 1), (2, 3), … instead of halves
    reach: the largest position whose angles were computed; 0 for tables
    """

    cos: np.ndarray
    sin: np.ndarray
    interleaved: bool = False
    reach: int = 0

    @classmethod
    def of(cls, spec: AttentionSpec, frame: Frame) -> dict[str, Self]:
        """The `rotary` of a request, for the query and the new keys, in the type that is computed in."""
        rotary, sizes, past, dtype = spec.rotary, frame.sizes, frame.past, frame.dtype
        if rotary is None:
            return {}
        tables = _tables(rotary, sizes.head_dim, dtype)
        made = {}
        for role, length in {"query": sizes.query_length, "key": sizes.key_length - past}.items():
            cos, sin, reach = _angles(rotary, tables, role, length, sizes, past)
            made[role] = cls(cos.astype(dtype, copy=False), sin.astype(dtype, copy=False), rotary.interleaved, reach)
        return made

    def part(self, batches: np.ndarray, heads: np.ndarray, tokens: np.ndarray) -> Self:
        cos, sin = (table[batches if len(table) > 1 else slice(None)][:, tokens] for table in (self.cos, self.sin))
        return replace(self, cos=cos, sin=sin)

    def apply(self, array: Array, functions: ArrayFunctions, bound: float) -> Array:
        xp = functions.xp
        cos, sin = functions.load(self.cos)[:, None], functions.load(self.sin)[:, None]  # b 1 l dim/2
        half = cos.shape[-1]
        turned, rest = array[..., : 2 * half], array[..., 2 * half :]
        if self.interleaved:
            x, y = turned[..., 0::2], turned[..., 1::2]
            pairs = xp.stack([x * cos - y * sin, x * sin + y * cos], axis=-1)
            turned = xp.reshape(pairs, turned.shape)
        else:
            x, y = turned[..., :half], turned[..., half:]
            turned = xp.concat([x * cos - y * sin, x * sin + y * cos], axis=-1)
        return xp.concat([turned, rest], axis=-1)

    def bound(self, before: float, shape: tuple[int, ...], dtype: np.dtype) -> float:
        # Tables of a request may hold more than a cosine and a sine, and make a vector longer.
        return before * max(1.0, math.hypot(np.max(np.abs(self.cos)), np.max(np.abs(self.sin))))

    def bytes(self, size: int) -> int:
        return 2 * size

    def error(self, array: np.ndarray, errors: np.ndarray, epsilon: float) -> np.ndarray:
        """It adds two products, and cosine and sine have the error of their angles, computed in float64."""
        turn = max(1.0, float(np.max(np.abs(self.cos))), float(np.max(np.abs(self.sin))))
        angles = 2 * self.reach * float(np.finfo(np.float64).eps) / epsilon
        found: np.ndarray = turn * math.sqrt(2) * (errors + (1 + angles) * np.abs(array).max(axis=-1))
        return found


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


def _angles(
    rotary: Rotary, tables: tuple[np.ndarray, np.ndarray] | None, role: str, length: int, sizes: Sizes, past: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """The cosines and sines for the new tokens of query or key, (b or 1, l, dim/2), and their `reach`."""
    given = rotary.query_positions if role == "query" else rotary.key_positions
    pointer, batch = f"/rotary/{role}_positions", sizes.batch_size
    if tables is not None and tables[0].ndim == 3:
        if given is not None:
            raise FieldConflict.at(pointer, "no positions beside cos and sin for each token", "both")
        if tables[0].shape[0] not in (1, batch) or tables[0].shape[1] != length:
            wanted = shape((batch, length, tables[0].shape[-1]))
            raise ShapeMismatch.of("/rotary/cos", f"{wanted}, as the {role} has {length} new tokens", tables[0])
        return *tables, 0
    positions = past + np.arange(length)[None] if given is None else per_token(given, pointer, batch, length)
    if tables is None:
        reach = max(sizes.key_length, int(np.max(np.abs(positions))))
        return *_computed(rotary, positions, sizes.head_dim), reach
    cos, sin = tables
    if given is None and past + length > len(cos):
        raise InvalidArray.of("/rotary/cos", f"at least {past + length} positions", cos)
    within(positions, 0, len(cos) - 1, pointer)
    return cos[positions], sin[positions], 0


def _computed(rotary: Rotary, positions: np.ndarray, head_dim: int) -> tuple[np.ndarray, np.ndarray]:
    base = 10000.0 if rotary.base is None else rotary.base
    if base <= 0:
        raise InvalidValue.of("/rotary/base", "a number above 0", base)
    dim = head_dim if rotary.dim is None else rotary.dim
    if dim % 2 or dim > head_dim or dim < 2:
        pointer = "/rotary" if rotary.dim is None else "/rotary/dim"
        raise InvalidValue.of(pointer, f"an even number of features to turn, at most head_dim = {head_dim}", dim)
    with np.errstate(over="ignore"):
        angles = positions[..., None] * base ** (-np.arange(0, dim, 2) / dim)
    if not np.isfinite(angles).all():
        raise InvalidValue.of("/rotary/base", "a base whose angles are finite", base)
    return np.cos(angles), np.sin(angles)
