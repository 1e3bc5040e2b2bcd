"""Rotary position embeddings: the cosines and sines that turn query and key."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from attention_service.attention.arrays import cast, within
from attention_service.attention.shapes import Sizes
from attention_service.attention.spec import Rotary
from attention_service.attention.terms import per_token
from attention_service.errors import FieldConflict, InvalidArray, InvalidValue, MissingField, ShapeMismatch, shape


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines and sines (b or 1, l, dim/2), by which the first dim features of query or key are turned."""

    cos: np.ndarray
    sin: np.ndarray
    interleaved: bool = False


def rotations(
    rotary: Rotary | None, sizes: Sizes, past: int, dtype: np.dtype
) -> tuple[Rotation | None, Rotation | None]:
    """The rotations of the query and of the new keys, in the computing type. Errors: InvalidRequest."""
    if rotary is None:
        return None, None
    tables = _tables(rotary, sizes.head_dim, dtype)
    lengths = {"query": sizes.query_length, "key": sizes.key_length - past}
    angles = [_angles(rotary, tables, role, length, sizes, past) for role, length in lengths.items()]
    query, key = (
        Rotation(cos.astype(dtype, copy=False), sin.astype(dtype, copy=False), rotary.interleaved)
        for cos, sin in angles
    )
    return query, key


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
) -> tuple[np.ndarray, np.ndarray]:
    """The cosines and sines for the new tokens of query or key, (b or 1, l, dim/2)."""
    given = rotary.query_positions if role == "query" else rotary.key_positions
    pointer, batch = f"/rotary/{role}_positions", sizes.batch_size
    if tables is not None and tables[0].ndim == 3:
        if given is not None:
            raise FieldConflict.at(pointer, "no positions beside cos and sin for each token", "both")
        if tables[0].shape[0] not in (1, batch) or tables[0].shape[1] != length:
            wanted = shape((batch, length, tables[0].shape[-1]))
            raise ShapeMismatch.of("/rotary/cos", f"{wanted}, as the {role} has {length} new tokens", tables[0])
        return tables
    positions = past + np.arange(length)[None] if given is None else per_token(given, pointer, batch, length)
    if tables is None:
        return _computed(rotary, positions, sizes.head_dim)
    cos, sin = tables
    if given is None and past + length > len(cos):
        raise InvalidArray.of("/rotary/cos", f"at least {past + length} positions", cos)
    within(positions, 0, len(cos) - 1, pointer)
    return cos[positions], sin[positions]


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
