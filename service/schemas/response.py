"""The answer, as the API document describes it. Answers are not built from these models: their arrays go straight to
the codec. A test holds real answers against this schema."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from service.attention.result import Result
from service.attention.spec import AttentionSpec
from service.schemas.arrays import Array, Labels
from service.version import __version__


class Answer(BaseModel):
    """A model of which the document says that it has no other fields."""

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")


class Warning(Answer):
    """Something to know although the answer is as asked."""

    code: str = Field(description="Stable: zero_sum, bias_looks_like_mask.")
    message: str = Field(description="For people.")


class Metadata(Answer):
    """What was done, exactly."""

    backend: str = Field(description="Which backend computed, like numpy.")
    device: str = Field(description="Where, like cpu.")
    dtype: str = Field(description="What was computed in and returned.")
    kernel: str = Field(description="Which code path ran.")
    num_heads: int = Field(description="Query heads, h.")
    num_kv_heads: int = Field(description="Key/value heads.")
    batch_size: int = Field(description="b; 1 where the layout has none.")
    query_length: int = Field(description="q.")
    key_length: int = Field(description="k.")
    head_dim: int = Field(description="Features of one query or key head.")
    value_dim: int = Field(description="Features of one value head.")
    scale: float = Field(description="The factor that the scores were multiplied by.")
    fully_masked_rows: int = Field(description="Rows of b·h·q that see no key; their weights and outputs are 0.")
    warnings: list[Warning] = Field(description="What to know although the answer is as asked; mostly empty.")
    request_id: str = Field(description="Also in the X-Request-ID header and in the log.")
    version: str = Field(description="Of the service.")


class TopWeights(Answer):
    """The largest weights of each row, in descending order, equal ones by lower index."""

    indices: Array = Field(description="Which keys, int64: [b,] [h,] q, top_k.")
    values: Array = Field(description="Their weights, likewise.")


class AttentionResponse(Answer):
    """The output and what was asked for beside it.

    Score matrices have axes [b,] [h,] q, k: b where the layout has it, h where it has it or there are several heads; q
    and k are swapped in layouts dl and bdl; q is dropped where the query was a vector.
    """

    output: Array = Field(description="Attention weights times values, in the layout of the request.")
    metadata: Metadata
    attention_weights: Array | None = Field(None, description="Normalised over k. A score matrix.")
    scores: Array | None = Field(None, description="Query times key, before anything else. A score matrix.")
    top_weights: TopWeights | None = Field(
        None,
        description="In the place of attention_weights where top_k asks for it: [b,] [h,] q, top_k, never swapped.",
    )
    scaled_scores: Array | None = Field(None, description="scores times scale. A score matrix.")
    capped_scores: Array | None = Field(None, description="scaled_scores after softcap. A score matrix.")
    masked_scores: Array | None = Field(
        None, description="capped_scores with bias and ALiBi added, null where a key is hidden. A score matrix."
    )
    logsumexp: Array | None = Field(
        None,
        description="[b,] [h,] q: natural log of the sum of exp(masked_scores), the sink counted; null where it sums "
        "nothing.",
    )
    entropy: Array | None = Field(None, description="[b,] [h,] q: -sum of w ln w over the weights of a row, in nats.")
    received: Array | None = Field(
        None, description="[b,] [h,] k: the weights that a key gets, summed over all queries."
    )
    query: Array | None = Field(None, description="[b,] [h,] q, d: projected, normalised and rotated.")
    key: Array | None = Field(None, description="[b,] [h,] l, d: likewise, the new ones without the past.")
    value: Array | None = Field(None, description="[b,] [h,] l, d: projected, the new ones without the past.")
    head_outputs: Array | None = Field(None, description="[b,] [h,] q, d: one output per head, before joining.")
    present_key: Array | None = Field(None, description="[b,] h, k, d: the past and the new keys, the next past_key.")
    present_value: Array | None = Field(None, description="[b,] h, k, d: the past and the new values.")
    query_tokens: Labels | None = Field(None, description="As sent.")
    key_tokens: Labels | None = Field(None, description="As sent.")


def answer(spec: AttentionSpec, result: Result, request_id: str) -> dict[str, Any]:
    """The fields of an AttentionResponse, arrays as ndarrays, absent fields left out."""
    fields: dict[str, Any] = dict(result.arrays)
    for name in ("query_tokens", "key_tokens"):
        if getattr(spec, name) is not None:
            fields[name] = getattr(spec, name)
    fields["metadata"] = {**result.facts, "request_id": request_id, "version": __version__}
    return fields
