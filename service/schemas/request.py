"""The request: one flat model. What is exactly-one-of is said in descriptions and checked when planning."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from service.attention import spec
from service.schemas.arrays import (
    Biases,
    Booleans,
    CachedNumbers,
    CheckedLabels,
    IntegerLists,
    Integers,
    Numbers,
)

Encoding = Literal["list", "base64"]


# Names in a list; more take long to compare with those that are known.
MAX_NAMES = 64


def few(names: object) -> object:
    """The same, if it is no list of more than `MAX_NAMES`."""
    if isinstance(names, list) and len(names) > MAX_NAMES:
        raise PydanticCustomError("too_many", f"a list of at most {MAX_NAMES} names")
    return names


class Closed(BaseModel):
    """A model that refuses what it does not know, and takes no number for a string."""

    model_config = ConfigDict(extra="forbid", strict=True, arbitrary_types_allowed=True, allow_inf_nan=False)

    def given(self) -> dict[str, object]:
        """The fields that were sent and are not null, models as plain values: null means absent."""
        fields = self.__dict__
        return {
            name: value.to_spec() if isinstance(value, Part) else value
            for name in self.model_fields_set
            if (value := fields[name]) is not None
        }


class Part(Closed):
    """An object within a request."""

    def to_spec(self) -> object:
        """The same as a plain value: of the class of this name in `spec`, which has the same fields."""
        return getattr(spec, type(self).__name__)(**self.given())


class LinearMap(Part):
    """One learned map. Exactly one of `weight` and `kernel`."""

    weight: Numbers | None = Field(
        None,
        description="(out, in): y = x Wᵀ, as in torch.nn.Linear and in column notation. "
        "(heads, out, in): one matrix per head. Default: none.",
    )
    kernel: Numbers | None = Field(
        None,
        description="(in, out): y = x W, as in Keras and Flax Dense. (heads, in, out): one matrix per head. "
        "Default: none.",
    )
    bias: Numbers | None = Field(
        None,
        description="Added after the product: (out,), (out, 1), (heads, out/heads) or (heads, out/heads, 1), "
        "the same numbers in the same order. Default: none.",
    )


class Projection(Part):
    """Linear maps applied to the source before attention, and to the output after it. One left out is the identity."""

    query: LinearMap | None = Field(
        None, description="Maps the query tokens to num_heads x head_dim features. Default: the identity."
    )
    key: LinearMap | None = Field(
        None, description="Maps the key tokens to num_kv_heads x head_dim features. Default: the identity."
    )
    value: LinearMap | None = Field(
        None, description="Maps the value tokens to num_kv_heads x value_dim features. Default: the identity."
    )
    output: LinearMap | None = Field(
        None,
        description="Maps the joined heads, num_heads x value_dim features, to the output. Rank 2 only. "
        "Default: the identity.",
    )


class Norm(Part):
    """RMS normalisation over the features of a head: x / sqrt(mean(x²) + eps) · weight."""

    weight: Numbers | None = Field(None, description="(head_dim,). Default: ones.")
    eps: float | None = Field(1e-6, description="Added to the mean of squares, at least 0.")


class Rotary(Part):
    """Rotary position embedding: pairs (x, y) of features become (x cos - y sin, x sin + y cos)."""

    base: float | None = Field(
        None, description="Pair n turns by position · base^(-2n/dim). Not with cos and sin. Default: 10000."
    )
    cos: Numbers | None = Field(
        None,
        description="(positions, dim/2), looked up by position; or (b, l, dim/2) for each new token as it stands. "
        "Default: from base.",
    )
    sin: Numbers | None = Field(None, description="As cos. Default: from base.")
    dim: int | None = Field(
        None, description="How many features turn, the first ones; even. Default: head_dim, or as cos says."
    )
    interleaved: bool | None = Field(
        False, description="Pairs are neighbours (0, 1), (2, 3), … if true, else first half with second half."
    )
    query_positions: IntegerLists | None = Field(
        None, description="(q,) or (b, q) integers. Default: counted on from the length of the past."
    )
    key_positions: IntegerLists | None = Field(
        None, description="The same for the new keys; past keys are turned. Default: as query_positions."
    )


class Window(Part):
    """How far queries see: from i + query_offset - left to i + query_offset + right, both inclusive."""

    left: int | None = Field(None, description="At least 0. Default: unbounded.")
    right: int | None = Field(None, description="At least 0. Default: unbounded.")


class SegmentIds(Part):
    """Only tokens with equal ids see each other."""

    query: IntegerLists | None = Field(None, description="(q,) for all rows, or (b, q). Default: none.")
    key: IntegerLists | None = Field(None, description="(k,) for all rows, or (b, k), the past counted. Default: none.")


class AttentionRequest(Closed):
    """What to compute. The source is exactly one of: query, key and value; input alone; input and context."""

    query: Numbers | None = Field(
        None,
        description="Queries, axes as `layout` says. A vector (rank 1) is one token, in layouts ld and dl; its axis "
        "is then dropped from output and score matrices. Default: none.",
    )
    key: Numbers | None = Field(
        None, description="Keys, in the same layout, with the same features per head. Default: none."
    )
    value: Numbers | None = Field(
        None, description="Values, in the same layout, as many tokens as the key has. Default: none."
    )
    input: Numbers | None = Field(
        None,
        description="Self-attention: stands for query, key and value. With `context`: for the query only. "
        "Default: none.",
    )
    context: Numbers | None = Field(
        None, description="Cross-attention beside `input`: stands for key and value. Default: none."
    )
    projection: Projection | None = Field(
        None, description="Linear maps for the source and the output. Not with a layout that has h. Default: none."
    )
    layout: spec.Layout | None = Field(
        None,
        description="The axes of query, key, value, input, context and output: b batch, h heads, l tokens, d features. "
        "Without h the heads are packed in d. dl and bdl hold tokens in columns; score matrices are then swapped, so "
        "that their columns sum to one. Default: ld, bld or bhld, by rank.",
    )
    num_heads: Annotated[int, Field(ge=1)] | None = Field(
        None,
        description="Query heads. Default: the h axis, or the heads of a rank-3 query map, else 1.",
    )
    num_kv_heads: Annotated[int, Field(ge=1)] | None = Field(
        None,
        description="Key/value heads, a divisor of num_heads: query head n reads key/value head "
        "n // (num_heads // num_kv_heads). Default: the key's h axis or the heads of its rank-3 map, else num_heads.",
    )
    past_key: CachedNumbers | None = Field(
        None,
        description="Cached keys to stand before the new ones, rotated already: [b,] h, l, d in every layout, h being "
        "num_kv_heads; l may be 0. The key length counts them. With past_value. Default: none.",
    )
    past_value: CachedNumbers | None = Field(None, description="Cached values, likewise. With past_key. Default: none.")
    query_norm: Norm | None = Field(None, description="Normalises the query heads before rotation. Default: none.")
    key_norm: Norm | None = Field(None, description="Normalises the new key heads before rotation. Default: none.")
    rotary: Rotary | None = Field(None, description="Rotary position embedding of query and new keys. Default: none.")
    scale: float | None = Field(
        None, description="Factor on the scores; 1 means unscaled, 0 is legal. Default: 1/sqrt(head_dim)."
    )
    softcap: float | None = Field(
        None,
        description="Above 0: scores become softcap · tanh(scaled / softcap), before bias and mask. Default: none.",
    )
    bias: Biases | None = Field(
        None,
        description="Numbers added to the scaled (and capped) scores, axes as for `mask`; null is minus infinity, "
        "which hides a key. Default: none.",
    )
    alibi_slopes: Numbers | None = Field(
        None,
        description="(num_heads,): adds -slope · |i + query_offset - j| to the score of query i and key j. "
        "Default: none.",
    )
    mask: Booleans | None = Field(
        None,
        description="Booleans, true = takes part. Axes of the score matrices as returned, broadcast to them; rank 1 "
        "is over k, rank 4 is b, h first, rank 3 beside b and h is per head. All masks compose by and. Default: none.",
    )
    key_mask: Booleans | None = Field(
        None, description="Booleans, true = keep: (k,) for all rows, or (b, k). Default: none."
    )
    is_causal: bool | None = Field(False, description="Query i sees key j only when j <= i + query_offset.")
    query_offset: Integers | None = Field(
        None,
        description="Position of the first query among the keys, for is_causal, window and alibi_slopes: one integer, "
        "or (b,). 0 aligns the first query with the first key, k - q the last with the last. Default: the length of "
        "the past; where there is none and q is not k, it is required.",
    )
    window: Window | None = Field(None, description="Query i sees only keys near i + query_offset. Default: all.")
    query_lengths: Integers | None = Field(
        None,
        description="How many queries are real, one integer or (b,): rows beyond are padding, with weights and output "
        "0. Default: all.",
    )
    key_lengths: Integers | None = Field(
        None, description="How many keys are real, one integer or (b,), the past counted. Default: all."
    )
    segment_ids: SegmentIds | None = Field(None, description="Keeps packed sequences apart. Default: none.")
    sinks: Numbers | None = Field(
        None,
        description="(num_heads,): a logit for each head that takes part in the softmax and is dropped after it, so "
        "that weights sum to less than 1. Default: none.",
    )
    normalization: spec.Normalization | None = Field(
        "softmax",
        description="softmax, or sum: the visible scores divided by their sum. sum goes without logsumexp, entropy "
        "and sinks.",
    )
    dtype: spec.DType | None = Field(
        None,
        description="What numbers are cast to first and returned in. Halves are computed in float32. Default: the "
        "widest type among typed arrays of query, key, value, input, context and past; float64 for lists.",
    )
    backend: spec.Backend | None = Field(
        "auto",
        description="What computes. auto is what the service is set to, by default numpy, and torch for CUDA.",
    )
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:[0-9]{1,3})?)$")] | None = Field(
        "auto",
        description="Where: auto, cpu, cuda or cuda:N. CUDA needs torch, whose auto is CUDA where it sees one.",
    )
    include: Annotated[list[spec.Output] | None, BeforeValidator(few)] = Field(  # type: ignore[assignment]  # a list would be copied each time
        spec.DEFAULT_INCLUDE,
        description="What to return beside output and metadata; the answer describes each.",
    )
    select_heads: IntegerLists | None = Field(
        None, description="Return score matrices, logsumexp, entropy and received of these heads only. Default: all."
    )
    select_queries: IntegerLists | None = Field(
        None, description="Return score matrices, logsumexp and entropy of these queries only. Default: all."
    )
    average_heads: bool | None = Field(
        False, description="Average attention_weights and received over the (selected) heads; their h axis is dropped."
    )
    top_k: int | None = Field(
        None,
        description="Return only the largest weights of each row, at most k: top_weights takes the place of "
        "attention_weights. Default: all.",
    )
    query_tokens: CheckedLabels | None = Field(
        None, description="Labels of the query tokens, echoed: (q,) or (b, q). Default: none."
    )
    key_tokens: CheckedLabels | None = Field(
        None, description="Labels of the key tokens, echoed: (k,) or (b, k). Default: none."
    )
    encoding: Encoding | None = Field(
        "list", description="How a JSON answer holds arrays: as nested lists, or as objects with base64 data."
    )

    def attention_spec(self, untyped: AbstractSet[str], *, allow_non_finite: bool = False) -> spec.AttentionSpec:
        """The same request as a plain value, defaults filled in.

        untyped: the fields whose arrays came as lists, whose numbers have no type of their own
        """
        given = self.given()
        given.pop("encoding", None)
        if self.include is not None:
            given["include"] = tuple(self.include)
        return spec.AttentionSpec(
            **given,  # type: ignore[arg-type]  # the fields have the same names and types
            untyped=frozenset(untyped),
            allow_non_finite=allow_non_finite,
        )
