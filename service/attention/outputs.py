"""The table of outputs: one row for each name of `include`, with its axes, its type and the step that computes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from service.attention.spec import Output

if TYPE_CHECKING:
    from service.attention.roles import Roles
    from service.attention.selection import Selection

Source = Literal["scores", "row_sums", "weights", "operands", "heads"]


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


def output_shape(name: Output, roles: Roles, selection: Selection) -> tuple[int, ...]:
    """The shape of an output as a backend computes it."""
    row, sizes = OUTPUTS[name], roles.sizes
    lengths = {
        "b": sizes.batch_size,
        "h": sizes.num_heads,
        "g": sizes.num_kv_heads,
        "q": sizes.query_length,
        "k": sizes.key_length,
        "n": sizes.key_length - roles.past_length,
        "d": sizes.head_dim,
        "e": sizes.value_dim,
    }
    if row.is_selected and selection.heads is not None:
        lengths["h"] = len(selection.heads)
    if row.is_selected and selection.queries is not None:
        lengths["q"] = len(selection.queries)
    if row.averaged and selection.average_heads:
        lengths["h"] = 1
    if name == "attention_weights" and selection.top_k is not None:
        lengths["k"] = selection.top_k
    return tuple(lengths[axis] for axis in row.axes)
