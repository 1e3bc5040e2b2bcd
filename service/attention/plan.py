"""From what is asked to what is to be done: every shape, head, mask and cost question is answered here.

A plan is frozen and complete: a backend that executes it meets no shape that it has not been told.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from service.attention import cost, positions, shapes
from service.attention.arrays import FLOATS, cast, compute_dtype, widest
from service.attention.masks import ScoreAxes, score_axes
from service.attention.positions import Rotation
from service.attention.roles import Roles, Sizes, resolve_roles
from service.attention.selection import Selection, make_selection
from service.attention.spec import STAGES, AttentionSpec, Layout, Norm, Normalization
from service.attention.visibility import Visibility, make_visibility
from service.errors import InvalidValue, ShapeMismatch, shape


@dataclass(frozen=True, slots=True)
class Notice:
    """Something that a caller should know although the answer is as asked. Codes are stable."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Alibi:
    """Linear biases (Press et al. 2021): adds -slope · |i + offset - j|. slopes (h,), offset (b or 1,)."""

    slopes: np.ndarray
    offset: np.ndarray


@dataclass(frozen=True)
class Plan:
    """What a backend executes on operands, in the order of these fields.

    dtype:         of the operands and of what is returned; compute_dtype: of all between
    query_norm, …: None where it does not apply; Norm.weight is (d,) or None
    bias:          (b, h, q, k), each axis full or 1; -inf hides
    sinks:         (h,), one logit for each head that takes weight and gives nothing
    single_query:  the query came as a vector, so that its axis is dropped from the answer
    """

    roles: Roles
    dtype: np.dtype
    query_norm: Norm | None
    key_norm: Norm | None
    query_rotation: Rotation | None
    key_rotation: Rotation | None
    scale: float
    softcap: float | None
    bias: np.ndarray | None
    alibi: Alibi | None
    visibility: Visibility
    sinks: np.ndarray | None
    normalization: Normalization
    selection: Selection
    layout: Layout
    single_query: bool
    score_axes: ScoreAxes
    notices: tuple[Notice, ...]

    @cached_property
    def sizes(self) -> Sizes:
        """The lengths of all axes."""
        return self.roles.sizes

    @cached_property
    def compute_dtype(self) -> np.dtype:
        """What is computed in: float32 for halves."""
        return compute_dtype(self.dtype)

    @cached_property
    def dtype_name(self) -> str:
        """The name of dtype, which NumPy makes anew each time."""
        return self.dtype.name

    @cached_property
    def prepared(self) -> dict[str, Any]:
        """What backends have worked out for every request of this kind, by names of their own."""
        return {}

    @cached_property
    def facts(self) -> dict[str, Any]:
        """What the metadata says of every answer to this."""
        sizes = self.sizes
        return {
            "num_heads": sizes.num_heads,
            "num_kv_heads": sizes.num_kv_heads,
            "batch_size": sizes.batch_size,
            "query_length": sizes.query_length,
            "key_length": sizes.key_length,
            "head_dim": sizes.head_dim,
            "value_dim": sizes.value_dim,
            "scale": self.scale,
        }

    @cached_property
    def score_count(self) -> int:
        """Elements of one score matrix: b·h·q·k."""
        sizes = self.sizes
        return sizes.batch_size * sizes.num_heads * sizes.query_length * sizes.key_length

    @cached_property
    def flops(self) -> int:
        """Operations, see `cost.flops`."""
        return cost.flops(self)

    @cached_property
    def returned_bytes(self) -> int:
        """Memory of what is returned, see `cost.returned_bytes`."""
        return cost.returned_bytes(self)

    @cached_property
    def peak_bytes(self) -> int:
        """Memory that computing takes by NumPy on one thread, see `cost.peak_bytes`."""
        return cost.peak_bytes(self, cost.working_bytes(self))

    @cached_property
    def plain(self) -> bool:
        """Whether this is softmax(scale · q kᵀ) v and its weights, and nothing else."""
        roles, seen, chosen = self.roles, self.visibility, self.selection
        absent = (
            *(roles.query.map, roles.key.map, roles.value.map, roles.output_map),
            *(self.query_norm, self.key_norm, self.query_rotation, self.key_rotation),
            *(self.softcap, self.bias, self.alibi, self.sinks),
            *(seen.mask, seen.keys, seen.queries, seen.segments, seen.band),
            *(chosen.heads, chosen.queries, chosen.top_k),
        )
        return (
            all(part is None for part in absent)
            and self.normalization == "softmax"
            and roles.past_length == 0
            and self.sizes.num_heads == self.sizes.num_kv_heads
            and chosen.include <= {"attention_weights"}
            and not chosen.average_heads
        )

    @cached_property
    def skips_hidden(self) -> bool:
        """Whether keys that nobody sees need not be computed: neither their scores nor their places come back."""
        return not self.selection.include & set(STAGES) and self.selection.top_k is None


def make_plan(spec: AttentionSpec) -> Plan:
    """Decide everything. Errors: InvalidRequest of every kind, with the pointer of the field at fault.

    Of the sources only shapes and types are looked at, so that a plan without other arrays fits every request of its
    kind.
    """
    given = shapes.sources(spec)
    layout = shapes.resolve_layout(spec.layout, given)
    dtype = _dtype(spec, given)
    roles = resolve_roles(spec, given, layout, dtype)
    computing, sizes, past = compute_dtype(dtype), roles.sizes, roles.past_length
    single_query = given["query"][1].ndim == 1
    axes = score_axes(layout, sizes, columns=shapes.has_columns(layout), single_query=single_query)
    offset = positions.query_offset(spec, sizes, past)
    query_rotation, key_rotation = positions.rotations(spec.rotary, sizes, past, computing)
    _check_tokens(spec, sizes)
    return Plan(
        roles=roles,
        dtype=dtype,
        query_norm=_norm(spec.query_norm, "query_norm", sizes.head_dim, computing),
        key_norm=_norm(spec.key_norm, "key_norm", sizes.head_dim, computing),
        query_rotation=query_rotation,
        key_rotation=key_rotation,
        scale=1 / math.sqrt(sizes.head_dim) if spec.scale is None else _finite(spec.scale, "/scale"),
        softcap=_softcap(spec.softcap),
        bias=_bias(spec.bias, axes, computing),
        alibi=_alibi(spec.alibi_slopes, offset, sizes, computing),
        visibility=make_visibility(spec, axes, offset, sizes),
        sinks=_per_head(spec.sinks, "/sinks", sizes, computing),
        normalization=spec.normalization,
        selection=make_selection(spec, sizes),
        layout=layout,
        single_query=single_query,
        score_axes=axes,
        notices=_notices(spec),
    )


def _dtype(spec: AttentionSpec, given: dict[str, tuple[str, np.ndarray]]) -> np.dtype:
    """As asked, else the widest of the types that came with numbers."""
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


def _bias(bias: np.ndarray | None, axes: ScoreAxes, dtype: np.dtype) -> np.ndarray | None:
    return None if bias is None else axes.align(cast(bias, dtype, "/bias", minus_infinity=True), "bias")


def _per_head(array: np.ndarray | None, pointer: str, sizes: Sizes, dtype: np.dtype) -> np.ndarray | None:
    if array is None:
        return None
    if array.shape != (sizes.num_heads,):
        raise ShapeMismatch.of(pointer, f"{shape((sizes.num_heads,))}, one number a head", array)
    return cast(array, dtype, pointer)


def _alibi(slopes: np.ndarray | None, offset: np.ndarray, sizes: Sizes, dtype: np.dtype) -> Alibi | None:
    checked = _per_head(slopes, "/alibi_slopes", sizes, dtype)
    return None if checked is None else Alibi(checked, offset.astype(dtype))


def _check_tokens(spec: AttentionSpec, sizes: Sizes) -> None:
    """Labels must be as many as the tokens they name: (l,), or (b, l)."""
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
