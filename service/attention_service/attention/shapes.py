"""Axes by their letters: layouts of requests, the sizes of a plan, and the conversions between orders of axes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np

from attention_service.errors import ShapeMismatch, shape


class Sizes(NamedTuple):
    """The lengths of all axes, named and ordered as in the metadata."""

    num_heads: int
    num_kv_heads: int
    batch_size: int
    query_length: int
    key_length: int
    head_dim: int
    value_dim: int

    @property
    def by_letter(self) -> dict[str, int]:
        """The lengths by the letters of the axes (b, h, g, q, k, d, e; see attention_service.attention)."""
        return dict(zip("hgbqkde", self, strict=True))


def entry_after_entry(array: np.ndarray, layout: str) -> np.ndarray:
    """The array, in memory one batch entry after the other: a copy in lbd, if there are several entries.

    BLAS may round by the distance between the rows of a matrix, which in lbd is that of tokens of all entries.
    """
    if layout != "lbd" or array.shape[1] == 1:
        return array
    return np.ascontiguousarray(array.swapaxes(0, 1)).swapaxes(0, 1)


def canonical(array: np.ndarray, layout: str, heads: int | None) -> np.ndarray:
    """A view of an array of a request with the axes (b, h, l, d), or (b, l, d) if `heads` is None.

    A batch of one is added if the layout has none. d is split into heads if the layout has none. A vector is one token.
    """
    shape, order = _canonical(array.shape, layout, heads)
    return array.reshape(shape).transpose(order)


def from_canonical(array: Any, shape: tuple[int, ...], layout: str, heads: int | None, xp: Any = np) -> Any:
    """An array (b, h, l, d), or (b, l, d) if `heads` is None, in the shape of the request: `canonical` undone.

    xp: the namespace of its library
    """
    _, order = _canonical(shape, layout, heads)
    back = tuple(order.index(place) for place in range(len(order)))
    return xp.reshape(xp.permute_dims(array, back), shape)


@lru_cache(1024)
def _canonical(shape: tuple[int, ...], layout: str, heads: int | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape with all axes, and their order."""
    axes = layout if len(shape) == len(layout) else "d"
    if heads is not None and "h" not in layout:
        place = axes.index("d")
        shape = *shape[:place], heads, shape[place] // heads, *shape[place + 1 :]
        axes = axes.replace("d", "hd")
    wanted = "bld" if heads is None else "bhld"
    missing = "".join(letter for letter in wanted if letter not in axes)
    axes = missing + axes
    return (1,) * len(missing) + shape, tuple(axes.index(letter) for letter in wanted)


def reordered(array: np.ndarray, axes: str, wanted: str) -> np.ndarray:
    """A view of an array with these axes in the order `wanted`; axes of length 1 that are not wanted are dropped."""
    dropped, order = _order(axes, wanted)
    return array.squeeze(dropped).transpose(order)


@cache
def _order(axes: str, wanted: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The indices of the axes that are not wanted, and those of the wanted ones among the rest."""
    kept = [letter for letter in axes if letter in wanted]
    dropped = (i for i, letter in enumerate(axes) if letter not in wanted)
    return tuple(dropped), tuple(kept.index(letter) for letter in wanted)


def score_axes(layout: str, num_heads: int, *, single_query: bool) -> str:
    """The axes of score matrices in a response: `qk`, after `b` and `h` if they are shown.

    b is shown if the layout has it, h if the layout has it or there are several heads. With tokens in columns k stands
    before q, so that columns sum to one. A single query has no q.
    """
    tail = "k" if single_query else "kq" if layout in ("dl", "bdl") else "qk"
    return ("b" if "b" in layout else "") + ("h" if "h" in layout or num_heads > 1 else "") + tail


def align(array: np.ndarray, axes: str, sizes: Sizes, field: str, *, last: str = "k") -> np.ndarray:
    """A view of a mask or bias with axes (b, h, q, k), each full or of length 1.

    axes: of score matrices, see `score_axes`. Rank 1 is always over k; rank 4 is always b, h first; rank 3 beside
    scores with b and h is per head.
    last: the letter by which errors name the axis k

    Errors: ShapeMismatch, also if rank 3 could mean one matrix for each batch entry as well.
    """
    lengths = sizes.by_letter
    have = _axes_of(array, axes, lengths, field, last)
    wanted = tuple(lengths[letter] for letter in have)
    if any(length not in (1, full) for length, full in zip(array.shape, wanted, strict=True)):
        hint = f"axes {', '.join(have).replace('k', last)}{_batch_hint(array.shape, axes, lengths, field)}"
        raise ShapeMismatch.of(f"/{field}", f"{shape(wanted)}, or 1 on any axis", array, hint)
    missing = "".join(letter for letter in "bhqk" if letter not in have)
    return reordered(array.reshape((1,) * len(missing) + array.shape), missing + have, "bhqk")


def unaligned(array: Any, shape: tuple[int, ...], axes: str, sizes: Sizes, xp: Any = np) -> Any:
    """An array (b, h, q, k) in the shape of the request, as `align` was given it. xp: the namespace of its library"""
    have = _axes_of(np.broadcast_to(0.0, shape), axes, sizes.by_letter, "", "k")
    order = [*(letter for letter in "bhqk" if letter not in have), *have]
    return xp.reshape(xp.permute_dims(array, tuple("bhqk".index(letter) for letter in order)), shape)


def _batch_hint(have: tuple[int, ...], axes: str, lengths: Mapping[str, int], field: str) -> str:
    """What to send instead of an array of this shape that seems to be one row or matrix per batch entry."""
    b, k = lengths["b"], lengths["k"]
    if have == (b, k):
        row = tuple(k if axis == "k" else 1 for axis in axes[-2:])
        return f"; for one row per batch entry send {'key_mask' if field == 'mask' else shape((b, 1, *row))}"
    matrix = tuple(lengths[axis] for axis in axes[-2:])
    return f"; for one matrix per batch entry send {shape((b, 1, *matrix))}" if have == (b, *matrix) else ""


def _axes_of(array: np.ndarray, axes: str, lengths: Mapping[str, int], field: str, last: str) -> str:
    """The axes that an array has, by its rank."""
    rank = array.ndim
    if rank == 1:
        return "k"
    if rank == 4:
        return "bhkq" if axes.endswith("kq") else "bhqk"
    if rank == 3 and "b" in axes and "h" in axes:
        b, h, q, k = (lengths[letter] for letter in "bhqk")
        if b == h > 1 and array.shape[0] > 1:
            both = f"{shape((b, 1, q, k))} for one per batch entry or {shape((1, h, q, k))} for one per head"
            raise ShapeMismatch.of(f"/{field}", both, array, "as many heads as batch entries: say which is meant")
        return axes[1:]
    if 2 <= rank <= len(axes):
        return axes[-rank:]
    wanted = shape(tuple(lengths[letter] for letter in axes))
    raise ShapeMismatch.of(f"/{field}", f"an array that broadcasts to {wanted}, or (b, h, q, {last})", array)
