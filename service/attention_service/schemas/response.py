"""The response, as the API document describes it. Responses are not built from these models: their arrays go directly
to the codec. A test validates real responses against this schema."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from attention_service.attention.result import Result
from attention_service.attention.spec import AttentionSpec
from attention_service.schemas.arrays import Labels, NumberOrTensor, Tensor
from attention_service.schemas.closed import shortened
from attention_service.version import __version__


class Answer(BaseModel):
    """A model without other fields, in the API document too."""

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid", json_schema_extra=shortened)


class Warning(Answer):
    """A doubt about what a request means."""

    code: str = Field(description="zero_sum or bias_looks_like_mask.")
    message: str = Field(description="In words.")


class Metadata(Answer):
    """How it was computed."""

    backend: str = Field(description="Backend, for example numpy.")
    device: str = Field(description="Device, for example cpu.")
    dtype: str = Field(description="Type of the output. Of the weights, too.")
    kernel: str = Field(description="Code path. docs/attention.md lists all.")
    num_heads: int = Field(description="Query heads, h.")
    num_kv_heads: int = Field(description="Key/value heads.")
    batch_size: int = Field(description="b, or 1.")
    query_length: int = Field(description="q: queries.")
    key_length: int = Field(description="k: keys, with the past.")
    head_dim: int = Field(description="Features of a query head. Of a key head, too.")
    value_dim: int = Field(description="Features of a value head.")
    scale: float | list[float] = Field(
        description="The factor on the scores. One for each head if the request has several."
    )
    fully_masked_rows: int = Field(
        description="Rows without a visible key. They are some of b·h·q. Their weights and outputs are 0."
    )
    warnings: list[Warning] = Field(description="Usually empty.")
    hidden_by: dict[str, int] | None = Field(
        None,
        description="The bits of `hidden_by` by field. These are the fields that hide keys. Absent if `include` does "
        "not name hidden_by.",
    )
    request_id: str = Field(description="The X-Request-ID.")
    version: str = Field(description="Of the service.")


class TopWeights(Answer):
    """The largest weights of each row, descending."""

    indices: Tensor = Field(description="Indices of the keys: [b,] [h,] q, top_k. int64.")
    values: Tensor = Field(description="Weights of these keys.")


class AttentionResponse(Answer):
    """The output, metadata, and the results that `include` names.

    Score matrices (weights, scores, hidden_by) are [b,] [h,] q, k; grad_x is the gradient of x, in its shape.
    """

    output: Tensor = Field(description="Weights times values. In the layout of the request.")
    metadata: Metadata
    attention_weights: Tensor | None = Field(None, description="Scores normalised over k. A score matrix.")
    weights_without_sinks: Tensor | None = Field(None, description="The softmax over the keys alone. A score matrix.")
    scores: Tensor | None = Field(None, description="Query times key. Before anything else. A score matrix.")
    top_weights: TopWeights | None = Field(
        None,
        description="In place of attention_weights: [b,] [h,] q, top_k. Of a request with top_k, the same in every "
        "layout; of equal weights those of lower index.",
    )
    scaled_scores: Tensor | None = Field(None, description="scores times scale. A score matrix.")
    capped_scores: Tensor | None = Field(None, description="scaled_scores after softcap. A score matrix.")
    masked_scores: Tensor | None = Field(
        None, description="capped_scores with bias and ALiBi, null where a key is hidden. A score matrix."
    )
    hidden_by: Tensor | None = Field(
        None,
        description="The bits of the fields that hide a key, int32. Their sum, 0 for none; "
        "metadata.hidden_by names them. A score matrix.",
    )
    logsumexp: Tensor | None = Field(
        None,
        description="[b,] [h,] q: ln of the sum of exp(masked_scores), with the sink; null without any. "
        "It is null where there is neither a visible key nor a sink.",
    )
    entropy: Tensor | None = Field(None, description="[b,] [h,] q: -sum of w ln w over a row.")
    received: Tensor | None = Field(None, description="[b,] [h,] k: the sum of the weights of each key.")
    query: Tensor | None = Field(None, description="[b,] [h,] q, d: queries after map, norm and rotation.")
    key: Tensor | None = Field(
        None, description="[b,] [h,] l, d: new keys after map, norm and rotation. They are without the past."
    )
    value: Tensor | None = Field(
        None, description="[b,] [h,] l, d: new values after map and norm. They are without the past."
    )
    head_outputs: Tensor | None = Field(
        None, description="[b,] [h,] q, d: the output of each head. Before gates, and before the heads are joined."
    )
    present_key: Tensor | None = Field(
        None, description="[b,] h, k, d: past and new keys. Send them as the next past_key."
    )
    present_value: Tensor | None = Field(
        None, description="[b,] h, k, d: past and new values. Send them as the next past_value."
    )
    grad_masked_scores: Tensor | None = Field(
        None, description="Gradient of masked_scores. 0 where a key is hidden. A score matrix."
    )
    grad_scaled_scores: Tensor | None = Field(None, description="Gradient of scaled_scores. A score matrix.")
    grad_scores: Tensor | None = Field(
        None, description="Gradient of scores. It is scale times the former. A score matrix."
    )
    grad_query: Tensor | None = Field(None, description="Gradient of query.")
    grad_key: Tensor | None = Field(None, description="Gradient of key. Of heads that share a key, it is the sum.")
    grad_value: Tensor | None = Field(None, description="Gradient of value.")
    grad_input: Tensor | None = Field(
        None, description="Gradient of input. It is that of all that the input is used for."
    )
    grad_context: Tensor | None = Field(None, description="Gradient of context. It is that of key and value.")
    grad_projection: dict[str, dict[str, Tensor]] | None = Field(
        None, description="Gradient of projection. Of the arrays of each map."
    )
    grad_past_key: Tensor | None = Field(None, description="Gradient of past_key.")
    grad_past_value: Tensor | None = Field(None, description="Gradient of past_value.")
    grad_query_norm: dict[str, Tensor] | None = Field(
        None, description="Gradient of query_norm. Of its weight and bias."
    )
    grad_key_norm: dict[str, Tensor] | None = Field(None, description="Gradient of key_norm. Of its weight and bias.")
    grad_value_norm: dict[str, Tensor] | None = Field(
        None, description="Gradient of value_norm. Of its weight and bias."
    )
    grad_output_norm: dict[str, Tensor] | None = Field(
        None, description="Gradient of output_norm. Of its weight and bias."
    )
    grad_relative_keys: dict[str, Tensor] | None = Field(
        None, description="Gradient of relative_keys. Of its key and query_bias."
    )
    grad_scale: NumberOrTensor | None = Field(None, description="Gradient of scale. One number, or one for each head.")
    grad_bias: Tensor | None = Field(
        None, description="Gradient of bias. It is summed over the axes that the bias is broadcast along."
    )
    grad_alibi_slopes: Tensor | None = Field(None, description="Gradient of alibi_slopes.")
    grad_sinks: Tensor | None = Field(None, description="Gradient of sinks.")
    grad_gate: Tensor | None = Field(None, description="Gradient of gate.")
    query_tokens: Labels | None = Field(None, description="Those of the request.")
    key_tokens: Labels | None = Field(None, description="Those of the request.")


def answer(spec: AttentionSpec, result: Result, request_id: str) -> dict[str, Any]:
    """The fields of an AttentionResponse, arrays as ndarrays, absent fields left out."""
    fields: dict[str, Any] = dict(result.arrays)
    for name in ("query_tokens", "key_tokens"):
        if getattr(spec, name) is not None:
            fields[name] = getattr(spec, name)
    fields["metadata"] = {**result.metadata.present, "request_id": request_id, "version": __version__}
    return fields
