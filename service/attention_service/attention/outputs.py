"""The table of outputs, one row for each name of `include`; and what a request selects of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, cast

import numpy as np

from attention_service.attention.arrays import within
from attention_service.attention.shapes import Sizes
from attention_service.attention.spec import AttentionSpec, Output
from attention_service.errors import FieldConflict, InvalidArray, InvalidValue, ShapeMismatch

Stage = Literal["scores", "row_sums", "weights", "operands", "heads", "gradients"]

# What is returned beside the names of `include`: the output of attention, and the keys of the largest weights.
OUTPUT: Final = "output"
TOP_INDICES: Final = "top_indices"


@dataclass(frozen=True, slots=True)
class OutputRow:
    """A row of the table OUTPUTS: how one output is computed and returned.

    axes: as a backend computes it. b batch, h query heads, g key/value heads, q queries, k keys, n keys without the
          past, d and e features
    step: the step that computes it: the scores on their way to weights, the sums of the rows that the softmax divides
            by, the weights, the loaded operands, the outputs of the heads, or the backward pass
    averaged: True if `average_heads` averages it
    in_compute_dtype: True if it is returned in the type that is computed in, not in the type of the request
    may_be_minus_infinity: True if -inf is a regular value
    is_integer: True if it is returned in int32, whatever the type of the request
    keeps_heads: True if its h axis is returned even for a single head in a layout without h
    matrices: score matrices of a tile that exist at once while it is computed, beside those of every request
    """

    axes: str
    step: Stage
    averaged: bool = False
    in_compute_dtype: bool = False
    may_be_minus_infinity: bool = False
    is_integer: bool = False
    keeps_heads: bool = False
    matrices: int = 0

    @property
    def is_selected(self) -> bool:
        """True if `select_heads` and `select_queries` apply."""
        return self.step in ("scores", "row_sums", "weights", "gradients")

    @property
    def is_score_matrix(self) -> bool:
        """True if its last axes are q, k, which are swapped in layouts with tokens in columns."""
        return self.axes.endswith("qk")


OUTPUTS: Final[Mapping[Output, OutputRow]] = {
    "attention_weights": OutputRow("bhqk", "weights", averaged=True),
    "weights_without_sinks": OutputRow("bhqk", "weights", averaged=True, matrices=1),
    "scores": OutputRow("bhqk", "scores", in_compute_dtype=True),
    "scaled_scores": OutputRow("bhqk", "scores", in_compute_dtype=True),
    "capped_scores": OutputRow("bhqk", "scores", in_compute_dtype=True),
    "masked_scores": OutputRow("bhqk", "scores", in_compute_dtype=True, may_be_minus_infinity=True),
    "hidden_by": OutputRow("bhqk", "scores", is_integer=True, matrices=3),
    "logsumexp": OutputRow("bhq", "row_sums", in_compute_dtype=True, may_be_minus_infinity=True),
    "entropy": OutputRow("bhq", "weights", in_compute_dtype=True, matrices=2),
    "received": OutputRow("bhk", "weights", averaged=True, in_compute_dtype=True),
    "query": OutputRow("bhqd", "operands"),
    "key": OutputRow("bgnd", "operands"),
    "value": OutputRow("bgne", "operands"),
    "head_outputs": OutputRow("bhqe", "heads"),
    "present_key": OutputRow("bgkd", "operands", keeps_heads=True),
    "present_value": OutputRow("bgke", "operands", keeps_heads=True),
    "grad_masked_scores": OutputRow("bhqk", "gradients", in_compute_dtype=True),
    "grad_scaled_scores": OutputRow("bhqk", "gradients", in_compute_dtype=True),
    "grad_scores": OutputRow("bhqk", "gradients", in_compute_dtype=True),
}
# The outputs of a forward computation.
FORWARD: Final = tuple(name for name, row in OUTPUTS.items() if row.step != "gradients")


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

    @property
    def matrices(self) -> int:
        """Score matrices of a tile that its outputs take, see OutputRow; those of top_k are none of them."""
        return sum(OUTPUTS[name].matrices for name in self.include)


def outputs_of(*steps: Stage) -> frozenset[Output]:
    """The names of the outputs that any of these steps computes."""
    return frozenset(name for name, row in OUTPUTS.items() if row.step in steps)


def has_all_keys(name: Output) -> bool:
    """True if an output is made of the scores or weights of all keys, one by one."""
    row = OUTPUTS[name]
    return row.is_selected and "k" in row.axes


def row_of(name: str) -> OutputRow:
    """The row of an array that a backend returns beside `output`; top_indices have that of attention_weights."""
    return OUTPUTS["attention_weights" if name == TOP_INDICES else cast(Output, name)]


def make_selection(spec: AttentionSpec, sizes: Sizes) -> Selection:
    """The selection of a request. Errors: FieldConflict, InvalidArray, InvalidValue, ShapeMismatch."""
    include = frozenset(cast(Output, name) for name in spec.include if name in OUTPUTS)
    if spec.normalization != "softmax":
        for name in ("logsumexp", "entropy", "weights_without_sinks"):
            if name in include:
                raise FieldConflict.at("/include", f"no {name} beside normalization {spec.normalization}", name)
        if spec.sinks is not None:
            raise FieldConflict.at("/sinks", f"no sinks beside normalization {spec.normalization}", "both")
    if spec.average_heads and "hidden_by" in include:
        raise FieldConflict.at("/include", "no hidden_by beside average_heads, as heads may differ", "hidden_by")
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
        raise InvalidArray.of(pointer, "integers" if array.size else "at least one index", array)
    within(array, 0, length - 1, pointer)
    indices, counts = np.unique(array, return_counts=True)
    if len(indices) != len(array):
        raise InvalidArray.at(pointer, "each index once", f"{indices[counts.argmax()]} again")
    return array.astype(np.int64, copy=False)
