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
    """A linear map: either `weight` or `kernel`, and optionally `bias`."""

    weight: Matrix | None = None
    """(out, in): y = x Wᵀ. As in torch.nn.Linear and in column notation. (heads, out, in): one matrix per head.
    Default: none."""
    kernel: Matrix | None = None
    """(in, out): y = x W. As in Keras and Flax Dense. (heads, in, out): one matrix per head. Default: none."""
    bias: Vector | None = None
    """Added to the product. The shapes (out,), (out, 1), (heads, out/heads) and (heads, out/heads, 1) are equivalent.
    Default: none."""


class GateMap(LinearMap):
    """A linear map to num_heads x value_dim or num_heads gates."""

    activation: spec.Activation | None = "sigmoid"
    """Applied to the mapped numbers."""


class Projection(Part):
    """Linear maps of source and output. An absent map is the identity."""

    query: LinearMap | None = None
    """To num_heads x head_dim features. It maps the query tokens. Default: none, the identity."""
    key: LinearMap | None = None
    """To num_kv_heads x head_dim features. It maps the key tokens. Default: none, the identity."""
    value: LinearMap | None = None
    """To num_kv_heads x value_dim features. It maps the value tokens. Default: none, the identity."""
    output: LinearMap | None = None
    """Maps the joined heads. They have num_heads x value_dim features. Rank 2 only. Default: none, the identity."""
    gate: GateMap | None = None
    """Maps the query's source to gates. Head outputs are multiplied by them before the output map, as in Qwen3-Next.
    Default: none."""


class Norm(Part):
    """Normalisation of features: x / sqrt(mean(x²) + eps) · weight + bias."""

    kind: spec.NormKind | None = "rms"
    """rms, or layer: the mean is subtracted first. rms is by
    [Zhang & Sennrich 2019](https://arxiv.org/abs/1910.07467), layer by
    [Ba et al. 2016](https://arxiv.org/abs/1607.06450)."""
    over: spec.NormOver | None = "head"
    """Features of each head, or of all heads. all: those of all heads of a token, as before they are split."""
    position: spec.NormPosition | None = "before"
    """Before or after the rotation. Of values and head outputs, before only."""
    weight: Vector | None = None
    """(head_dim,), or (heads, head_dim). The second has a weight for each head; of values it is value_dim; over all
    (heads · head_dim,). Default: ones."""
    bias: Vector | None = None
    """Added last, in the shape of weight. Default: zeros."""
    eps: float | None = 1e-6
    """Added to the mean of squares. At least 0. With 0, zeros stay 0."""


class Rotary(Part):
    """Pairs (x, y) of features become (x cos - y sin, x sin + y cos)."""

    base: float | None = None
    """The angle of pair n is position · base^(-2n/dim). Not beside cos and sin. Default: 10000."""
    cos: Matrix | None = None
    """(positions, dim/2), or (b, l, dim/2). The first is looked up by position, the second has one row per new token.
    Default: from base."""
    sin: Matrix | None = None
    """Like cos. Default: from base."""
    dim: int | None = None
    """How many features are rotated. They are the first ones, and even in number. Default: head_dim, or that of cos."""
    interleaved: bool | None = False
    """Pairs are adjacent features if true, else one of each half. Adjacent are (0, 1), (2, 3), …"""
    query_positions: Integers | None = None
    """(q,) or (b, q). Positions of the queries. Default: past length + index."""
    key_positions: Integers | None = None
    """Positions of the new keys. Past keys are rotated already. Default: past length + index."""


class RelativeKeys(Part):
    """Adds (query i + query_bias) · key[j - i - query_offset - first] to scores, before scaling."""

    key: Matrix | None = None
    """([num_heads,] distances, head_dim), by ascending distance. Without num_heads it is for all heads. Distances
    before the first and after the last have the key of these. Default: none, which is an error."""
    first: int | None = None
    """The distance of the first key. Distances are j - i - query_offset. Default: minus half of the distances."""
    query_bias: Matrix | None = None
    """(num_heads, head_dim), added to the queries here only. It is v - u of Transformer-XL, whose u is added to the
    query, or to `projection.query.bias`. Default: none."""


class Window(Part):
    """Query i attends to keys i + query_offset - left to i + query_offset + right, inclusive."""

    left: int | None = None
    """At least 0. Default: unbounded."""
    right: int | None = None
    """At least 0. Default: unbounded."""


class SegmentIds(Part):
    """A query attends only to keys with the same segment id."""

    query: Integers | None = None
    """(q,) for all rows, or (b, q). Default: none."""
    key: Integers | None = None
    """(k,) for all rows, or (b, k), with the past. Default: none."""


class AttentionRequest(Closed):
    """The source is exactly one of: query, key and value; input alone; input and context."""

    elsewhere = dict.fromkeys(("call", "version", "arguments"), OF_CALLS)

    query: Matrix | None = None
    """Queries, with the axes of `layout`. A vector (rank 1) is one token, in layouts ld and dl; output and score
    matrices then have no query axis. Default: none."""
    key: Matrix | None = None
    """Keys, with as many features per head as the queries. Their layout is that of the queries. Default: none."""
    value: Matrix | None = None
    """Values, with as many tokens as the key. Their layout is that of the queries. Default: none."""
    input: Matrix | None = None
    """Self-attention: used as query, key and value. With `context` it is used as query only. Default: none."""
    context: Matrix | None = None
    """Cross-attention, with `input`: used as key and value. Default: none."""
    projection: Projection | None = None
    """Applied before and after attention. Not in layouts with h. Default: none."""
    layer: str | None = None
    """Name of a stored layer, whose fields are added. GET /layers lists them. The request has all fields of the layer
    that it does not have itself. Not beside projection. Default: none."""
    layout: spec.Layout | None = None
    """Axes of query, key, value, input, context, output. b batch, h heads, l tokens, d features. Without h, the heads
    are packed in d. In dl and bdl tokens are columns, and score matrices are transposed: their columns sum to one.
    Default: ld, bld or bhld, by rank."""
    num_heads: Annotated[int, Field(ge=1)] | None = None
    """Query heads. Default: the h axis, the heads of a rank-3 map, or 1."""
    num_kv_heads: Annotated[int, Field(ge=1)] | None = None
    """Key/value heads, a divisor of num_heads. Query head n reads key/value head n // (num_heads // num_kv_heads).
    Default: the key's h axis, the heads of its map, or num_heads."""
    past_key: Past | None = None
    """Cached keys: [b,] h, l, d in every layout. They are prepended to the new keys and not rotated again; h is
    num_kv_heads; l may be 0. The key length includes them. Needs past_value. Default: none."""
    past_value: Past | None = None
    """Cached values, in the form of past_key. Needs past_key. Default: none."""
    query_norm: Norm | None = None
    """Normalises the queries. It comes after their map. Default: none."""
    key_norm: Norm | None = None
    """Normalises the new keys. It does not change those of the past. Default: none."""
    value_norm: Norm | None = None
    """Normalises the new values. It does not change those of the past. Default: none."""
    output_norm: Norm | None = None
    """Normalises the head outputs. It comes before gates and output map; over all heads it is that of
    [BitNet](https://arxiv.org/abs/2402.17764). A row without a visible key becomes the bias. Default: none."""
    clip_qkv: float | None = None
    """Above 0: clips query, new keys and values to -clip_qkv … clip_qkv. As in OLMo and DBRX: after maps and norms,
    before rotary and norms that follow it. The past is not clipped again. Default: none."""
    rotary: Rotary | None = None
    """Rotates query and new keys by their positions. From [Su et al. 2021](https://arxiv.org/abs/2104.09864). Default:
    none."""
    relative_keys: RelativeKeys | None = None
    """A key for each distance of query and key. From [Shaw et al. 2018](https://arxiv.org/abs/1803.02155) and
    [Dai et al. 2019](https://arxiv.org/abs/1901.02860). Default: none."""
    scale: NumberOrNumbers | None = None
    """Factor on the scores: one, or (num_heads,). 1 means unscaled; 0 and less are legal. Default: 1/sqrt(head_dim)."""
    softcap: float | None = None
    """Above 0: scores become softcap · tanh(scaled / softcap). This comes before bias and mask. Default: none."""
    bias: Bias | None = None
    """Added to the scores, with the axes of `mask`; null, minus infinity, hides a key. The scores are scaled, and
    capped if `softcap` says so. Only 0 and 1 are added like any other, with the warning bias_looks_like_mask. Default:
    none."""
    alibi_slopes: Vector | None = None
    """(num_heads,): adds -slope · |i + query_offset - j| to scores. i is the query, j the key. From [Press et al.
    2021](https://arxiv.org/abs/2108.12409). Default: none."""
    mask: Mask | None = None
    """Booleans, broadcast to the scores; true: the query attends to the key. The axes are those of score matrices as
    returned: rank 1 is k, rank 4 starts with b, h, rank 3 is per head if there are b and h. A key is visible only if
    every mask allows it. Default: none."""
    key_mask: KeyMask | None = None
    """Booleans; true: the key is visible. (k,) for all rows, or (b, k). Default: none."""
    is_causal: bool | None = False
    """Query i attends to key j only if j <= i + query_offset."""
    query_offset: IntegerOrIntegers | None = None
    """Position of the first query among the keys: one, or (b,). is_causal and all other fields whose formula has it
    count from it. 0 aligns the first query with the first key, k - q the last with the last. It is required if there is
    no past and q differs from k. Default: the length of the past."""
    window: Window | None = None
    """Hides keys far from the query. Default: none."""
    chunk_size: int | None = None
    """At least 1: a query attends only to keys of its chunk. The chunk of query i is that of the keys j with (i +
    query_offset) // chunk_size = j // chunk_size, as in Llama 4. Default: none."""
    query_lengths: IntegerOrIntegers | None = None
    """Queries that are not padding: one number, or (b,). Weights and outputs of the padding are 0. Default: none,
    all."""
    key_lengths: IntegerOrIntegers | None = None
    """Keys, with the past, that are not padding: one number, or (b,). Does not change the offset. Default: none,
    all."""
    segment_ids: SegmentIds | None = None
    """Separates sequences that are packed into one. Default: none."""
    selected_keys: IntegerMatrix | None = None
    """Indices of the only keys that a query may see: ..., q, n. The past is counted. The axes are the same in every
    layout, and broadcast as those of `mask`. -1 is no key, an index twice counts once. Other masks hide keys as well.
    As in DeepSeek V3.2. Default: none, all keys."""
    sinks: Vector | None = None
    """A logit beside those of the keys: (num_heads,), or [b,] h, q. It is one per head, or per query of each head in
    every layout. It is part of the softmax and dropped after it, so that weights sum to less than 1. Default: none."""
    normalization: spec.Normalization | None = "softmax"
    """softmax, or sum or sigmoid of the visible scores. sum divides them by their sum, so that weights may be negative;
    sigmoid is 1 / (1 + exp(-x)) of each, from [Ramapuram et al. 2024](https://arxiv.org/abs/2409.04431). sum and
    sigmoid exclude logsumexp, entropy, sinks and weights_without_sinks."""
    gate: Gate | None = None
    """Factors of the head outputs: [b,] h, q, value_dim or 1. They are activated already, and come before the output
    map; the axes are the same in every layout. Not beside projection.gate. A row without a visible key stays 0.
    Default: none."""
    dtype: spec.DType | None = None
    """Type of arrays and results. Arrays are cast to it; float16 and bfloat16 are computed in float32. The default
    looks at query, key, value, input, context and past. Default: the widest of typed arrays, or float64."""
    backend: spec.Backend | None = "auto"
    """auto is that of the service, or torch on CUDA. `ATTENTION_BACKEND` sets that of the service. A service computes
    with ray only if its settings say so."""
    device: Device | None = "auto"
    """auto, cpu, cuda or cuda:N. cuda needs the backend torch; with torch, auto is a GPU if any."""
    grad_output: Matrix | None = None
    """Upstream gradient of output. It is that of a loss, in the shape of output; gradients are computed from it.
    Default: zeros."""
    grad_logsumexp: Vector | None = None
    """Upstream gradient of logsumexp. It is that of the natural logsumexp of all heads and queries: [b,] [h,] q.
    Default: zeros."""
    gradients: spec.AllGradients | None = None
    """all: return all gradients. They are those of all fields of the request that have one, as if `include` named them;
    without `include`, no weights are returned. Default: those in include."""
    include: Annotated[list[spec.Included] | None, BeforeValidator(check_length)] = spec.DEFAULT_INCLUDE  # type: ignore[assignment]  # a list would be copied each time
    """Results beside output and metadata. The response describes each name. With `gradients` the default is nothing.
    Default: attention_weights."""
    select_heads: Integers | None = None
    """Return results of these heads only. Scores, weights and rows are such results. Default: none, all."""
    select_queries: Integers | None = None
    """Return results of these queries only. Scores, weights and rows are such results; received is of all queries.
    Default: none, all."""
    average_heads: bool | None = False
    """Average weights over the (selected) heads. They are attention_weights, weights_without_sinks and received; their
    h axis is dropped."""
    top_k: int | None = None
    """Return the largest weights of each row, as top_weights. They are top_k at most, and replace attention_weights.
    Default: none, all weights."""
    query_tokens: TokenLabels | None = None
    """Labels of the queries: (q,) or (b, q). They are returned unchanged. Default: none."""
    key_tokens: TokenLabels | None = None
    """Labels of the keys: (k,) or (b, k). They are returned unchanged. Default: none."""
    encoding: Encoding | None = "list"
    """Arrays of a JSON response. They are nested lists, or objects with base64 data."""

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
