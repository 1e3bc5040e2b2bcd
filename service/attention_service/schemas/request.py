"""The request: one flat model. Rules between fields are in the descriptions, and are checked when planning."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from attention_service.attention import spec
from attention_service.attention.arrays import MAX_TEXT
from attention_service.errors import UnknownLayer, quote
from attention_service.schemas.arrays import (
    Bias,
    Gate,
    IntegerMatrix,
    IntegerOrIntegers,
    Integers,
    KeyMask,
    Mask,
    Matrix,
    NumberOrNumbers,
    Past,
    TokenLabels,
    Vector,
)
from attention_service.schemas.closed import Closed, Part, too_long

Encoding = Literal["list", "base64"]
Device = Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:[0-9]{1,3})?)$")]

# The hint for fields of a call among those of another request.
OF_CALLS = "calls of other libraries are for POST /attention/call"
# Names in a list: longer lists take long to validate.
MAX_NAMES = 64


def check_length(names: object) -> object:
    """`names`. Errors: PydanticCustomError for a list of more than `MAX_NAMES`."""
    if isinstance(names, list) and len(names) > MAX_NAMES:
        raise PydanticCustomError("too_many", f"a list of at most {MAX_NAMES} names")
    if isinstance(names, list) and any(isinstance(name, str) and len(name) > MAX_TEXT for name in names):
        raise too_long()
    return names


class LinearMap(Part):
    """A linear map: exactly one of `weight` and `kernel`, and optionally `bias`."""

    weight: Matrix | None = None
    """(out, in): y = x Wᵀ, as in torch.nn.Linear and in column notation. (heads, out, in): one matrix per head.
    Default: none."""
    kernel: Matrix | None = None
    """(in, out): y = x W, as in Keras and Flax Dense. (heads, in, out): one matrix per head. Default: none."""
    bias: Vector | None = None
    """Added to the product. The shapes (out,), (out, 1), (heads, out/heads) and (heads, out/heads, 1) are equivalent.
    Default: none."""


class GateMap(LinearMap):
    """A linear map of the query's source to gates: num_heads x value_dim features, or num_heads, one for each head."""

    activation: spec.Activation | None = "sigmoid"
    """What is applied to the mapped numbers."""


class Projection(Part):
    """Linear maps of the source before attention, and of the output after it. An absent map is the identity."""

    query: LinearMap | None = None
    """Maps the query tokens to num_heads x head_dim features. Default: the identity."""
    key: LinearMap | None = None
    """Maps the key tokens to num_kv_heads x head_dim features. Default: the identity."""
    value: LinearMap | None = None
    """Maps the value tokens to num_kv_heads x value_dim features. Default: the identity."""
    output: LinearMap | None = None
    """Maps the joined heads, num_heads x value_dim features, to the output. Rank 2 only. Default: the identity."""
    gate: GateMap | None = None
    """Maps the source of the query to gates, by which head outputs are multiplied before the output map, as in
    Qwen3-Next. Default: no gates."""


class Norm(Part):
    """Normalisation of features: x / sqrt(mean(x²) + eps) · weight + bias, for layer after the mean is subtracted."""

    kind: spec.NormKind | None = "rms"
    """rms ([Zhang & Sennrich 2019](https://arxiv.org/abs/1910.07467)), or layer: the mean is subtracted first
    ([Ba et al. 2016](https://arxiv.org/abs/1607.06450))."""
    over: spec.NormOver | None = "head"
    """head: over the features of each head; all: over those of all heads of a token, as before they are split."""
    position: spec.NormPosition | None = "before"
    """before or after the rotation; of values and head outputs, before only."""
    weight: Vector | None = None
    """(head_dim,), or (heads, head_dim) for each head its own, of values with value_dim; over all (heads · head_dim,).
    Default: ones."""
    bias: Vector | None = None
    """Added last, in the shape of weight. Default: zeros."""
    eps: float | None = 1e-6
    """Added to the mean of squares, at least 0. With 0, zeros stay 0."""


class Rotary(Part):
    """Rotary position embedding: pairs (x, y) of features become (x cos - y sin, x sin + y cos)."""

    base: float | None = None
    """The angle of pair n is position · base^(-2n/dim). Not beside cos and sin. Default: 10000."""
    cos: Matrix | None = None
    """(positions, dim/2), looked up by position; or (b, l, dim/2), one row per new token. Default: from base."""
    sin: Matrix | None = None
    """Like cos. Default: from base."""
    dim: int | None = None
    """How many of the first features are rotated; even. Default: head_dim, or as cos has them."""
    interleaved: bool | None = False
    """Pairs are adjacent features (0, 1), (2, 3), … if true, else one of each half of the features."""
    query_positions: Integers | None = None
    """Positions of the queries, (q,) or (b, q). Default: length of the past + index."""
    key_positions: Integers | None = None
    """Positions of the new keys; past keys are rotated already. Default: length of the past + index."""


class RelativeKeys(Part):
    """Relative positions: adds (query i + query_bias) · key[j - i - query_offset - first] to scores, before scaling."""

    key: Matrix | None = None
    """(distances, head_dim) for all heads, or (num_heads, distances, head_dim), by ascending distance. Distances before
    the first and after the last have the key of these. Default: none, which is an error."""
    first: int | None = None
    """The distance j - i - query_offset of the first key. Default: minus half of the number of distances."""
    query_bias: Matrix | None = None
    """(num_heads, head_dim), added to the queries for these products only: v - u of Transformer-XL, whose u is added to
    the query, or to `projection.query.bias`. Default: none."""


class Window(Part):
    """Query i attends to keys from i + query_offset - left to i + query_offset + right, both inclusive."""

    left: int | None = None
    """At least 0. Default: unbounded."""
    right: int | None = None
    """At least 0. Default: unbounded."""


class SegmentIds(Part):
    """A query attends only to keys with the same segment id."""

    query: Integers | None = None
    """(q,) for all rows, or (b, q). Default: none."""
    key: Integers | None = None
    """(k,) for all rows, or (b, k), including the past. Default: none."""


class AttentionRequest(Closed):
    """A request. The source is exactly one of: query, key and value; input alone; input and context."""

    elsewhere = dict.fromkeys(("call", "version", "arguments"), OF_CALLS)

    query: Matrix | None = None
    """Queries, with the axes of `layout`. A vector (rank 1) is one token, in layouts ld and dl; output and score
    matrices then have no query axis. Default: none."""
    key: Matrix | None = None
    """Keys, in the same layout, with as many features per head as the queries. Default: none."""
    value: Matrix | None = None
    """Values, in the same layout, with as many tokens as the key. Default: none."""
    input: Matrix | None = None
    """Self-attention: used as query, key and value. With `context`: used as query only. Default: none."""
    context: Matrix | None = None
    """Cross-attention, with `input`: used as key and value. Default: none."""
    projection: Projection | None = None
    """Not in layouts with h. Default: none."""
    layer: str | None = None
    """Name of a stored layer (GET /layers lists them): the request has all of its fields that it does not have itself.
    Not beside projection. Default: none."""
    layout: spec.Layout | None = None
    """The axes of query, key, value, input, context and output: b batch, h heads, l tokens, d features. Without h, the
    heads are packed in d. In dl and bdl tokens are columns, and score matrices are transposed: their columns sum to
    one. Default: ld, bld or bhld, by rank."""
    num_heads: Annotated[int, Field(ge=1)] | None = None
    """Query heads. Default: the h axis, or the heads of a rank-3 query map, else 1."""
    num_kv_heads: Annotated[int, Field(ge=1)] | None = None
    """Key/value heads, a divisor of num_heads: query head n reads key/value head n // (num_heads // num_kv_heads).
    Default: the key's h axis or the heads of its rank-3 map, else num_heads."""
    past_key: Past | None = None
    """Cached keys, prepended to the new keys and not rotated again: [b,] h, l, d in every layout; h is num_kv_heads; l
    may be 0. The key length includes them. Needs past_value. Default: none."""
    past_value: Past | None = None
    """Cached values, in the form of past_key. Needs past_key. Default: none."""
    query_norm: Norm | None = None
    """Normalises the queries, after their map. Default: none."""
    key_norm: Norm | None = None
    """Normalises the new keys, not those of the past. Default: none."""
    value_norm: Norm | None = None
    """Normalises the new values, not those of the past. Default: none."""
    output_norm: Norm | None = None
    """Normalises the head outputs, before gates and output map; over all heads as in
    [BitNet](https://arxiv.org/abs/2402.17764). A row without a visible key becomes the bias. Default: none."""
    clip_qkv: float | None = None
    """Above 0: query, new keys and new values are clipped to -clip_qkv … clip_qkv, as in OLMo and DBRX: after maps and
    norms, before rotary and norms that follow it. The past is not clipped again. Default: none."""
    rotary: Rotary | None = None
    """Rotates query and new keys ([Su et al. 2021](https://arxiv.org/abs/2104.09864)). Default: none."""
    relative_keys: RelativeKeys | None = None
    """A key for each distance of query and key ([Shaw et al. 2018](https://arxiv.org/abs/1803.02155),
    [Dai et al. 2019](https://arxiv.org/abs/1901.02860)). Default: none."""
    scale: NumberOrNumbers | None = None
    """Factor on the scores: one number, or (num_heads,). 1 means unscaled; 0 and less are legal. Default:
    1/sqrt(head_dim)."""
    softcap: float | None = None
    """Above 0: scores become softcap · tanh(scaled / softcap), before bias and mask. Default: none."""
    bias: Bias | None = None
    """Numbers added to the scaled (and capped) scores, with the axes of `mask`. null is minus infinity, which hides a
    key. Only 0 and 1 are added like any other, with the warning bias_looks_like_mask. Default: none."""
    alibi_slopes: Vector | None = None
    """(num_heads,): adds -slope · |i + query_offset - j| to the score of query i and key j
    ([Press et al. 2021](https://arxiv.org/abs/2108.12409)). Default: none."""
    mask: Mask | None = None
    """Booleans; true: the query attends to the key. Broadcast to the score matrices as returned: rank 1 is k, rank 4
    starts with b, h, rank 3 is per head if there are b and h. A key is visible only if every mask allows it. Default:
    none."""
    key_mask: KeyMask | None = None
    """Booleans; true: the key is visible. (k,) for all rows, or (b, k). Default: none."""
    is_causal: bool | None = False
    """Query i attends to key j only if j <= i + query_offset."""
    query_offset: IntegerOrIntegers | None = None
    """Position of the first query among the keys, for is_causal and all other fields whose formula has it: one integer,
    or (b,). 0 aligns the first query with the first key, k - q the last with the last. Default: the length of the past.
    Required if there is no past and q differs from k."""
    window: Window | None = None
    """Hides keys that are far from the query. Default: no keys."""
    chunk_size: int | None = None
    """At least 1: query i attends only to keys j with (i + query_offset) // chunk_size = j // chunk_size, as in
    Llama 4. Default: no chunks."""
    query_lengths: IntegerOrIntegers | None = None
    """How many queries are not padding: one integer, or (b,). Weights and outputs of the padding are 0. Default:
    all."""
    key_lengths: IntegerOrIntegers | None = None
    """How many keys, including the past, are not padding: one integer, or (b,). Does not change the offset. Default:
    all."""
    segment_ids: SegmentIds | None = None
    """Separates sequences that are packed into one. Default: none."""
    selected_keys: IntegerMatrix | None = None
    """Indices of the only keys that a query may see, the past counted: ..., q, n in every layout, broadcast as `mask`
    is. -1 is no key, an index twice counts once. Other masks hide keys as well. As in DeepSeek V3.2. Default: all
    keys."""
    sinks: Vector | None = None
    """(num_heads,), or [b,] h, q in every layout: one logit per head, or per query of each head, that is part of the
    softmax and dropped after it, so that weights sum to less than 1. Default: none."""
    normalization: spec.Normalization | None = "softmax"
    """softmax; sum: the visible scores divided by their sum, so that weights may be negative; or sigmoid:
    1 / (1 + exp(-x)) of each visible score ([Ramapuram et al. 2024](https://arxiv.org/abs/2409.04431)). sum and sigmoid
    exclude logsumexp, entropy, sinks and weights_without_sinks."""
    gate: Gate | None = None
    """Gates, activated already, which the head outputs are multiplied by before the output map: [b,] h, q, value_dim or
    [b,] h, q, 1, in every layout. Not beside projection.gate. A row without a visible key stays 0. Default: none."""
    dtype: spec.DType | None = None
    """Type that arrays are cast to and results are returned in. float16 and bfloat16 are computed in float32. Default:
    the widest type among the typed arrays of query, key, value, input, context and past; float64 for lists."""
    backend: spec.Backend | None = "auto"
    """auto is the backend of the service (ATTENTION_BACKEND), or torch if the device is CUDA. A service computes with
    ray only if its settings say so."""
    device: Device | None = "auto"
    """auto, cpu, cuda or cuda:N. cuda needs the backend torch; with torch, auto is a GPU if any."""
    grad_output: Matrix | None = None
    """The gradient of a loss with respect to output, in its shape: what gradients are computed from. Default: zeros."""
    grad_logsumexp: Vector | None = None
    """The gradient of the loss with respect to the natural logsumexp: [b,] [h,] q, of all heads and queries. Default:
    zeros."""
    gradients: spec.AllGradients | None = None
    """all: return the gradients of all fields of the request that have one, as if `include` named them; without
    `include`, no weights. Default: those in include."""
    include: Annotated[list[spec.Included] | None, BeforeValidator(check_length)] = spec.DEFAULT_INCLUDE  # type: ignore[assignment]  # a list would be copied each time
    """What to return in addition to output and metadata. The response describes each name. Default: attention_weights;
    with `gradients`, nothing else."""
    select_heads: Integers | None = None
    """Return results of scores, weights and rows of these heads only. Default: all."""
    select_queries: Integers | None = None
    """Return results of scores, weights and rows of these queries only; received is of all. Default: all."""
    average_heads: bool | None = False
    """Average attention_weights, weights_without_sinks and received over the (selected) heads; their h axis is
    dropped."""
    top_k: int | None = None
    """Return only the largest weights of each row, at most k of them: top_weights replaces attention_weights. Default:
    all."""
    query_tokens: TokenLabels | None = None
    """Labels of the query tokens, returned unchanged: (q,) or (b, q). Default: none."""
    key_tokens: TokenLabels | None = None
    """Labels of the key tokens, returned unchanged: (k,) or (b, k). Default: none."""
    encoding: Encoding | None = "list"
    """Arrays of a JSON response: nested lists, or objects with base64 data."""

    def attention_spec(self, untyped: AbstractSet[str], *, allow_non_finite: bool = False) -> spec.AttentionSpec:
        """This request as an AttentionSpec, with defaults, without the fields that another operation adds.

        untyped: the fields whose arrays came as lists, which have no type of their own

        Errors: UnknownLayer for a request that still names a layer.
        """
        given = {name: value for name, value in self.given().items() if name in AttentionRequest.model_fields}
        given.pop("encoding", None)
        if given.pop("layer", None) is not None:  # a service puts the fields of a layer in the place of its name
            raise UnknownLayer.at("/layer", "no layer: only a service has layers", quote(str(self.layer)))
        if self.include is not None:
            given["include"] = tuple(self.include)
        if self.gradients is not None and (self.include is None or "include" not in self.model_fields_set):
            given["include"] = ()
        return spec.AttentionSpec(
            **given,  # type: ignore[arg-type]  # the fields have the same names and types
            untyped=frozenset(untyped),
            allow_non_finite=allow_non_finite,
        )
