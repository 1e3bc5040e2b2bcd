"""A plan: what a backend computes. It answers every question of shapes, heads and masks.

A plan is frozen and complete: a backend that executes it cannot meet a shape error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from attention_service.attention.arrays import compute_dtype
from attention_service.attention.gradients import FieldGradient, Gradients
from attention_service.attention.options import options_of
from attention_service.attention.outputs import (
    OUTPUT,
    OUTPUTS,
    TOP_INDICES,
    Selection,
    has_all_keys,
    outputs_of,
    row_of,
)
from attention_service.attention.roles import Roles
from attention_service.attention.score_term import ScoreTerm
from attention_service.attention.shapes import Sizes, score_axes
from attention_service.attention.spec import Layout, Normalization
from attention_service.attention.steps import Steps
from attention_service.attention.terms.masks import QueryLengths
from attention_service.attention.terms.selected import SelectedKeys

# Operations that take as long as a comparison.
SORTING: Final = 16
# How many scores of all keys are computed in the time of one score of a gathered key, and in that of gathering one key.
PRODUCT_COST: Final = 4
GATHER_COST: Final = 12


@dataclass(frozen=True, slots=True)
class Notice:
    """A warning in the metadata: the answer is what was asked for, but perhaps not what was meant. Codes are stable."""

    code: str
    message: str


@dataclass(frozen=True, eq=False, kw_only=True)
class Plan:
    """What a backend computes from operands. From `query_steps` to `normalization` in the order of computation.

    The default of a field is its neutral value: it means that the option is not used (see
    attention_service.attention.options).

    dtype:         of the operands and of what is returned; compute_dtype: of everything between
    query_steps, …: what is done to query, new key and new value after their maps, in the order of computation
    output_steps:  what is done to the outputs of heads, before the gate
    terms:         what hides scores and what is added to them
    head_scales:   (h,) in float64, what the scores of each head are multiplied by; `scale` is 1 then
    sinks:         (h,), one logit for each head that takes weight and has no value
    row_sinks:     (b, h, q), one such logit for each row
    gate:          (b, h, q, e or 1), what the head outputs are multiplied by
    gradients:     what is differentiated; None for no backward pass
    single_query:  True if the query came as a vector, so that its axis is dropped from the answer
    """

    roles: Roles
    dtype: np.dtype
    scale: float
    layout: Layout
    selection: Selection
    query_steps: Steps = ()
    key_steps: Steps = ()
    value_steps: Steps = ()
    head_scales: np.ndarray | None = None
    softcap: float | None = None
    terms: tuple[ScoreTerm, ...] = ()
    sinks: np.ndarray | None = None
    row_sinks: np.ndarray | None = None
    normalization: Normalization = "softmax"
    output_steps: Steps = ()
    gate: np.ndarray | None = None
    gradients: Gradients | None = None
    single_query: bool = False
    notices: tuple[Notice, ...] = ()

    @cached_property
    def sizes(self) -> Sizes:
        """The lengths of all axes."""
        return self.roles.sizes

    @cached_property
    def compute_dtype(self) -> np.dtype:
        """The type that is computed in: float32 for halves."""
        return compute_dtype(self.dtype)

    @cached_property
    def dtype_name(self) -> str:
        """The name of dtype, kept because NumPy builds the string again for each access."""
        return self.dtype.name

    @cached_property
    def steps(self) -> tuple[Steps, Steps, Steps]:
        """The steps of query, key and value."""
        return self.query_steps, self.key_steps, self.value_steps

    @cached_property
    def scales(self) -> np.ndarray:
        """What scores are multiplied by, in float64: one number for each head, or for all."""
        return np.array([self.scale]) if self.head_scales is None else self.head_scales

    @cached_property
    def all_sinks(self) -> np.ndarray | None:
        """The sinks of all rows with the axes of scores, (1, h, 1, 1) or (b, h, q, 1); None if there are none."""
        if self.row_sinks is not None:
            return self.row_sinks[..., None]
        return None if self.sinks is None else self.sinks[None, :, None, None]

    @cached_property
    def score_count(self) -> int:
        """Elements of one score matrix: b·h·q·k."""
        sizes = self.sizes
        return sizes.batch_size * sizes.num_heads * sizes.query_length * sizes.key_length

    @cached_property
    def computed_scores(self) -> int:
        """Scores that are computed: `score_count`, or if keys are gathered b·h·q·n."""
        return self.score_count // self.sizes.key_length * self.computed_keys

    @cached_property
    def entry_scores(self) -> int:
        """Elements of one score matrix of one batch entry: h·q·k. What decides about bits counts these."""
        return self.score_count // self.sizes.batch_size

    @cached_property
    def entries_differ(self) -> bool:
        """True if none may share a tile with another: they differ in their keys, or terms multiply them by others."""
        return any(term.reads_query or (term.differs and self.skips_hidden_keys) for term in self.terms)

    @cached_property
    def gathered(self) -> SelectedKeys | None:
        """The term whose keys are gathered for each query, all others left out; None if every key is computed.

        Every key is if an output has a number for each key, or if so many keys are selected that it is faster.
        """
        term = next((term for term in self.terms if isinstance(term, SelectedKeys)), None)
        if term is None or self.gradients is not None or any(has_all_keys(name) for name in self.selection.include):
            return None
        if any(other.reads_query for other in self.terms):  # which compute products for all distances between the keys
            return None
        h, g, *_ = self.sizes
        heads = g if term.indices.shape[1] == 1 else h
        cost = term.indices.shape[3] * (PRODUCT_COST * h + GATHER_COST * heads)
        return term if cost <= h * self.sizes.key_length else None

    @cached_property
    def computed_keys(self) -> int:
        """Columns of the scores that are computed: the keys that a query selects if they are gathered, else k."""
        return self.sizes.key_length if self.gathered is None else self.gathered.indices.shape[3]

    @cached_property
    def gathered_numbers(self) -> int:
        """Numbers of the gathered keys and values of one query, of all heads; 0 if none are gathered."""
        if self.gathered is None:
            return 0
        h, g, *_, d, e = self.sizes
        heads = g if self.gathered.indices.shape[1] == 1 else h
        return heads * self.computed_keys * (d + e)

    @cached_property
    def options(self) -> frozenset[str]:
        """The names of all options that the plan uses, see attention_service.attention.options."""
        return options_of(self)

    @cached_property
    def score_axes(self) -> str:
        """The axes of the score matrices in the response, like `hqk`, see `shapes.score_axes`."""
        return score_axes(self.layout, self.sizes.num_heads, single_query=self.single_query)

    @cached_property
    def flops(self) -> int:
        """Floating-point operations: of the maps, the two products, and about 8 an element for the softmax.

        With top_k, sorting adds SORTING operations a score for each of about log2(k) comparisons.
        """
        sizes = self.sizes
        new_keys = sizes.key_length - self.roles.past_length
        lengths = sizes.query_length, new_keys, new_keys
        inputs = zip(lengths, self.roles.inputs, strict=True)
        maps = sum(2 * length * role.map.weight.size for length, role in inputs if role.map is not None)
        if self.roles.gate_map is not None:
            maps += 2 * sizes.query_length * self.roles.gate_map.weight.size
        sorting = 0 if self.selection.top_k is None else SORTING * sizes.key_length.bit_length()
        products = sizes.head_dim * (2 if any(term.reads_query for term in self.terms) else 1) + sizes.value_dim
        if self.gradients is not None:  # two products for each of the forward computation, which may come twice
            maps, products = 3 * maps, (3 + bool(self.output_steps)) * products
        return self.computed_scores * (2 * products + 8 + sorting) + sizes.batch_size * maps

    @cached_property
    def returned_bytes(self) -> int:
        """Bytes of all arrays that are returned, as if none were a view of another."""
        top_indices = () if self.selection.top_k is None else (TOP_INDICES,)
        gradients = () if self.gradients is None else (gradient.name for gradient in self.gradients.wanted)
        return sum(map(self.output_bytes, (OUTPUT, *self.selection.include, *top_indices, *gradients)))

    def output_bytes(self, name: str) -> int:
        """Bytes of an output."""
        return math.prod(self.output_shape(name)) * self.output_dtype(name).itemsize

    def output_dtype(self, name: str) -> np.dtype:
        """The type that an output is returned in."""
        if name == TOP_INDICES:
            return np.dtype(np.int64)
        if name == OUTPUT:
            return self.dtype
        if (gradient := self._gradient(name)) is not None:
            return self.dtype if gradient.is_operand else self.compute_dtype
        row = row_of(name)
        if row.is_integer:
            return np.dtype(np.int32)
        return self.compute_dtype if row.in_compute_dtype else self.dtype

    def output_shape(self, name: str) -> tuple[int, ...]:
        """The shape of an array as a backend returns it.

        name: `output`, `top_indices`, one of `include`, or the dotted name of a gradient

        `output` is (b, h, q, e) if the layout has heads, else (b, q, out), where out is the width of the output map, or
        h·e without one. Other arrays have the axes of their OutputRow. There h and q are the numbers of selected heads
        and queries, if `is_selected`; h is 1 with `average_heads`, if `averaged`; and k is top_k in attention_weights
        and top_indices. KeyError for any other name.
        """
        lengths, chosen = self.sizes.by_letter, self.selection
        if (gradient := self._gradient(name)) is not None:
            return gradient.shape
        if name == OUTPUT:
            if "h" in self.layout:
                return tuple(lengths[axis] for axis in "bhqe")
            output_map = self.roles.output_map
            return lengths["b"], lengths["q"], output_map.features if output_map else lengths["h"] * lengths["e"]
        row = row_of(name)
        lengths["n"] = lengths["k"] - self.roles.past_length
        if row.is_selected and chosen.heads is not None:
            lengths["h"] = len(chosen.heads)
        if row.is_selected and chosen.queries is not None:
            lengths["q"] = len(chosen.queries)
        if row.averaged and chosen.average_heads:
            lengths["h"] = 1
        if row is OUTPUTS["attention_weights"] and chosen.top_k is not None:
            lengths["k"] = chosen.top_k
        return tuple(lengths[axis] for axis in row.axes)

    def _gradient(self, name: str) -> FieldGradient | None:
        """The gradient of a field that is returned under this name; None for any other output."""
        return None if self.gradients is None else self.gradients.named(name)

    @cached_property
    def gradient_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the gradients that tiles add up, by field, with the axes of the plan; none without gradients.

        Those of query, key and value are of the operands as attention sees them, the past included.
        """
        if self.gradients is None:
            return {}
        (h, g, b, q, k, d, e), wants = self.sizes, self.gradients.wants
        operands = {"query": (b, h, q, d), "key": (b, g, k, d), "value": (b, g, k, e)}
        shapes: dict[str, tuple[int, ...]] = {}
        for (name, shape), role in zip(operands.items(), self.roles.inputs, strict=True):
            if any(map(wants, (role.field, f"past_{name}", f"{name}_norm", f"projection.{name}"))):
                shapes[name] = shape
        parameters: dict[str, tuple[int, ...]] = {"scale": (h,)}
        if self.all_sinks is not None:
            parameters["sinks"] = self.all_sinks.shape
        for term in self.terms:
            parameters |= term.parameter_shapes
        return shapes | {name: shape for name, shape in parameters.items() if wants(name)}

    @cached_property
    def skips_hidden_keys(self) -> bool:
        """True if keys that are hidden by position need not be computed: neither scores nor indices are returned."""
        narrows = self.gathered is None and any(term.narrows for term in self.terms)
        return (
            narrows and self.selection.top_k is None and not self.selection.include & outputs_of("scores", "gradients")
        )

    @cached_property
    def real_queries(self) -> np.ndarray | None:
        """Which queries are not padding, (b or 1, 1, q, 1); None if all are real."""
        return next((term.booleans for term in self.terms if isinstance(term, QueryLengths)), None)
