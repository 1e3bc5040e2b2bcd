"""From a request to a plan, which answers every question of shapes, heads, masks and cost.

A plan is frozen and complete: a backend that executes it cannot meet a shape error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from service.attention import cost, rotary
from service.attention.arrays import FLOATS, cast, compute_dtype, widest
from service.attention.options import options_of
from service.attention.outputs import Selection, make_selection, outputs_of
from service.attention.roles import Roles, resolve_layout, resolve_roles, sources
from service.attention.rotary import Rotation
from service.attention.shapes import Sizes, score_axes
from service.attention.spec import AttentionSpec, Given, Layout, Norm, Normalization
from service.attention.terms import Frame, QueryLengths, ScoreTerm, make_terms, per_head
from service.errors import InvalidValue, ShapeMismatch, shape


@dataclass(frozen=True, slots=True)
class Notice:
    """A warning in the metadata: the answer is what was asked for, but perhaps not what was meant. Codes are stable."""

    code: str
    message: str


@dataclass(frozen=True, eq=False, kw_only=True)
class Plan:
    """What a backend computes from operands. From `query_norm` to `normalization` in the order of computation.

    The default of a field is its neutral value: it means that the option is not used (see service.attention.options).

    dtype:         of the operands and of what is returned; compute_dtype: of everything between
    query_norm, …: None if not used; Norm.weight is (d,) or None
    terms:         what hides scores and what is added to them
    sinks:         (h,), one logit for each head that takes weight and has no value
    single_query:  True if the query came as a vector, so that its axis is dropped from the answer
    """

    roles: Roles
    dtype: np.dtype
    scale: float
    layout: Layout
    selection: Selection
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    query_rotation: Rotation | None = None
    key_rotation: Rotation | None = None
    softcap: float | None = None
    terms: tuple[ScoreTerm, ...] = ()
    sinks: np.ndarray | None = None
    normalization: Normalization = "softmax"
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
    def score_count(self) -> int:
        """Elements of one score matrix: b·h·q·k."""
        sizes = self.sizes
        return sizes.batch_size * sizes.num_heads * sizes.query_length * sizes.key_length

    @cached_property
    def options(self) -> frozenset[str]:
        """The names of all options that the plan uses, see service.attention.options."""
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
        narrows = any(term.narrows for term in self.terms)
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
    _check_tokens(spec, sizes)
    return Plan(
        roles=roles,
        dtype=dtype,
        scale=1 / math.sqrt(sizes.head_dim) if spec.scale is None else _finite(spec.scale, "/scale"),
        layout=layout,
        query_norm=_norm(spec.query_norm, "query_norm", sizes.head_dim, computing),
        key_norm=_norm(spec.key_norm, "key_norm", sizes.head_dim, computing),
        query_rotation=query_rotation,
        key_rotation=key_rotation,
        softcap=_softcap(spec.softcap),
        terms=make_terms(spec, Frame(axes, sizes, past, computing)),
        sinks=None if spec.sinks is None else per_head(spec.sinks, "/sinks", sizes, computing),
        normalization=spec.normalization,
        selection=make_selection(spec, sizes),
        single_query=single_query,
        notices=_notices(spec),
    )


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


def _softcap(softcap: float | None) -> float | None:
    if softcap is None:
        return None
    if softcap <= 0:
        raise InvalidValue.of("/softcap", "a number above 0", softcap, "leave it out for no cap")
    return _finite(softcap, "/softcap")


def _norm(norm: Norm | None, field: str, head_dim: int, dtype: np.dtype) -> Norm | None:
    if norm is None:
        return None
    if not norm.eps >= 0:
        raise InvalidValue.of(f"/{field}/eps", "a number of at least 0", norm.eps)
    if norm.weight is None:
        return norm
    if norm.weight.shape != (head_dim,):
        raise ShapeMismatch.of(f"/{field}/weight", shape((head_dim,)), norm.weight)
    return Norm(cast(norm.weight, dtype, f"/{field}/weight"), _finite(norm.eps, f"/{field}/eps"))


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
