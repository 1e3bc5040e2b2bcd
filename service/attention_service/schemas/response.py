"""The response, as the API document describes it. Responses are not built from these models: their arrays go directly
to the codec. A test validates real responses against this schema."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from attention_service.attention.result import Result
from attention_service.attention.spec import AttentionSpec
from attention_service.schemas.arrays import Labels, NumberOrTensor, Tensor
from attention_service.version import __version__


class Answer(BaseModel):
    """A model without other fields, in the API document too."""

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")


class Warning(Answer):
    """A warning: the request was computed as sent, but may not mean what the client expects."""

    code: str = Field(description="Stable code: zero_sum or bias_looks_like_mask.")
    message: str = Field(description="The warning in words.")


class Metadata(Answer):
    """How the request was computed."""

    backend: str = Field(description="Backend that computed the request, for example numpy.")
    device: str = Field(description="Device that computed the request, for example cpu.")
    dtype: str = Field(description="Type of output and weights.")
    kernel: str = Field(description="Code path that computed the request (docs/attention.md lists them).")
    num_heads: int = Field(description="Query heads, h.")
    num_kv_heads: int = Field(description="Key/value heads.")
    batch_size: int = Field(description="b; 1 if the layout has no batch axis.")
    query_length: int = Field(description="q: number of queries.")
    key_length: int = Field(description="k: number of keys, including the past.")
    head_dim: int = Field(description="Features of one query or key head.")
    value_dim: int = Field(description="Features of one value head.")
    scale: float | list[float] = Field(
        description="The factor that the scores were multiplied by; one for each head if the request has several."
    )
    fully_masked_rows: int = Field(
        description="Number of rows (of b·h·q) without a visible key; their weights and outputs are 0."
    )
    warnings: list[Warning] = Field(description="Warnings; usually empty.")
    hidden_by: dict[str, int] | None = Field(
        None,
        description="The bits of `hidden_by` by the fields of the request that hide keys. Absent if `include` does not "
        "name hidden_by.",
    )
    request_id: str = Field(description="Also in the X-Request-ID header and in the log.")
    version: str = Field(description="Version of the service.")


class TopWeights(Answer):
    """The largest weights of each row, in descending order, equal ones by lower index."""

    indices: Tensor = Field(description="Indices of the keys, int64: [b,] [h,] q, top_k.")
    values: Tensor = Field(description="Weights of these keys, with the same axes.")


class AttentionResponse(Answer):
    """The output, metadata, and the results that `include` names.

    Score matrices have the axes [b,] [h,] q, k: b if the layout has it; h if the layout has it or there are several
    heads. In layouts dl and bdl, q and k are swapped. If the query is a vector, there is no q.
    """

    output: Tensor = Field(description="Attention weights times values, in the layout of the request.")
    metadata: Metadata
    attention_weights: Tensor | None = Field(None, description="Scores normalised over k. A score matrix.")
    weights_without_sinks: Tensor | None = Field(
        None, description="The weights that the softmax over the keys alone gives. A score matrix."
    )
    scores: Tensor | None = Field(None, description="Query times key, before anything else. A score matrix.")
    top_weights: TopWeights | None = Field(
        None,
        description="Replaces attention_weights if the request has top_k: [b,] [h,] q, top_k, in every layout.",
    )
    scaled_scores: Tensor | None = Field(None, description="scores times scale. A score matrix.")
    capped_scores: Tensor | None = Field(None, description="scaled_scores after softcap. A score matrix.")
    masked_scores: Tensor | None = Field(
        None, description="capped_scores with bias and ALiBi added, null where a key is hidden. A score matrix."
    )
    hidden_by: Tensor | None = Field(
        None,
        description="Why a key is hidden, int32: the sum of the bits of all fields that hide it from a query "
        "(metadata.hidden_by names them), or 0. A score matrix.",
    )
    logsumexp: Tensor | None = Field(
        None,
        description="[b,] [h,] q: natural logarithm of the sum of exp(masked_scores), with the sink; null if there "
        "is neither a visible key nor a sink.",
    )
    entropy: Tensor | None = Field(None, description="[b,] [h,] q: -sum of w ln w over the weights of a row, in nats.")
    received: Tensor | None = Field(
        None, description="[b,] [h,] k: attention weights of each key, summed over all queries."
    )
    query: Tensor | None = Field(
        None, description="[b,] [h,] q, d: queries after projection, normalisation and rotation."
    )
    key: Tensor | None = Field(
        None, description="[b,] [h,] l, d: new keys (without the past) after projection, normalisation and rotation."
    )
    value: Tensor | None = Field(
        None, description="[b,] [h,] l, d: new values (without the past) after projection and normalisation."
    )
    head_outputs: Tensor | None = Field(
        None, description="[b,] [h,] q, d: the output of each head, before gates and before the heads are joined."
    )
    present_key: Tensor | None = Field(
        None, description="[b,] h, k, d: past and new keys; send them as the next past_key."
    )
    present_value: Tensor | None = Field(
        None, description="[b,] h, k, d: past and new values; send them as the next past_value."
    )
    grad_masked_scores: Tensor | None = Field(
        None, description="Gradient of masked_scores, 0 where a key is hidden. A score matrix."
    )
    grad_scaled_scores: Tensor | None = Field(None, description="Gradient of scaled_scores. A score matrix.")
    grad_scores: Tensor | None = Field(None, description="Gradient of scores: scale times the former. A score matrix.")
    grad_query: Tensor | None = Field(None, description="Gradient of query, in its shape.")
    grad_key: Tensor | None = Field(
        None, description="Gradient of key, in its shape; of heads that share a key, the sum."
    )
    grad_value: Tensor | None = Field(None, description="Gradient of value, in its shape.")
    grad_input: Tensor | None = Field(None, description="Gradient of input, as all that it is used for, in its shape.")
    grad_context: Tensor | None = Field(None, description="Gradient of context, as key and value, in its shape.")
    grad_projection: dict[str, dict[str, Tensor]] | None = Field(
        None, description="Gradients of projection: of the arrays of each map, in their shapes."
    )
    grad_past_key: Tensor | None = Field(None, description="Gradient of past_key, in its shape.")
    grad_past_value: Tensor | None = Field(None, description="Gradient of past_value, in its shape.")
    grad_query_norm: dict[str, Tensor] | None = Field(None, description="Gradients of weight and bias of query_norm.")
    grad_key_norm: dict[str, Tensor] | None = Field(None, description="Gradients of weight and bias of key_norm.")
    grad_value_norm: dict[str, Tensor] | None = Field(None, description="Gradients of weight and bias of value_norm.")
    grad_output_norm: dict[str, Tensor] | None = Field(None, description="Gradients of weight and bias of output_norm.")
    grad_relative_keys: dict[str, Tensor] | None = Field(
        None, description="Gradients of key and query_bias of relative_keys."
    )
    grad_scale: NumberOrTensor | None = Field(None, description="Gradient of scale: one number, or one for each head.")
    grad_bias: Tensor | None = Field(
        None, description="Gradient of bias, in its shape: summed over the axes that it is broadcast along."
    )
    grad_alibi_slopes: Tensor | None = Field(None, description="Gradient of alibi_slopes.")
    grad_sinks: Tensor | None = Field(None, description="Gradient of sinks, in their shape.")
    grad_gate: Tensor | None = Field(None, description="Gradient of gate, in its shape.")
    query_tokens: Labels | None = Field(None, description="The labels of the request.")
    key_tokens: Labels | None = Field(None, description="The labels of the request.")


def answer(spec: AttentionSpec, result: Result, request_id: str) -> dict[str, Any]:
    """The fields of an AttentionResponse, arrays as ndarrays, absent fields left out."""
    fields: dict[str, Any] = dict(result.arrays)
    for name in ("query_tokens", "key_tokens"):
        if getattr(spec, name) is not None:
            fields[name] = getattr(spec, name)
    fields["metadata"] = {**result.metadata.present, "request_id": request_id, "version": __version__}
    return fields
