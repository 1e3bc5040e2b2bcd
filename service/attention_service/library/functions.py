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
    """A linear map: exactly one of `weight` and `kernel`, and optionally `bias`."""

    weight: Array | None
    """(out, in): y = x Wᵀ, as in torch.nn.Linear and in column notation. (heads, out, in): one matrix per head.
    Default: none."""
    kernel: Array | None
    """(in, out): y = x W, as in Keras and Flax Dense. (heads, in, out): one matrix per head. Default: none."""
    bias: Array | None
    """Added to the product. The shapes (out,), (out, 1), (heads, out/heads) and (heads, out/heads, 1) are equivalent.
    Default: none."""


class GateMap(LinearMap, total=False):
    """A linear map of the query's source to gates: num_heads x value_dim features, or num_heads, one for each head."""

    activation: Activation | str | None
    """What is applied to the mapped numbers. One of sigmoid, softplus, silu, none."""


class Projection(TypedDict, total=False):
    """Linear maps of the source before attention, and of the output after it. An absent map is the identity."""

    query: LinearMap | None
    """Maps the query tokens to num_heads x head_dim features. Default: the identity."""
    key: LinearMap | None
    """Maps the key tokens to num_kv_heads x head_dim features. Default: the identity."""
    value: LinearMap | None
    """Maps the value tokens to num_kv_heads x value_dim features. Default: the identity."""
    output: LinearMap | None
    """Maps the joined heads, num_heads x value_dim features, to the output. Rank 2 only. Default: the identity."""
    gate: GateMap | None
    """Maps the source of the query to gates, by which head outputs are multiplied before the output map, as in
    Qwen3-Next. Default: no gates."""


class Norm(TypedDict, total=False):
    """Normalisation of features: x / sqrt(mean(x²) + eps) · weight + bias, for layer after the mean is subtracted."""

    kind: NormKind | str | None
    """rms ([Zhang & Sennrich 2019](https://arxiv.org/abs/1910.07467)), or layer: the mean is subtracted first ([Ba et
    al. 2016](https://arxiv.org/abs/1607.06450)). One of rms, layer."""
    over: NormOver | str | None
    """head: over the features of each head; all: over those of all heads of a token, as before they are split. One of
    head, all."""
    position: NormPosition | str | None
    """before or after the rotation; of values and head outputs, before only. One of before, after."""
    weight: Array | None
    """(head_dim,), or (heads, head_dim) for each head its own, of values with value_dim; over all (heads · head_dim,).
    Default: ones."""
    bias: Array | None
    """Added last, in the shape of weight. Default: zeros."""
    eps: float | None
    """Added to the mean of squares, at least 0. With 0, zeros stay 0."""


class Rotary(TypedDict, total=False):
    """Rotary position embedding: pairs (x, y) of features become (x cos - y sin, x sin + y cos)."""

    base: float | None
    """The angle of pair n is position · base^(-2n/dim). Not beside cos and sin. Default: 10000."""
    cos: Array | None
    """(positions, dim/2), looked up by position; or (b, l, dim/2), one row per new token. Default: from base."""
    sin: Array | None
    """Like cos. Default: from base."""
    dim: int | None
    """How many of the first features are rotated; even. Default: head_dim, or as cos has them."""
    interleaved: bool | None
    """Pairs are adjacent features (0, 1), (2, 3), … if true, else one of each half of the features."""
    query_positions: Array | None
    """Positions of the queries, (q,) or (b, q). Default: length of the past + index."""
    key_positions: Array | None
    """Positions of the new keys; past keys are rotated already. Default: length of the past + index."""


class RelativeKeys(TypedDict, total=False):
    """Relative positions: adds (query i + query_bias) · key[j - i - query_offset - first] to scores, before scaling."""

    key: Array | None
    """(distances, head_dim) for all heads, or (num_heads, distances, head_dim), by ascending distance. Distances before
    the first and after the last have the key of these. Default: none, which is an error."""
    first: int | None
    """The distance j - i - query_offset of the first key. Default: minus half of the number of distances."""
    query_bias: Array | None
    """(num_heads, head_dim), added to the queries for these products only: v - u of Transformer-XL, whose u is added to
    the query, or to `projection.query.bias`. Default: none."""


class Window(TypedDict, total=False):
    """Query i attends to keys from i + query_offset - left to i + query_offset + right, both inclusive."""

    left: int | None
    """At least 0. Default: unbounded."""
    right: int | None
    """At least 0. Default: unbounded."""


class SegmentIds(TypedDict, total=False):
    """A query attends only to keys with the same segment id."""

    query: Array | None
    """(q,) for all rows, or (b, q). Default: none."""
    key: Array | None
    """(k,) for all rows, or (b, k), including the past. Default: none."""


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
        key: Keys, in the same layout, with as many features per head as the queries. Default: none.
        value: Values, in the same layout, with as many tokens as the key. Default: none.
        input: Self-attention: used as query, key and value. With `context`: used as query only. Default: none.
        context: Cross-attention, with `input`: used as key and value. Default: none.
        projection: Not in layouts with h. Default: none.
        layout: The axes of query, key, value, input, context and output: b batch, h heads, l tokens, d features.
            Without h, the heads are packed in d. In dl and bdl tokens are columns, and score matrices are transposed:
            their columns sum to one. Default: ld, bld or bhld, by rank. One of ld, dl, bld, lbd, bdl, hld, bhld, blhd.
        num_heads: Query heads. Default: the h axis, or the heads of a rank-3 query map, else 1.
        num_kv_heads: Key/value heads, a divisor of num_heads: query head n reads key/value head n // (num_heads //
            num_kv_heads). Default: the key's h axis or the heads of its rank-3 map, else num_heads.
        past_key: Cached keys, prepended to the new keys and not rotated again: [b,] h, l, d in every layout; h is
            num_kv_heads; l may be 0. The key length includes them. Needs past_value. Default: none.
        past_value: Cached values, in the form of past_key. Needs past_key. Default: none.
        query_norm: Normalises the queries, after their map. Default: none.
        key_norm: Normalises the new keys, not those of the past. Default: none.
        value_norm: Normalises the new values, not those of the past. Default: none.
        output_norm: Normalises the head outputs, before gates and output map; over all heads as in
            [BitNet](https://arxiv.org/abs/2402.17764). A row without a visible key becomes the bias. Default: none.
        clip_qkv: Above 0: query, new keys and new values are clipped to -clip_qkv … clip_qkv, as in OLMo and DBRX:
            after maps and norms, before rotary and norms that follow it. The past is not clipped again. Default: none.
        rotary: Rotates query and new keys ([Su et al. 2021](https://arxiv.org/abs/2104.09864)). Default: none.
        relative_keys: A key for each distance of query and key ([Shaw et al. 2018](https://arxiv.org/abs/1803.02155),
            [Dai et al. 2019](https://arxiv.org/abs/1901.02860)). Default: none.
        scale: Factor on the scores: one number, or (num_heads,). 1 means unscaled; 0 and less are legal. Default:
            1/sqrt(head_dim).
        softcap: Above 0: scores become softcap · tanh(scaled / softcap), before bias and mask. Default: none.
        bias: Numbers added to the scaled (and capped) scores, with the axes of `mask`. null is minus infinity, which
            hides a key. Only 0 and 1 are added like any other, with the warning bias_looks_like_mask. Default: none.
        alibi_slopes: (num_heads,): adds -slope · |i + query_offset - j| to the score of query i and key j ([Press et
            al. 2021](https://arxiv.org/abs/2108.12409)). Default: none.
        mask: Booleans; true: the query attends to the key. Broadcast to the score matrices as returned: rank 1 is k,
            rank 4 starts with b, h, rank 3 is per head if there are b and h. A key is visible only if every mask allows
            it. Default: none.
        key_mask: Booleans; true: the key is visible. (k,) for all rows, or (b, k). Default: none.
        is_causal: Query i attends to key j only if j <= i + query_offset.
        query_offset: Position of the first query among the keys, for is_causal and all other fields whose formula has
            it: one integer, or (b,). 0 aligns the first query with the first key, k - q the last with the last.
            Default: the length of the past. Required if there is no past and q differs from k.
        window: Hides keys that are far from the query. Default: no keys.
        chunk_size: At least 1: query i attends only to keys j with (i + query_offset) // chunk_size = j // chunk_size,
            as in Llama 4. Default: no chunks.
        query_lengths: How many queries are not padding: one integer, or (b,). Weights and outputs of the padding are 0.
            Default: all.
        key_lengths: How many keys, including the past, are not padding: one integer, or (b,). Does not change the
            offset. Default: all.
        segment_ids: Separates sequences that are packed into one. Default: none.
        selected_keys: Indices of the only keys that a query may see, the past counted: ..., q, n in every layout,
            broadcast as `mask` is. -1 is no key, an index twice counts once. Other masks hide keys as well. As in
            DeepSeek V3.2. Default: all keys.
        sinks: (num_heads,), or [b,] h, q in every layout: one logit per head, or per query of each head, that is part
            of the softmax and dropped after it, so that weights sum to less than 1. Default: none.
        normalization: softmax; sum: the visible scores divided by their sum, so that weights may be negative; or
            sigmoid: 1 / (1 + exp(-x)) of each visible score ([Ramapuram et al.
            2024](https://arxiv.org/abs/2409.04431)). sum and sigmoid exclude logsumexp, entropy, sinks and
            weights_without_sinks. One of softmax, sum, sigmoid.
        gate: Gates, activated already, which the head outputs are multiplied by before the output map: [b,] h, q,
            value_dim or [b,] h, q, 1, in every layout. Not beside projection.gate. A row without a visible key stays 0.
            Default: none.
        dtype: Type that arrays are cast to and results are returned in. float16 and bfloat16 are computed in float32.
            Default: the widest type among the typed arrays of query, key, value, input, context and past; float64 for
            lists. One of float64, float32, float16, bfloat16.
        backend: auto is the backend of the service (ATTENTION_BACKEND), or torch if the device is CUDA. A service
            computes with ray only if its settings say so. One of auto, numpy, torch, ray.
        device: auto, cpu, cuda or cuda:N. cuda needs the backend torch; with torch, auto is a GPU if any.
        grad_output: The gradient of a loss with respect to output, in its shape: what gradients are computed from.
            Default: zeros.
        grad_logsumexp: The gradient of the loss with respect to the natural logsumexp: [b,] [h,] q, of all heads and
            queries. Default: zeros.
        gradients: all: return the gradients of all fields of the request that have one, as if `include` named them;
            without `include`, no weights. Default: those in include. One of all.
        include: What to return in addition to output and metadata. The response describes each name. Default:
            attention_weights; with `gradients`, nothing else.
        select_heads: Return results of scores, weights and rows of these heads only. Default: all.
        select_queries: Return results of scores, weights and rows of these queries only; received is of all. Default:
            all.
        average_heads: Average attention_weights, weights_without_sinks and received over the (selected) heads; their h
            axis is dropped.
        top_k: Return only the largest weights of each row, at most k of them: top_weights replaces attention_weights.
            Default: all.
        query_tokens: Labels of the query tokens, returned unchanged: (q,) or (b, q). Default: none.
        key_tokens: Labels of the key tokens, returned unchanged: (k,) or (b, k). Default: none.
        encoding: Arrays of a JSON response: nested lists, or objects with base64 data. One of list, base64. It has no
            effect here.

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
        legal: What a right kernel may do beside rounding inputs and output: exact is none of the others, which only
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
        legal: What a right kernel may do beside rounding inputs and output: exact is none of the others, which only
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
