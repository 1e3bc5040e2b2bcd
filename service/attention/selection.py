"""Which outputs an answer holds, and which heads, queries and keys of the score matrices."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from service.attention.arrays import within
from service.attention.shapes import Sizes
from service.attention.spec import AttentionSpec, Output
from service.errors import FieldConflict, InvalidArray, InvalidValue, ShapeMismatch


@dataclass(frozen=True, slots=True)
class Selection:
    """Which outputs to return, and which part of score matrices.

    include:        names of outputs beside `output`
    heads, queries: indices in the order asked for, None for all
    average_heads:  True to average weights and received over these heads
    top_k:          return only so many of the largest weights of each row; None for all
    """

    include: frozenset[Output] = frozenset()
    heads: np.ndarray | None = None
    queries: np.ndarray | None = None
    average_heads: bool = False
    top_k: int | None = None


def make_selection(spec: AttentionSpec, sizes: Sizes) -> Selection:
    """The selection of a request. Errors: FieldConflict, InvalidArray, InvalidValue, ShapeMismatch."""
    include = frozenset(spec.include)
    if spec.normalization == "sum":
        for name in ("logsumexp", "entropy"):
            if name in include:
                raise FieldConflict.at("/include", f"no {name} beside normalization sum", name)
        if spec.sinks is not None:
            raise FieldConflict.at("/sinks", "no sinks beside normalization sum", "both")
    if spec.top_k is not None:
        if spec.top_k < 1:
            raise InvalidValue.of("/top_k", "at least 1", spec.top_k)
        if "attention_weights" not in include:
            raise FieldConflict.at("/top_k", "attention_weights in include, which top_k replaces", "top_k without them")
    return Selection(
        include=include,
        heads=_indices(spec.select_heads, "/select_heads", sizes.num_heads),
        queries=_indices(spec.select_queries, "/select_queries", sizes.query_length),
        average_heads=spec.average_heads,
        top_k=None if spec.top_k is None else min(spec.top_k, sizes.key_length),
    )


def _indices(array: np.ndarray | None, pointer: str, length: int) -> np.ndarray | None:
    if array is None:
        return None
    if array.ndim != 1:
        raise ShapeMismatch.of(pointer, "a list of indices", array)
    if array.dtype.kind not in "iu" or array.size == 0:
        raise InvalidArray.of(pointer, "at least one index", array)
    within(array, 0, length - 1, pointer)
    if len(np.unique(array)) != len(array):
        raise InvalidArray.at(pointer, "each once", "one of them again")
    return array.astype(np.int64, copy=False)
