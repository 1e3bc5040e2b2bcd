"""What a caller asks for: the fields of the API as plain values, arrays as ndarrays.

Field names and meanings are those of the API, so that an error found here points at the place in the request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

Layout = Literal["ld", "dl", "bld", "lbd", "bdl", "hld", "bhld", "blhd"]
DType = Literal["float32", "float64"]
Backend = Literal["auto", "numpy"]
Normalization = Literal["softmax", "sum"]
Stage = Literal[
    "attention_weights",
    "scores",
    "scaled_scores",
    "masked_scores",
    "logsumexp",
    "query",
    "key",
    "value",
    "head_outputs",
]
DEFAULT_INCLUDE: Final[tuple[Stage, ...]] = ("attention_weights",)

# Score matrices: axes (q, k) last, swapped together when the layout holds tokens in columns.
SCORE_MATRICES: Final = frozenset({"attention_weights", "scores", "scaled_scores", "masked_scores"})


@dataclass(frozen=True, slots=True)
class LinearMap:
    """One learned map, named as its ecosystem names it: `weight` (out, in) or `kernel` (in, out), and a `bias`.

    Rank 3 is one matrix per head: (h, out, in) or (h, in, out).
    """

    weight: np.ndarray | None = None
    kernel: np.ndarray | None = None
    bias: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class Projection:
    """The maps of an attention layer; one left out is the identity."""

    query: LinearMap | None = None
    key: LinearMap | None = None
    value: LinearMap | None = None
    output: LinearMap | None = None


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One request. None always means absent."""

    query: np.ndarray | None = None
    key: np.ndarray | None = None
    value: np.ndarray | None = None
    input: np.ndarray | None = None
    context: np.ndarray | None = None
    projection: Projection | None = None
    layout: Layout | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    scale: float | None = None
    mask: np.ndarray | None = None
    bias: np.ndarray | None = None
    is_causal: bool = False
    query_offset: np.ndarray | None = None
    normalization: Normalization = "softmax"
    dtype: DType | None = None
    backend: Backend = "auto"
    include: tuple[Stage, ...] = DEFAULT_INCLUDE
    query_tokens: tuple[str, ...] | tuple[tuple[str, ...], ...] | None = None
    key_tokens: tuple[str, ...] | tuple[tuple[str, ...], ...] | None = None
