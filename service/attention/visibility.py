"""Which scores take part: every way to hide a key, composed by and."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from service.attention import positions
from service.attention.masks import ScoreAxes
from service.attention.positions import Band, Segments
from service.attention.roles import Sizes
from service.attention.spec import AttentionSpec
from service.errors import InvalidArray, ShapeMismatch, shape


@dataclass(frozen=True, slots=True)
class Visibility:
    """What hides scores. Each part is None where it hides nothing.

    mask:     (b, h, q, k), each axis full or 1; True = takes part
    keys:     (b or 1, k) and queries: (b or 1, q); False = padding, or masked out
    segments: only equal ids see each other
    band:     what is_causal and window leave
    """

    mask: np.ndarray | None
    keys: np.ndarray | None
    queries: np.ndarray | None
    segments: Segments | None
    band: Band | None


def make_visibility(spec: AttentionSpec, axes: ScoreAxes, offset: np.ndarray, sizes: Sizes) -> Visibility:
    """Errors: InvalidArray (numbers for booleans), ShapeMismatch, MissingField, InvalidValue."""
    b, q, k = sizes.batch_size, sizes.query_length, sizes.key_length
    mask, keys = _booleans(spec.mask, "/mask"), _booleans(spec.key_mask, "/key_mask")
    if keys is not None:
        if keys.shape not in ((k,), (b, k)):
            raise ShapeMismatch.of("/key_mask", f"{shape((k,))} or {shape((b, k))}", keys)
        keys = np.atleast_2d(keys)
    real = positions.lengths(spec.key_lengths, "key_lengths", b, k)
    return Visibility(
        mask=None if mask is None else axes.align(mask, "mask"),
        keys=real if keys is None else keys if real is None else keys & real,
        queries=positions.lengths(spec.query_lengths, "query_lengths", b, q),
        segments=positions.segments(spec, sizes),
        band=positions.band(spec, offset, sizes),
    )


def _booleans(array: np.ndarray | None, pointer: str) -> np.ndarray | None:
    if array is not None and array.dtype != bool:
        advice = "for numbers to be added to the scores use bias"
        raise InvalidArray.of(pointer, "booleans, true = takes part", array, advice)
    return array
