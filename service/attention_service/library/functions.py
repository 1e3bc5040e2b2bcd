"""attend(), compare() and assert_attention(), with a parameter for each field of a request.

`make openapi` generates this module from service/attention_service/schemas; openapi/functions.py has its text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Never, TypedDict

from attention_service.attention.spec import (
    Activation,
    AllGradients,
    Backend,
    DType,
    Included,
    Layout,
    Normalization,
    NormKind,
    NormOver,
    NormPosition,
)
from attention_service.errors import InvalidRequest
from attention_service.library import calls
from attention_service.library.result import AttentionResult
from attention_service.library.types import Array, Labels
from attention_service.schemas.compare import CompareReport, Liberty, LogsumexpBase
from attention_service.schemas.request import Encoding


class LinearMap(TypedDict, total=False):
    """A linear map: either `weight` or `kernel`, and optionally `bias`."""

    weight: Array | None
    """(out, in): y = x Wᵀ. As in torch.nn.Linear and in column notation. (heads, out, in): one matrix per head.
    Default: none."""
    kernel: Array | None
    """(in, out): y = x W. As in Keras and Flax Dense. (heads, in, out): one matrix per head. Default: none."""
    bias: Array | None
    """Added to the product. The shapes (out,), (out, 1), (heads, out/heads) and (heads, out/heads, 1) are equivalent.
    Default: none."""


class GateMap(LinearMap, total=False):
    """A linear map to num_heads x value_dim or num_heads gates."""

    activation: Activation | str | None
    """Applied to the mapped numbers. One of sigmoid, softplus, silu, none."""


class Projection(TypedDict, total=False):
    """Linear maps of source and output. An absent map is the identity."""

    query: LinearMap | None
    """To num_heads x head_dim features. It maps the query tokens. Default: none, the identity."""
    key: LinearMap | None
    """To num_kv_heads x head_dim features. It maps the key tokens. Default: none, the identity."""
    value: LinearMap | None
    """To num_kv_heads x value_dim features. It maps the value tokens. Default: none, the identity."""
    output: LinearMap | None
    """Maps the joined heads. They have num_heads x value_dim features. Rank 2 only. Default: none, the identity."""
    gate: GateMap | None
    """Maps the query's source to gates. Head outputs are multiplied by them before the output map, as in Qwen3-Next.
    Default: none."""


class Norm(TypedDict, total=False):
    """Normalisation of features: x / sqrt(mean(x²) + eps) · weight + bias."""

    kind: NormKind | str | None
    """rms, or layer: the mean is subtracted first. rms is by [Zhang & Sennrich 2019](https://arxiv.org/abs/1910.07467),
    layer by [Ba et al. 2016](https://arxiv.org/abs/1607.06450). One of rms, layer."""
    over: NormOver | str | None
    """Features of each head, or of all heads. all: those of all heads of a token, as before they are split. One of
    head, all."""
    position: NormPosition | str | None
    """Before or after the rotation. Of values and head outputs, before only. One of before, after."""
    weight: Array | None
    """(head_dim,), or (heads, head_dim). The second has a weight for each head; of values it is value_dim; over all
    (heads · head_dim,). Default: ones."""
    bias: Array | None
    """Added last, in the shape of weight. Default: zeros."""
    eps: float | None
    """Added to the mean of squares. At least 0. With 0, zeros stay 0."""


class Rotary(TypedDict, total=False):
    """Pairs (x, y) of features become (x cos - y sin, x sin + y cos)."""

    base: float | None
    """The angle of pair n is position · base^(-2n/dim). Not beside cos and sin. Default: 10000."""
    cos: Array | None
    """(positions, dim/2), or (b, l, dim/2). The first is looked up by position, the second has one row per new token.
    Default: from base."""
    sin: Array | None
    """Like cos. Default: from base."""
    dim: int | None
    """How many features are rotated. They are the first ones, and even in number. Default: head_dim, or that of cos."""
    interleaved: bool | None
    """Pairs are adjacent features if true, else one of each half. Adjacent are (0, 1), (2, 3), …"""
    query_positions: Array | None
    """(q,) or (b, q). Positions of the queries. Default: past length + index."""
    key_positions: Array | None
    """Positions of the new keys. Past keys are rotated already. Default: past length + index."""


class RelativeKeys(TypedDict, total=False):
    """Adds (query i + query_bias) · key[j - i - query_offset - first] to scores, before scaling."""

    key: Array | None
    """([num_heads,] distances, head_dim), by ascending distance. Without num_heads it is for all heads. Distances
    before the first and after the last have the key of these. Default: none, which is an error."""
    first: int | None
    """The distance of the first key. Distances are j - i - query_offset. Default: minus half of the distances."""
    query_bias: Array | None
    """(num_heads, head_dim), added to the queries here only. It is v - u of Transformer-XL, whose u is added to the
    query, or to `projection.query.bias`. Default: none."""


class Window(TypedDict, total=False):
    """Query i attends to keys i + query_offset - left to i + query_offset + right, inclusive."""

    left: int | None
    """At least 0. Default: unbounded."""
    right: int | None
    """At least 0. Default: unbounded."""


class SegmentIds(TypedDict, total=False):
    """A query attends only to keys with the same segment id."""

    query: Array | None
    """(q,) for all rows, or (b, q). Default: none."""
    key: Array | None
    """(k,) for all rows, or (b, k), with the past. Default: none."""


class OwnTolerance(TypedDict, total=False):
    """The caller's own test: |actual - reference| <= atol + rtol · |reference|."""

    rtol: float
    """Relative tolerance."""
    atol: float
    """Absolute tolerance."""
    mismatches: float
    """The share of elements that may fail."""


def attend(
    query: Array | None = None,
    key: Array | None = None,
    value: Array | None = None,
    *,
    input: Array | None = None,
    context: Array | None = None,
    projection: Projection | Mapping[str, Any] | None = None,
    layout: Layout | str | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    past_key: Array | None = None,
    past_value: Array | None = None,
    query_norm: Norm | Mapping[str, Any] | None = None,
    key_norm: Norm | Mapping[str, Any] | None = None,
    value_norm: Norm | Mapping[str, Any] | None = None,
    output_norm: Norm | Mapping[str, Any] | None = None,
    clip_qkv: float | None = None,
    rotary: Rotary | Mapping[str, Any] | None = None,
    relative_keys: RelativeKeys | Mapping[str, Any] | None = None,
    scale: float | Array | None = None,
    softcap: float | None = None,
    bias: Array | None = None,
    alibi_slopes: Array | None = None,
    mask: Array | None = None,
    key_mask: Array | None = None,
    is_causal: bool | None = False,
    query_offset: int | Array | None = None,
    window: Window | Mapping[str, Any] | None = None,
    chunk_size: int | None = None,
    query_lengths: int | Array | None = None,
    key_lengths: int | Array | None = None,
    segment_ids: SegmentIds | Mapping[str, Any] | None = None,
    selected_keys: Array | None = None,
    sinks: Array | None = None,
    normalization: Normalization | str | None = "softmax",
    gate: Array | None = None,
    dtype: DType | str | None = None,
    backend: Backend | str | None = "auto",
    device: str | None = "auto",
    grad_output: Array | None = None,
    grad_logsumexp: Array | None = None,
    gradients: AllGradients | str | None = None,
    include: Sequence[Included | str] | None = None,
    select_heads: Array | None = None,
    select_queries: Array | None = None,
    average_heads: bool | None = False,
    top_k: int | None = None,
    query_tokens: Labels | None = None,
    key_tokens: Labels | None = None,
    encoding: Encoding | str | None = "list",
    **unknown: Never,
) -> AttentionResult:
    """The exact attention of query, key and value, in any variant, with the intermediate results of `include`.

        result = attend(query, key, value, is_causal=True, include=["attention_weights", "logsumexp"])
        result.output, result.attention_weights, result["logsumexp"], result.metadata.fully_masked_rows

    Arrays are ndarrays, nested lists, tensors of torch on any device, arrays of JAX, or whatever else NumPy can read.
    Their types count for the type of the result; lists have none. Nested fields are dicts, like `window={"left": 3}`.
    None stands for a field that is left out. docs/attention.md defines every field.

    Shapes, with b batch entries, h heads, q queries, k keys, d features of queries and keys, e features of values:

        layout  query         key           value         output        attention_weights
        ld      (q, d)        (k, d)        (k, e)        (q, e)        (q, k), rows sum to one
        dl      (d, q)        (d, k)        (e, k)        (e, q)        (k, q), columns sum to one
        bld     (b, q, d)     (b, k, d)     (b, k, e)     (b, q, e)     (b, q, k)
        bhld    (b, h, q, d)  (b, h, k, d)  (b, h, k, e)  (b, h, q, e)  (b, h, q, k)

    In layouts without h, num_heads above 1 packs the heads in d and e; attention_weights then have h after b.

    Unlike over HTTP, a hidden key or value may be inf or NaN: what cannot be seen cannot poison. There is no limit on
    memory but the machine's.

    Args:
        query: Queries, with the axes of `layout`. A vector (rank 1) is one token, in layouts ld and dl; output and
            score matrices then have no query axis. Default: none.
        key: Keys, with as many features per head as the queries. Their layout is that of the queries. Default: none.
        value: Values, with as many tokens as the key. Their layout is that of the queries. Default: none.
        input: Self-attention: used as query, key and value. With `context` it is used as query only. Default: none.
        context: Cross-attention, with `input`: used as key and value. Default: none.
        projection: Applied before and after attention. Not in layouts with h. Default: none.
        layout: Axes of query, key, value, input, context, output. b batch, h heads, l tokens, d features. Without h,
            the heads are packed in d. In dl and bdl tokens are columns, and score matrices are transposed: their
            columns sum to one. Default: ld, bld or bhld, by rank. One of ld, dl, bld, lbd, bdl, hld, bhld, blhd.
        num_heads: Query heads. Default: the h axis, the heads of a rank-3 map, or 1.
        num_kv_heads: Key/value heads, a divisor of num_heads. Query head n reads key/value head n // (num_heads //
            num_kv_heads). Default: the key's h axis, the heads of its map, or num_heads.
        past_key: Cached keys: [b,] h, l, d in every layout. They are prepended to the new keys and not rotated again; h
            is num_kv_heads; l may be 0. The key length includes them. Needs past_value. Default: none.
        past_value: Cached values, in the form of past_key. Needs past_key. Default: none.
        query_norm: Normalises the queries. It comes after their map. Default: none.
        key_norm: Normalises the new keys. It does not change those of the past. Default: none.
        value_norm: Normalises the new values. It does not change those of the past. Default: none.
        output_norm: Normalises the head outputs. It comes before gates and output map; over all heads it is that of
            [BitNet](https://arxiv.org/abs/2402.17764). A row without a visible key becomes the bias. Default: none.
        clip_qkv: Above 0: clips query, new keys and values to -clip_qkv … clip_qkv. As in OLMo and DBRX: after maps and
            norms, before rotary and norms that follow it. The past is not clipped again. Default: none.
        rotary: Rotates query and new keys by their positions. From [Su et al. 2021](https://arxiv.org/abs/2104.09864).
            Default: none.
        relative_keys: A key for each distance of query and key. From [Shaw et al.
            2018](https://arxiv.org/abs/1803.02155) and [Dai et al. 2019](https://arxiv.org/abs/1901.02860). Default:
            none.
        scale: Factor on the scores: one, or (num_heads,). 1 means unscaled; 0 and less are legal. Default:
            1/sqrt(head_dim).
        softcap: Above 0: scores become softcap · tanh(scaled / softcap). This comes before bias and mask. Default:
            none.
        bias: Added to the scores, with the axes of `mask`; null, minus infinity, hides a key. The scores are scaled,
            and capped if `softcap` says so. Only 0 and 1 are added like any other, with the warning
            bias_looks_like_mask. Default: none.
        alibi_slopes: (num_heads,): adds -slope · |i + query_offset - j| to scores. i is the query, j the key. From
            [Press et al. 2021](https://arxiv.org/abs/2108.12409). Default: none.
        mask: Booleans, broadcast to the scores; true: the query attends to the key. The axes are those of score
            matrices as returned: rank 1 is k, rank 4 starts with b, h, rank 3 is per head if there are b and h. A key
            is visible only if every mask allows it. Default: none.
        key_mask: Booleans; true: the key is visible. (k,) for all rows, or (b, k). Default: none.
        is_causal: Query i attends to key j only if j <= i + query_offset.
        query_offset: Position of the first query among the keys: one, or (b,). is_causal and all other fields whose
            formula has it count from it. 0 aligns the first query with the first key, k - q the last with the last. It
            is required if there is no past and q differs from k. Default: the length of the past.
        window: Hides keys far from the query. Default: none.
        chunk_size: At least 1: a query attends only to keys of its chunk. The chunk of query i is that of the keys j
            with (i + query_offset) // chunk_size = j // chunk_size, as in Llama 4. Default: none.
        query_lengths: Queries that are not padding: one number, or (b,). Weights and outputs of the padding are 0.
            Default: none, all.
        key_lengths: Keys, with the past, that are not padding: one number, or (b,). Does not change the offset.
            Default: none, all.
        segment_ids: Separates sequences that are packed into one. Default: none.
        selected_keys: Indices of the only keys that a query may see: ..., q, n. The past is counted. The axes are the
            same in every layout, and broadcast as those of `mask`. -1 is no key, an index twice counts once. Other
            masks hide keys as well. As in DeepSeek V3.2. Default: none, all keys.
        sinks: A logit beside those of the keys: (num_heads,), or [b,] h, q. It is one per head, or per query of each
            head in every layout. It is part of the softmax and dropped after it, so that weights sum to less than 1.
            Default: none.
        normalization: softmax, or sum or sigmoid of the visible scores. sum divides them by their sum, so that weights
            may be negative; sigmoid is 1 / (1 + exp(-x)) of each, from [Ramapuram et al.
            2024](https://arxiv.org/abs/2409.04431). sum and sigmoid exclude logsumexp, entropy, sinks and
            weights_without_sinks. One of softmax, sum, sigmoid.
        gate: Factors of the head outputs: [b,] h, q, value_dim or 1. They are activated already, and come before the
            output map; the axes are the same in every layout. Not beside projection.gate. A row without a visible key
            stays 0. Default: none.
        dtype: Type of arrays and results. Arrays are cast to it; float16 and bfloat16 are computed in float32. The
            default looks at query, key, value, input, context and past. Default: the widest of typed arrays, or
            float64. One of float64, float32, float16, bfloat16.
        backend: auto is that of the service, or torch on CUDA. `ATTENTION_BACKEND` sets that of the service. A service
            computes with ray only if its settings say so. One of auto, numpy, torch, ray.
        device: auto, cpu, cuda or cuda:N. cuda needs the backend torch; with torch, auto is a GPU if any.
        grad_output: Upstream gradient of output. It is that of a loss, in the shape of output; gradients are computed
            from it. Default: zeros.
        grad_logsumexp: Upstream gradient of logsumexp. It is that of the natural logsumexp of all heads and queries:
            [b,] [h,] q. Default: zeros.
        gradients: all: return all gradients. They are those of all fields of the request that have one, as if `include`
            named them; without `include`, no weights are returned. Default: those in include. One of all.
        include: Results beside output and metadata. The response describes each name. With `gradients` the default is
            nothing. Default: attention_weights.
        select_heads: Return results of these heads only. Scores, weights and rows are such results. Default: none, all.
        select_queries: Return results of these queries only. Scores, weights and rows are such results; received is of
            all queries. Default: none, all.
        average_heads: Average weights over the (selected) heads. They are attention_weights, weights_without_sinks and
            received; their h axis is dropped.
        top_k: Return the largest weights of each row, as top_weights. They are top_k at most, and replace
            attention_weights. Default: none, all weights.
        query_tokens: Labels of the queries: (q,) or (b, q). They are returned unchanged. Default: none.
        key_tokens: Labels of the keys: (k,) or (b, k). They are returned unchanged. Default: none.
        encoding: Arrays of a JSON response. They are nested lists, or objects with base64 data. One of list, base64. It
            has no effect here.

    Any other name is an error, which translates the names of other libraries, like attn_mask.

    Returns: the results by name, and the metadata; see its class.

    Errors: attention_service.errors.InvalidRequest, with a pointer to each field at fault.
    """
    __tracebackhide__ = True  # pytest then shows the call, not all these parameters
    try:
        return calls.attend(locals())
    except InvalidRequest as error:  # a mistake of the caller, who has no use for the lines that found it
        raise error.with_traceback(None) from None


def compare(
    actual: Any = None,
    query: Array | None = None,
    key: Array | None = None,
    value: Array | None = None,
    *,
    input: Array | None = None,
    context: Array | None = None,
    projection: Projection | Mapping[str, Any] | None = None,
    layout: Layout | str | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    past_key: Array | None = None,
    past_value: Array | None = None,
    query_norm: Norm | Mapping[str, Any] | None = None,
    key_norm: Norm | Mapping[str, Any] | None = None,
    value_norm: Norm | Mapping[str, Any] | None = None,
    output_norm: Norm | Mapping[str, Any] | None = None,
    clip_qkv: float | None = None,
    rotary: Rotary | Mapping[str, Any] | None = None,
    relative_keys: RelativeKeys | Mapping[str, Any] | None = None,
    scale: float | Array | None = None,
    softcap: float | None = None,
    bias: Array | None = None,
    alibi_slopes: Array | None = None,
    mask: Array | None = None,
    key_mask: Array | None = None,
    is_causal: bool | None = False,
    query_offset: int | Array | None = None,
    window: Window | Mapping[str, Any] | None = None,
    chunk_size: int | None = None,
    query_lengths: int | Array | None = None,
    key_lengths: int | Array | None = None,
    segment_ids: SegmentIds | Mapping[str, Any] | None = None,
    selected_keys: Array | None = None,
    sinks: Array | None = None,
    normalization: Normalization | str | None = "softmax",
    gate: Array | None = None,
    dtype: DType | str | None = None,
    backend: Backend | str | None = "auto",
    device: str | None = "auto",
    grad_output: Array | None = None,
    grad_logsumexp: Array | None = None,
    gradients: AllGradients | str | None = None,
    include: Sequence[Included | str] | None = None,
    select_heads: Array | None = None,
    select_queries: Array | None = None,
    average_heads: bool | None = False,
    top_k: int | None = None,
    query_tokens: Labels | None = None,
    key_tokens: Labels | None = None,
    encoding: Encoding | str | None = "list",
    tolerance: OwnTolerance | Mapping[str, Any] | None = None,
    legal: Sequence[Liberty | str] | None = None,
    reference: bool | None = False,
    time_limit: float | None = None,
    logsumexp_base: LogsumexpBase | str | None = "e",
    against: Any = None,
    **unknown: Never,
) -> CompareReport:
    """The report on what an attention kernel returned: is it right, and if not, which mistake was made?

        report = compare(my_kernel(query, key, value), query, key, value, is_causal=True)
        report.verdict.status, report.hypotheses[0].name

    All other arguments are those of `attend`; docs/compare-report.md describes the report.

    Args:
        actual: The output; a tuple of output and logsumexp; a dict of arrays by their names in a response (output,
            logsumexp, attention_weights, …), which the result of `attend` is, too; or None to ask which mistakes the
            request could show.
        tolerance: The caller's own test, to be told what it accepts. Default: none.
        legal: What a right kernel may do beside rounding inputs and output. exact is none of the others, which only
            count in float16 and bfloat16, but folded_scale. Default: all.
        reference: Return what is right, too: each array that was sent, or the output if none was.
        time_limit: Seconds after which the search for mistakes ends. The verdict is given however long it takes; names,
            power and the next input as far as they were found. Default: no limit.
        logsumexp_base: The base of the logarithm in `actual.logsumexp`. One of e, 2.
        against: What another kernel returned for the same request, to be judged beside the first. Default: nothing.

    Any other name is an error, which translates the names of other libraries, like attn_mask.

    Errors: attention_service.errors.InvalidRequest, with a pointer to each field at fault.
    """
    __tracebackhide__ = True  # pytest then shows the call, not all these parameters
    try:
        return calls.compare(locals())
    except InvalidRequest as error:  # a mistake of the caller, who has no use for the lines that found it
        raise error.with_traceback(None) from None


def assert_attention(
    actual: Any,
    query: Array | None = None,
    key: Array | None = None,
    value: Array | None = None,
    *,
    input: Array | None = None,
    context: Array | None = None,
    projection: Projection | Mapping[str, Any] | None = None,
    layout: Layout | str | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    past_key: Array | None = None,
    past_value: Array | None = None,
    query_norm: Norm | Mapping[str, Any] | None = None,
    key_norm: Norm | Mapping[str, Any] | None = None,
    value_norm: Norm | Mapping[str, Any] | None = None,
    output_norm: Norm | Mapping[str, Any] | None = None,
    clip_qkv: float | None = None,
    rotary: Rotary | Mapping[str, Any] | None = None,
    relative_keys: RelativeKeys | Mapping[str, Any] | None = None,
    scale: float | Array | None = None,
    softcap: float | None = None,
    bias: Array | None = None,
    alibi_slopes: Array | None = None,
    mask: Array | None = None,
    key_mask: Array | None = None,
    is_causal: bool | None = False,
    query_offset: int | Array | None = None,
    window: Window | Mapping[str, Any] | None = None,
    chunk_size: int | None = None,
    query_lengths: int | Array | None = None,
    key_lengths: int | Array | None = None,
    segment_ids: SegmentIds | Mapping[str, Any] | None = None,
    selected_keys: Array | None = None,
    sinks: Array | None = None,
    normalization: Normalization | str | None = "softmax",
    gate: Array | None = None,
    dtype: DType | str | None = None,
    backend: Backend | str | None = "auto",
    device: str | None = "auto",
    grad_output: Array | None = None,
    grad_logsumexp: Array | None = None,
    gradients: AllGradients | str | None = None,
    include: Sequence[Included | str] | None = None,
    select_heads: Array | None = None,
    select_queries: Array | None = None,
    average_heads: bool | None = False,
    top_k: int | None = None,
    query_tokens: Labels | None = None,
    key_tokens: Labels | None = None,
    encoding: Encoding | str | None = "list",
    tolerance: OwnTolerance | Mapping[str, Any] | None = None,
    legal: Sequence[Liberty | str] | None = None,
    reference: bool | None = False,
    time_limit: float | None = None,
    logsumexp_base: LogsumexpBase | str | None = "e",
    against: Any = None,
    must_show: Literal["options"] | None = "options",
    rows: int | None = None,
    **unknown: Never,
) -> CompareReport:
    """Raise AssertionError unless an output is right, or at least not known to be wrong; else return the report.

        assert_attention(my_kernel(query, key, value), query, key, value, is_causal=True)

    The error says what is wrong in a few lines, its `report` all. All other arguments are those of `attend`.

    Args:
        actual: The output; a tuple of output and logsumexp; a dict of arrays by their names in a response (output,
            logsumexp, attention_weights, …), which the result of `attend` is, too.
        tolerance: The caller's own test, to be told what it accepts. Default: none.
        legal: What a right kernel may do beside rounding inputs and output. exact is none of the others, which only
            count in float16 and bfloat16, but folded_scale. Default: all.
        reference: Return what is right, too: each array that was sent, or the output if none was.
        time_limit: Seconds after which the search for mistakes ends. The verdict is given however long it takes; names,
            power and the next input as far as they were found. Default: no limit.
        logsumexp_base: The base of the logarithm in `actual.logsumexp`. One of e, 2.
        against: What another kernel returned for the same request, to be judged beside the first. Default: nothing.
        must_show: What the inputs must be able to show. options: raise WeakInputs, an AssertionError, where a kernel
            could ignore an option of the request unseen. None: pass, whatever they can show.
        rows: Judge only so many rows of each head, where mistakes sit: ends of sequences, tiles, windows and segments.
            All is compared if one of them is wrong, or for reference, tolerance or against. Which mistakes the inputs
            can show is not looked at. Default: all rows.

    Any other name is an error, which translates the names of other libraries, like attn_mask.

    Errors: attention_service.errors.InvalidRequest, with a pointer to each field at fault.
    """
    __tracebackhide__ = True  # pytest then shows the call, not all these parameters
    try:
        return calls.assert_attention(locals())
    except InvalidRequest as error:  # a mistake of the caller, who has no use for the lines that found it
        raise error.with_traceback(None) from None
