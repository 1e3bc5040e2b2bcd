"""From what is asked to what is to be done: every shape, head, mask and cost question is answered here.

A plan is frozen and complete: a backend that executes it meets no shape that it has not been told.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from service.attention import shapes
from service.attention.arrays import cast
from service.attention.masks import ScoreAxes, score_axes
from service.attention.operands import Operands, Sizes, resolve_operands
from service.attention.spec import SCORE_MATRICES, AttentionSpec, Layout, Normalization, Stage
from service.errors import FieldConflict, InvalidArray, InvalidValue, MissingField, ShapeMismatch


@dataclass(frozen=True, slots=True)
class Notice:
    """Something that a caller should know although the answer is as asked. Codes are stable."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What a backend executes.

    mask, bias:   (b, h, q, k), each axis full or 1. True = takes part; -inf in the bias = does not.
    query_offset: (b or 1,) integers, None unless causal: query i sees key j when j <= i + query_offset.
    score_axes:   how score matrices look in the answer.
    single_query: the query came as a vector, so that its axis is dropped from the answer.
    """

    operands: Operands
    scale: float
    normalization: Normalization
    mask: np.ndarray | None
    bias: np.ndarray | None
    query_offset: np.ndarray | None
    dtype: np.dtype
    layout: Layout
    single_query: bool
    score_axes: ScoreAxes
    include: frozenset[Stage]
    notices: tuple[Notice, ...]

    @property
    def sizes(self) -> Sizes:
        """The lengths of all axes."""
        return self.operands.sizes

    @property
    def score_count(self) -> int:
        """Elements of one score matrix: b·h·q·k."""
        sizes = self.sizes
        return sizes.batch_size * sizes.num_heads * sizes.query_length * sizes.key_length

    @property
    def flops(self) -> int:
        """Multiplications and additions of the maps and the two products, and about 8 an element for the softmax."""
        ops = self.operands
        maps = sum(2 * x.array.size * x.map.features for x in (ops.query, ops.key, ops.value) if x.map)
        return self.score_count * (2 * (self.sizes.head_dim + self.sizes.value_dim) + 8) + maps

    @property
    def peak_bytes(self) -> int:
        """An upper estimate of the memory that computing takes beyond the request itself."""
        sizes = self.sizes
        matrices = 2 + len(self.include & SCORE_MATRICES)
        query = sizes.num_heads * sizes.query_length * (sizes.head_dim + 2 * sizes.value_dim)
        key = sizes.num_kv_heads * sizes.key_length * (sizes.head_dim + sizes.value_dim)
        numbers = self.score_count * matrices + sizes.batch_size * (query + key)
        masked = self.mask is not None or self.bias is not None or self.query_offset is not None
        return numbers * self.dtype.itemsize + 2 * self.score_count * masked


def make_plan(spec: AttentionSpec) -> Plan:
    """Decide everything. Errors: InvalidRequest of every kind, with the pointer of the field at fault."""
    given = shapes.sources(spec)
    layout = shapes.resolve_layout(spec.layout, given)
    dtype = np.dtype(spec.dtype or "float64")
    operands = resolve_operands(spec, given, layout, dtype)
    sizes = operands.sizes
    axes = score_axes(
        layout,
        {"b": sizes.batch_size, "h": sizes.num_heads, "q": sizes.query_length, "k": sizes.key_length},
        columns=shapes.has_columns(layout),
        single_query=given["query"][1].ndim == 1,
    )
    if spec.normalization == "sum" and "logsumexp" in spec.include:
        raise FieldConflict.at("/include", "no logsumexp beside normalization sum", "logsumexp")
    _check_tokens(spec, sizes)
    return Plan(
        operands=operands,
        scale=_scale(spec.scale, sizes.head_dim),
        normalization=spec.normalization,
        mask=_mask(spec.mask, axes),
        bias=_bias(spec.bias, axes, dtype),
        query_offset=_query_offset(spec, sizes),
        dtype=dtype,
        layout=layout,
        single_query=given["query"][1].ndim == 1,
        score_axes=axes,
        include=frozenset(spec.include),
        notices=_notices(spec),
    )


def _scale(asked: float | None, head_dim: int) -> float:
    if asked is not None and not math.isfinite(asked):
        raise InvalidValue.at("/scale", "a finite number", asked)
    return 1 / math.sqrt(head_dim) if asked is None else float(asked)


def _mask(mask: np.ndarray | None, axes: ScoreAxes) -> np.ndarray | None:
    if mask is None:
        return None
    if mask.dtype != bool:
        advice = "for numbers to be added to the scores use bias"
        raise InvalidArray.at("/mask", "booleans, true = takes part", mask, advice)
    return axes.align(mask, "mask")


def _bias(bias: np.ndarray | None, axes: ScoreAxes, dtype: np.dtype) -> np.ndarray | None:
    return None if bias is None else axes.align(cast(bias, dtype, "/bias", minus_infinity=True), "bias")


def _query_offset(spec: AttentionSpec, sizes: Sizes) -> np.ndarray | None:
    """The offset of causal masking as (b or 1,); None where nothing depends on positions."""
    offset = spec.query_offset
    if offset is not None:
        if offset.dtype.kind not in "iu":
            raise InvalidArray.at("/query_offset", "an integer, or one per batch entry", offset)
        if offset.shape not in ((), (sizes.batch_size,)):
            raise ShapeMismatch.at("/query_offset", f"one integer, or ({sizes.batch_size},)", offset)
    if not spec.is_causal:
        return None
    q, k = sizes.query_length, sizes.key_length
    if offset is not None:
        return np.atleast_1d(np.clip(offset, -q, k))  # beyond these all or nothing is visible, and i + offset is safe
    if q != k:
        choices = f"0 aligns the first query with the first key, {k - q} the last with the last"
        raise MissingField.at("/query_offset", "an offset, as query and key differ in length", "none", choices)
    return np.zeros(1, dtype=np.int64)


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
