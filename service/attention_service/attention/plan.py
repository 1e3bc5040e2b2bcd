"""From a request to a plan, which answers every question of shapes, heads, masks and cost.

A plan is frozen and complete: a backend that executes it cannot meet a shape error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from attention_service.attention import cost, rotary
from attention_service.attention.arrays import FLOATS, cast, compute_dtype, widest
from attention_service.attention.norms import make_norm
from attention_service.attention.options import options_of
from attention_service.attention.outputs import Selection, has_all_keys, make_selection, outputs_of
from attention_service.attention.roles import Roles, resolve_layout, resolve_roles, sources
from attention_service.attention.rotary import Rotation
from attention_service.attention.score_term import Frame, ScoreTerm
from attention_service.attention.shapes import Sizes, score_axes
from attention_service.attention.spec import AttentionSpec, Given, Layout, Norm, Normalization
from attention_service.attention.terms import QueryLengths, SelectedKeys, make_terms, per_head
from attention_service.errors import InvalidValue, ShapeMismatch, shape

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
    """What a backend computes from operands. From `query_norm` to `normalization` in the order of computation.

    The default of a field is its neutral value: it means that the option is not used (see
    attention_service.attention.options).

    dtype:         of the operands and of what is returned; compute_dtype: of everything between
    query_norm, …: None if not used; Norm.weight and Norm.bias are (d,), for each head (h, 1, d), or None
    terms:         what hides scores and what is added to them
    head_scales:   (h,) in float64, what the scores of each head are multiplied by; `scale` is 1 then
    sinks:         (h,), one logit for each head that takes weight and has no value
    row_sinks:     (b, h, q), one such logit for each row
    gate:          (b, h, q, e or 1), what the head outputs are multiplied by
    single_query:  True if the query came as a vector, so that its axis is dropped from the answer
    """

    roles: Roles
    dtype: np.dtype
    scale: float
    layout: Layout
    selection: Selection
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    value_norm: Norm | None = None
    query_rotation: Rotation | None = None
    key_rotation: Rotation | None = None
    head_scales: np.ndarray | None = None
    softcap: float | None = None
    terms: tuple[ScoreTerm, ...] = ()
    sinks: np.ndarray | None = None
    row_sinks: np.ndarray | None = None
    normalization: Normalization = "softmax"
    gate: np.ndarray | None = None
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
    def gathered(self) -> SelectedKeys | None:
        """The term whose keys are gathered for each query, all others left out; None if every key is computed.

        Every key is if an output has a number for each key, or if so many keys are selected that it is faster.
        """
        term = next((term for term in self.terms if isinstance(term, SelectedKeys)), None)
        if term is None or any(has_all_keys(name) for name in self.selection.include):
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

    flops = cached_property(cost.flops)
    returned_bytes = cached_property(cost.returned_bytes)

    @cached_property
    def skips_hidden_keys(self) -> bool:
        """True if keys that are hidden by position need not be computed: neither scores nor indices are returned."""
        narrows = self.gathered is None and any(term.narrows for term in self.terms)
        return narrows and self.selection.top_k is None and not self.selection.include & outputs_of("scores")

    @cached_property
    def real_queries(self) -> np.ndarray | None:
        """Which queries are not padding, (b or 1, 1, q, 1); None if all are real."""
        return next((term.booleans for term in self.terms if isinstance(term, QueryLengths)), None)


def make_plan(spec: AttentionSpec) -> Plan:
    """The plan of a request. Errors: InvalidRequest of every kind, with the pointer of the field at fault.

    It depends on the shapes and types of the sources, not on their numbers, so that a request without other arrays has
    the same plan as any other of the same shapes and options.
    """
    given = sources(spec)
    layout = resolve_layout(spec.layout, given)
    dtype = _dtype(spec, given)
    roles = resolve_roles(spec, given, layout, dtype)
    computing, sizes, past = compute_dtype(dtype), roles.sizes, roles.past_length
    single_query = given["query"][1].ndim == 1
    axes = score_axes(layout, sizes.num_heads, single_query=single_query)
    query_rotation, key_rotation = rotary.rotations(spec.rotary, sizes, past, computing)
    scale, head_scales = _scales(spec.scale, sizes, computing)
    sinks, row_sinks = _sinks(spec.sinks, layout, sizes, computing)
    _check_tokens(spec, sizes)
    return Plan(
        roles=roles,
        dtype=dtype,
        scale=scale,
        layout=layout,
        query_norm=make_norm(spec.query_norm, "query_norm", sizes.num_heads, sizes.head_dim, computing),
        key_norm=make_norm(spec.key_norm, "key_norm", sizes.num_kv_heads, sizes.head_dim, computing),
        value_norm=make_norm(spec.value_norm, "value_norm", sizes.num_kv_heads, sizes.value_dim, computing),
        query_rotation=query_rotation,
        key_rotation=key_rotation,
        head_scales=head_scales,
        softcap=_softcap(spec.softcap),
        terms=make_terms(spec, Frame(axes, sizes, past, computing)),
        sinks=sinks,
        row_sinks=row_sinks,
        normalization=spec.normalization,
        gate=_gate(spec.gate, layout, sizes, computing),
        selection=make_selection(spec, sizes),
        single_query=single_query,
        notices=_notices(spec),
    )


def dtype_of(spec: AttentionSpec) -> np.dtype:
    """The type of the operands of a request. Errors: MissingField, FieldConflict for what is no source."""
    return _dtype(spec, sources(spec))


def _dtype(spec: AttentionSpec, given: Given) -> np.dtype:
    """The type asked for, else the widest type of the arrays that came with one."""
    if spec.dtype is not None:
        return FLOATS[spec.dtype]
    arrays = dict(given.values()) | {"past_key": spec.past_key, "past_value": spec.past_value}
    return widest([x.dtype for name, x in arrays.items() if x is not None and name not in spec.untyped])


def _finite(number: float, pointer: str) -> float:
    if not math.isfinite(number):
        raise InvalidValue.of(pointer, "a finite number", number)
    return float(number)


def _scales(scale: float | np.ndarray | None, sizes: Sizes, dtype: np.dtype) -> tuple[float, np.ndarray | None]:
    """The fields `scale` and `head_scales` of a plan. Errors: InvalidValue, InvalidArray, ShapeMismatch, Overflow."""
    if isinstance(scale, np.ndarray):
        per_head(scale, "/scale", sizes, dtype)
        return 1.0, scale.astype(np.float64)
    return 1 / math.sqrt(sizes.head_dim) if scale is None else _finite(scale, "/scale"), None


def _sinks(
    sinks: np.ndarray | None, layout: Layout, sizes: Sizes, dtype: np.dtype
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """The fields `sinks` and `row_sinks` of a plan. Errors: ShapeMismatch, InvalidArray, Overflow."""
    if sinks is None or sinks.ndim == 1:
        return None if sinks is None else per_head(sinks, "/sinks", sizes, dtype), None
    h, _, b, q, *_ = sizes
    wanted = (b, h, q) if "b" in layout else (h, q)
    if sinks.shape != wanted:
        raise ShapeMismatch.of("/sinks", f"{shape((h,))}, one number a head, or {shape(wanted)}", sinks)
    return None, cast(sinks, dtype, "/sinks").reshape(b, h, q)


def _gate(gate: np.ndarray | None, layout: Layout, sizes: Sizes, dtype: np.dtype) -> np.ndarray | None:
    """The gates of a request as (b, h, q, e or 1). Errors: ShapeMismatch, InvalidArray, Overflow."""
    if gate is None:
        return None
    h, _, b, q, _, _, e = sizes
    leading = (b, h, q) if "b" in layout else (h, q)
    if gate.shape not in ((*leading, e), (*leading, 1)):
        axes = "b, h, q, value_dim" if "b" in layout else "h, q, value_dim"
        expected = " or ".join(dict.fromkeys((shape((*leading, e)), shape((*leading, 1)))))
        raise ShapeMismatch.of("/gate", expected, gate, f"axes {axes} in every layout")
    return cast(gate, dtype, "/gate").reshape(b, h, q, -1)


def _softcap(softcap: float | None) -> float | None:
    if softcap is None:
        return None
    if softcap <= 0:
        raise InvalidValue.of("/softcap", "a number above 0", softcap, "leave it out for no cap")
    return _finite(softcap, "/softcap")


def _check_tokens(spec: AttentionSpec, sizes: Sizes) -> None:
    """Check that labels are (l,) or (b, l), as many as the tokens that they name. Errors: ShapeMismatch."""
    for field, length in (("query_tokens", sizes.query_length), ("key_tokens", sizes.key_length)):
        labels = getattr(spec, field)
        if labels is None:
            continue
        rows = labels if labels and not isinstance(labels[0], str) else [labels]
        if rows is labels and len(rows) != sizes.batch_size:
            raise ShapeMismatch.at(f"/{field}", f"{sizes.batch_size} lists, one per batch entry", f"{len(rows)}")
        for i, row in enumerate(rows):
            if len(row) != length:
                pointer = f"/{field}/{i}" if rows is labels else f"/{field}"
                raise ShapeMismatch.at(pointer, f"{length} labels", str(len(row)))


def _notices(spec: AttentionSpec) -> tuple[Notice, ...]:
    bias = spec.bias
    if bias is not None and (bias == 1).any() and ((bias == 0) | (bias == 1)).all():
        text = "bias holds only 0 and 1, and was added to the scores; to hide keys send booleans as mask"
        return (Notice("bias_looks_like_mask", text),)
    return ()
