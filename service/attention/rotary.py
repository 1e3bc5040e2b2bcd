"""Rotary position embeddings: the cosines and sines that turn query and key."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from service.attention.arrays import cast, within
from service.attention.shapes import Sizes
from service.attention.spec import Rotary
from service.attention.terms import per_token
from service.errors import FieldConflict, InvalidArray, InvalidValue, MissingField, ShapeMismatch, shape


@dataclass(frozen=True, slots=True)
class Rotation:
    """The angles that turn the first 2·cos.shape[-1] features of query or key. cos, sin: (b or 1, l, dim/2)."""

    cos: np.ndarray
    sin: np.ndarray
    interleaved: bool = False


def rotations(
    rotary: Rotary | None, sizes: Sizes, past: int, dtype: np.dtype
) -> tuple[Rotation | None, Rotation | None]:
    """The rotations of the query and of the new keys, in the computing type. Errors: InvalidRequest."""
    if rotary is None:
        return None, None
    new = {"query": sizes.query_length, "key": sizes.key_length - past}
    if (rotary.cos is None) != (rotary.sin is None):
        missing = "cos" if rotary.cos is None else "sin"
        raise MissingField.at(f"/rotary/{missing}", "both cos and sin", "one of them")
    if rotary.cos is None or rotary.sin is None:
        turned = {
            role: _computed(rotary, _positions(rotary, role, sizes.batch_size, length, past), sizes.head_dim)
            for role, length in new.items()
        }
    else:
        if rotary.base is not None:
            raise FieldConflict.at("/rotary/base", "base, or cos and sin", "both")
        cos, sin = cast(rotary.cos, dtype, "/rotary/cos"), cast(rotary.sin, dtype, "/rotary/sin")
        _check_tables(rotary, cos, sin, sizes.head_dim)
        turned = {
            role: (
                _looked_up(cos, rotary, role, sizes, length, past),
                _looked_up(sin, rotary, role, sizes, length, past),
            )
            for role, length in new.items()
        }
    query, key = (
        Rotation(cos.astype(dtype, copy=False), sin.astype(dtype, copy=False), rotary.interleaved)
        for cos, sin in (turned["query"], turned["key"])
    )
    return query, key


def _positions(rotary: Rotary, role: str, batch: int, length: int, past: int) -> np.ndarray:
    """The positions of the tokens of a role, (b or 1, l): those given, else counting on from the past."""
    given = rotary.query_positions if role == "query" else rotary.key_positions
    if given is None:
        return past + np.arange(length)[None]
    return per_token(given, f"/rotary/{role}_positions", batch, length)


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


def _check_tables(rotary: Rotary, cos: np.ndarray, sin: np.ndarray, head_dim: int) -> None:
    half = cos.shape[-1] if cos.ndim in (2, 3) else 0
    if not 1 <= half <= head_dim // 2 or (rotary.dim is not None and rotary.dim != 2 * half):
        wanted = f"at most {head_dim // 2}" if rotary.dim is None else str(rotary.dim // 2)
        raise ShapeMismatch.of("/rotary/cos", f"(positions, dim/2) or (b, l, dim/2) with dim/2 {wanted}", cos)
    if sin.shape != cos.shape:
        raise ShapeMismatch.of("/rotary/sin", f"{shape(cos.shape)}, as cos", sin)


def _looked_up(table: np.ndarray, rotary: Rotary, role: str, sizes: Sizes, length: int, past: int) -> np.ndarray:
    """The rows of a table for the tokens of a role, (b or 1, l, dim/2)."""
    pointer = f"/rotary/{role}_positions"
    given = rotary.query_positions if role == "query" else rotary.key_positions
    if table.ndim == 3:
        if given is not None:
            raise FieldConflict.at(pointer, "no positions beside cos and sin for each token", "both")
        if table.shape[0] not in (1, sizes.batch_size) or table.shape[1] != length:
            wanted = shape((sizes.batch_size, length, table.shape[-1]))
            raise ShapeMismatch.of("/rotary/cos", f"{wanted}, as the {role} has {length} new tokens", table)
        return table
    positions = _positions(rotary, role, sizes.batch_size, length, past)
    if given is None and past + length > table.shape[0]:
        raise InvalidArray.of("/rotary/cos", f"at least {past + length} positions", table)
    within(positions, 0, table.shape[0] - 1, pointer)
    found: np.ndarray = table[positions]
    return found
