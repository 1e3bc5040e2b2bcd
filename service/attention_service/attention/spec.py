"""The request as plain values: the fields of the API, arrays as ndarrays.

Names and meanings are those of the API, so that an error found here points at the place in the request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Final, Literal, NamedTuple, get_type_hints

import numpy as np

Layout = Literal["ld", "dl", "bld", "lbd", "bdl", "hld", "bhld", "blhd"]
DType = Literal["float64", "float32", "float16", "bfloat16"]
Backend = Literal["auto", "numpy", "torch", "ray"]
Normalization = Literal["softmax", "sum", "sigmoid"]
NormKind = Literal["rms", "layer"]
NormOver = Literal["head", "all"]
NormPosition = Literal["before", "after"]
Activation = Literal["sigmoid", "softplus", "silu", "none"]
Output = Literal[
    "attention_weights",
    "weights_without_sinks",
    "scores",
    "scaled_scores",
    "capped_scores",
    "masked_scores",
    "hidden_by",
    "logsumexp",
    "entropy",
    "received",
    "query",
    "key",
    "value",
    "head_outputs",
    "present_key",
    "present_value",
    "grad_masked_scores",
    "grad_scaled_scores",
    "grad_scores",
]
# The gradients of fields of the request.
Gradient = Literal[
    "grad_query",
    "grad_key",
    "grad_value",
    "grad_input",
    "grad_context",
    "grad_projection",
    "grad_past_key",
    "grad_past_value",
    "grad_query_norm",
    "grad_key_norm",
    "grad_value_norm",
    "grad_output_norm",
    "grad_relative_keys",
    "grad_scale",
    "grad_bias",
    "grad_alibi_slopes",
    "grad_sinks",
    "grad_gate",
]
AllGradients = Literal["all"]
# The names that `include` takes.
Included = Literal[Output, Gradient]
# Arrays that are cast to the type of the request, and those that are cast to the type that is computed in.
Operand = Annotated[np.ndarray, "dtype"]
Parameter = Annotated[np.ndarray, "compute_dtype"]
DEFAULT_INCLUDE: Final[tuple[Output, ...]] = ("attention_weights",)


@dataclass(frozen=True, slots=True)
class LinearMap:
    """One learned map, named as its ecosystem names it: `weight` (out, in) or `kernel` (in, out), and a `bias`.

    Rank 3 is one matrix per head: (h, out, in) or (h, in, out).
    """

    weight: Operand | None = None
    kernel: Operand | None = None
    bias: Operand | None = None


@dataclass(frozen=True, slots=True)
class GateMap(LinearMap):
    """The map that makes gates of the query's source: (h·value_dim, in), or (h, in) for one gate a head."""

    activation: Activation = "sigmoid"


@dataclass(frozen=True, slots=True)
class Projection:
    """The maps of an attention layer; one left out is the identity, a gate left out is none."""

    query: LinearMap | None = None
    key: LinearMap | None = None
    value: LinearMap | None = None
    output: LinearMap | None = None
    gate: GateMap | None = None


@dataclass(frozen=True, slots=True)
class Window:
    """Query i sees keys from i + offset - left to i + offset + right; None is unbounded."""

    left: int | None = None
    right: int | None = None


@dataclass(frozen=True, slots=True)
class SegmentIds:
    """Only tokens with equal ids see each other: query (q,) or (b, q), key (k,) or (b, k)."""

    query: np.ndarray | None = None
    key: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary position embedding (Su et al. 2021): each pair of features is rotated by position · frequency.

    base, or tables cos and sin: (positions, dim/2), or (b, l, dim/2) for each token as it stands
    dim: how many features turn, the first ones; interleaved: pairs (0, 1), (2, 3), … instead of halves
    """

    base: float | None = None
    cos: Parameter | None = None
    sin: Parameter | None = None
    dim: int | None = None
    interleaved: bool = False
    query_positions: np.ndarray | None = None
    key_positions: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class Norm:
    """Normalisation: x / sqrt(mean(x²) + eps) · weight + bias, for `layer` after the mean is subtracted from x.

    kind: rms (Zhang & Sennrich 2019) or layer (Ba et al. 2016)
    over: the features of each head, or of all heads of a token; position: before or after the rotation
    weight, bias: (features of a head,), or with `over` all (heads · features of a head,)
    """

    kind: NormKind = "rms"
    over: NormOver = "head"
    position: NormPosition = "before"
    weight: Parameter | None = None
    bias: Parameter | None = None
    eps: float = 1e-6


@dataclass(frozen=True, slots=True)
class RelativeKeys:
    """Keys for distances: (query i + query_bias) · key[j - i - offset - first] is added to the product of i and j.

    key: (distances, d) or (h, distances, d); first: the distance of the first; query_bias: (h, d)
    """

    key: Parameter | None = None
    first: int | None = None
    query_bias: Parameter | None = None


# Where query, key and value come from: the first fields of a request.
SOURCES: Final = ("query", "key", "value", "input", "context")
ROLES: Final = ("query", "key", "value")
# The field and array that query, key and value each come from.
Given = Mapping[str, tuple[str, np.ndarray]]


class AttentionSpec(NamedTuple):
    """One request as plain values. None always means absent.

    untyped: fields whose numbers came without a type (JSON lists), so that they do not choose the dtype
    allow_non_finite: inputs may hold inf and NaN as long as nothing visible depends on them
    """

    query: Operand | None = None
    key: Operand | None = None
    value: Operand | None = None
    input: Operand | None = None
    context: Operand | None = None
    projection: Projection | None = None
    layout: Layout | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    past_key: Operand | None = None
    past_value: Operand | None = None
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    value_norm: Norm | None = None
    output_norm: Norm | None = None
    clip_qkv: float | None = None
    rotary: Rotary | None = None
    relative_keys: RelativeKeys | None = None
    scale: float | np.ndarray | None = None
    softcap: float | None = None
    bias: Parameter | None = None
    alibi_slopes: Parameter | None = None
    mask: np.ndarray | None = None
    key_mask: np.ndarray | None = None
    is_causal: bool = False
    query_offset: np.ndarray | None = None
    window: Window | None = None
    chunk_size: int | None = None
    query_lengths: np.ndarray | None = None
    key_lengths: np.ndarray | None = None
    segment_ids: SegmentIds | None = None
    selected_keys: np.ndarray | None = None
    sinks: Parameter | None = None
    normalization: Normalization = "softmax"
    gate: Parameter | None = None
    dtype: DType | None = None
    backend: Backend = "auto"
    device: str = "auto"
    grad_output: Operand | None = None
    grad_logsumexp: Parameter | None = None
    gradients: AllGradients | None = None
    include: tuple[Included, ...] = DEFAULT_INCLUDE
    select_heads: np.ndarray | None = None
    select_queries: np.ndarray | None = None
    average_heads: bool = False
    top_k: int | None = None
    query_tokens: tuple[str, ...] | tuple[tuple[str, ...], ...] | None = None
    key_tokens: tuple[str, ...] | tuple[tuple[str, ...], ...] | None = None
    untyped: frozenset[str] = frozenset()
    allow_non_finite: bool = False

    @property
    def sources(self) -> dict[str, np.ndarray]:
        """The arrays that query, key and value come from, by the names of their fields."""
        return {name: array for name in SOURCES if (array := getattr(self, name)) is not None}

    @property
    def has_gradients(self) -> bool:
        """True if the request asks for gradients, or has a cotangent."""
        given = (self.grad_output, self.grad_logsumexp, self.gradients)
        return any(value is not None for value in given) or any(name.startswith("grad_") for name in self.include)

    def forward(self) -> AttentionSpec:
        """The same request without gradients."""
        include = tuple(name for name in self.include if not name.startswith("grad_"))
        return self._replace(grad_output=None, grad_logsumexp=None, gradients=None, include=include)

    def without_sources(self) -> AttentionSpec:
        """The same request without the arrays that query, key and value come from."""
        return self._replace(query=None, key=None, value=None, input=None, context=None)


@cache
def field_types(kind: Any) -> dict[str, Any]:
    """The types of the fields of a class, read once: reading them takes longer than planning a request."""
    return get_type_hints(kind, include_extras=True)
