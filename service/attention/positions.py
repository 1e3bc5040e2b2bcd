"""Everything that depends on where tokens stand: offsets, bands (causal, window), lengths, segments, rotations."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from service.attention.arrays import cast, integers, within
from service.attention.roles import Sizes
from service.attention.spec import AttentionSpec, Rotary
from service.errors import FieldConflict, InvalidArray, InvalidValue, MissingField, ShapeMismatch, shape


@dataclass(frozen=True, slots=True)
class Band:
    """Query i sees keys from i + low to i + high, both inclusive, (b or 1,) each; None is unbounded."""

    low: np.ndarray | None
    high: np.ndarray | None


@dataclass(frozen=True, slots=True)
class Segments:
    """Ids of the tokens, (b or 1, q) and (b or 1, k)."""

    query: np.ndarray
    key: np.ndarray


@dataclass(frozen=True, slots=True)
class Rotation:
    """What turns the first 2·cos.shape[-1] features of query or key. cos, sin: (b or 1, l, dim/2)."""

    cos: np.ndarray
    sin: np.ndarray
    interleaved: bool


def query_offset(spec: AttentionSpec, sizes: Sizes, past: int) -> np.ndarray:
    """Where the queries stand among the keys, (b or 1,): as given, else behind the past.

    Errors: MissingField where something depends on it and it is not plain what it should be.
    """
    q, k = sizes.query_length, sizes.key_length
    if spec.query_offset is not None:
        shapes = {(): "one integer", (sizes.batch_size,): f"({sizes.batch_size},)"}
        return np.atleast_1d(integers(spec.query_offset, "/query_offset", shapes))
    positional = spec.is_causal or spec.window is not None or spec.alibi_slopes is not None
    if positional and q != k and spec.past_key is None:
        choices = f"0 aligns the first query with the first key, {k - q} the last with the last"
        raise MissingField.at("/query_offset", "an offset, as query and key differ in length", "none", choices)
    return np.full(1, past)


def band(spec: AttentionSpec, offset: np.ndarray, sizes: Sizes) -> Band | None:
    """What is_causal and window leave visible, as one band. Errors: InvalidValue."""

    def edge(shift: int) -> np.ndarray:
        """offset + shift, no further out than where all or nothing is visible, so that nothing overflows."""
        inside = (max(-sizes.query_length, min(sizes.key_length, int(x) + shift)) for x in offset)
        return np.array(list(inside), dtype=np.int64)

    left = right = None
    if spec.window is not None:
        left, right = spec.window.left, spec.window.right
        for side, width in (("left", left), ("right", right)):
            if width is not None and width < 0:
                raise InvalidValue.of(f"/window/{side}", "at least 0", width, "leave it out for an unbounded side")
    if spec.is_causal:
        right = 0  # a window may look ahead, but causal masking composes with it by and
    if left is None and right is None:
        return None
    return Band(None if left is None else edge(-left), None if right is None else edge(right))


def lengths(array: np.ndarray | None, field: str, batch: int, length: int) -> np.ndarray | None:
    """Which tokens are not padding, (b or 1, l). Errors: InvalidArray, ShapeMismatch."""
    if array is None:
        return None
    counts = integers(array, f"/{field}", {(): "one integer", (batch,): f"({batch},)"})
    within(counts, 0, length, f"/{field}")
    visible: np.ndarray = np.arange(length) < np.atleast_1d(counts)[:, None]
    return visible


def per_token(array: np.ndarray, pointer: str, batch: int, length: int) -> np.ndarray:
    """Integers of shape (l,) or (b, l), as (b or 1, l). Errors: InvalidArray, ShapeMismatch."""
    shapes: dict[tuple[int, ...], str] = {one: shape(one) for one in ((length,), (batch, length))}
    return np.atleast_2d(integers(array, pointer, shapes))


def segments(spec: AttentionSpec, sizes: Sizes) -> Segments | None:
    """Errors: MissingField, InvalidArray, ShapeMismatch."""
    ids = spec.segment_ids
    if ids is None:
        return None
    if ids.query is None or ids.key is None:
        missing = "query" if ids.query is None else "key"
        raise MissingField.at(f"/segment_ids/{missing}", "ids for both query and key", "none")
    return Segments(
        per_token(ids.query, "/segment_ids/query", sizes.batch_size, sizes.query_length),
        per_token(ids.key, "/segment_ids/key", sizes.batch_size, sizes.key_length),
    )


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
    """The positions of the tokens of a role, (b or 1, l): as given, else counted on from the past."""
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
