"""Heads of tokens, and products by heads: of queries with keys, of weights with values, and with gathered keys.

Shapes in comments: b batch, h query heads, g key/value heads, r queries, k keys, n gathered keys, x and y any; s heads
of gathered keys: g, or h if query heads select keys of their own.
"""

from __future__ import annotations

from typing import Any

from attention_service.attention.tile import Tile
from attention_service.backends.dense.library import Array, ArrayLibrary


def split_heads(tokens: Array, heads: int, xp: Any) -> Array:
    """(b, l, heads·x) -> (b, heads, l, x)"""
    b, length, features = tokens.shape
    return xp.permute_dims(xp.reshape(tokens, (b, length, heads, features // heads)), (0, 2, 1, 3))


def join_heads(array: Array, xp: Any) -> Array:
    """(b, heads, l, x) -> (b, l, heads·x)"""
    b, heads, length, features = array.shape
    return xp.reshape(xp.permute_dims(array, (0, 2, 1, 3)), (b, length, heads * features))


def grouped_matmul(left: Array, right: Array, lib: ArrayLibrary, out: Array | None = None) -> Array:
    """(b, h, q, x) @ (b, g, x, y) -> (b, h, q, y), where head n of the left meets head n // (h // g) of the right.

    out: memory for the result, if the library writes in place
    """
    b, h, q, x = left.shape
    g, y = right.shape[1], right.shape[-1]
    if h == g:
        return lib.matmul(left, right, out)
    grouped = None if out is None else out.reshape((b, g, h // g, q, y))
    product = lib.matmul(lib.xp.reshape(left, (b, g, h // g, q, x)), right[:, :, None], grouped)
    return lib.xp.reshape(product, (b, h, q, y)) if out is None else out


def gather(array: Array, tile: Tile, lib: ArrayLibrary) -> Array:
    """The keys or values (b, g, k, x) of a plan that a tile gathers: (b, s, r, n, x); r is 1 if all queries share them.

    An index of -1 gathers any key, which the tile then hides. The memory is used again by the thread's next call.
    """
    assert tile.gathered is not None
    keys = lib.load(tile.gathered)  # b h r n, each axis but the last full or 1
    groups = lib.plan.sizes.num_heads // lib.plan.sizes.num_kv_heads
    heads = _range(tile.kv_heads) if keys.shape[1] == 1 else [head // groups for head in _range(tile.heads)]
    shape = len(_range(tile.batch)), len(heads), *keys.shape[2:], array.shape[-1]
    out = lib.scratch(shape)
    found = lib.empty(shape, lib.plan.compute_dtype) if out is None else out
    for i, entry in enumerate(_range(tile.batch)):
        for j, head in enumerate(heads):
            lib.take(array[entry, head], keys[i % keys.shape[0], j % keys.shape[1]], found[i, j])
    return found


def gathered_matmul(left: Array, right: Array, lib: ArrayLibrary) -> Array:
    """(b, h, r, x) @ (b, s, r or 1, x, y) -> (b, h, r, y): each row of the left meets a matrix of its own."""
    if right.shape[2] == 1:
        return grouped_matmul(left, right[:, :, 0], lib)
    xp, (b, h, r, x), (s, y) = lib.xp, left.shape, (right.shape[1], right.shape[4])
    rows = xp.permute_dims(xp.reshape(left, (b, s, h // s, r, x)), (0, 1, 3, 2, 4))  # b s r h/s x
    product = lib.matmul(rows, right)
    return xp.reshape(xp.permute_dims(product, (0, 1, 3, 2, 4)), (b, h, r, y))


def _range(part: slice) -> range:
    return range(part.start, part.stop)
