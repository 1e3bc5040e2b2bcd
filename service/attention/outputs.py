"""The table of outputs: one row for each name of `include`, with its axes, its type and the step that computes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, cast

import numpy as np

from service.attention.spec import Output

if TYPE_CHECKING:
    from service.attention.plan import Plan

Source = Literal["scores", "row_sums", "weights", "operands", "heads"]

# What is returned beside the names of `include`: the output of attention, and the keys of the largest weights.
OUTPUT: Final = "output"
TOP_INDICES: Final = "top_indices"


@dataclass(frozen=True, slots=True)
class OutputRow:
    """One output.

    axes: as a backend computes it. b batch, h query heads, g key/value heads, q queries, k keys, n keys without the
          past, d and e features
    source: the step that computes it: the scores on their way to weights, the sums of the rows that the softmax divides
            by, the weights, the loaded operands, or the outputs of the heads
    averaged: True if `average_heads` averages it
    in_compute_dtype: True if it is returned in the type that is computed in, not in the type of the request
    may_be_minus_infinity: True if -inf is a regular value
    keeps_heads: True if its h axis is returned even for a single head in a layout without h
    """

    axes: str
    source: Source
    averaged: bool = False
    in_compute_dtype: bool = False
    may_be_minus_infinity: bool = False
    keeps_heads: bool = False

    @property
    def is_selected(self) -> bool:
        """True if `select_heads` and `select_queries` apply."""
        return self.source in ("scores", "row_sums", "weights")

    @property
    def is_score_matrix(self) -> bool:
        """True if its last axes are q, k, which are swapped in layouts with tokens in columns."""
        return self.axes.endswith("qk")


OUTPUTS: Final[Mapping[Output, OutputRow]] = {
    "attention_weights": OutputRow("bhqk", "weights", averaged=True),
    "scores": OutputRow("bhqk", "scores", in_compute_dtype=True),
    "scaled_scores": OutputRow("bhqk", "scores", in_compute_dtype=True),
    "capped_scores": OutputRow("bhqk", "scores", in_compute_dtype=True),
    "masked_scores": OutputRow("bhqk", "scores", in_compute_dtype=True, may_be_minus_infinity=True),
    "logsumexp": OutputRow("bhq", "row_sums", in_compute_dtype=True, may_be_minus_infinity=True),
    "entropy": OutputRow("bhq", "weights", in_compute_dtype=True),
    "received": OutputRow("bhk", "weights", averaged=True, in_compute_dtype=True),
    "query": OutputRow("bhqd", "operands"),
    "key": OutputRow("bgnd", "operands"),
    "value": OutputRow("bgne", "operands"),
    "head_outputs": OutputRow("bhqe", "heads"),
    "present_key": OutputRow("bgkd", "operands", keeps_heads=True),
    "present_value": OutputRow("bgke", "operands", keeps_heads=True),
}


def outputs_of(*sources: Source) -> frozenset[Output]:
    """The names of the outputs that these steps compute."""
    return frozenset(name for name, row in OUTPUTS.items() if row.source in sources)


def row_of(name: str) -> OutputRow:
    """The row of an array that a backend returns beside `output`; top_indices have that of attention_weights."""
    return OUTPUTS["attention_weights" if name == TOP_INDICES else cast(Output, name)]


def output_dtype(name: str, plan: Plan) -> np.dtype:
    """The type that an array is returned in."""
    if name == TOP_INDICES:
        return np.dtype(np.int64)
    return plan.compute_dtype if name != OUTPUT and row_of(name).in_compute_dtype else plan.dtype


def output_shape(name: str, plan: Plan) -> tuple[int, ...]:
    """The shape of an array that a backend returns.

    `output` is (b, h, q, e) if the layout has heads, else (b, q, out).
    """
    lengths, chosen = plan.sizes.by_letter, plan.selection
    if name == OUTPUT:
        if "h" in plan.layout:
            return tuple(lengths[axis] for axis in "bhqe")
        output_map = plan.roles.output_map
        return lengths["b"], lengths["q"], output_map.features if output_map else lengths["h"] * lengths["e"]
    row = row_of(name)
    lengths["n"] = lengths["k"] - plan.roles.past_length
    if row.is_selected and chosen.heads is not None:
        lengths["h"] = len(chosen.heads)
    if row.is_selected and chosen.queries is not None:
        lengths["q"] = len(chosen.queries)
    if row.averaged and chosen.average_heads:
        lengths["h"] = 1
    if row is OUTPUTS["attention_weights"] and chosen.top_k is not None:
        lengths["k"] = chosen.top_k
    return tuple(lengths[axis] for axis in row.axes)
