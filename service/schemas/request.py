"""The request: one flat model. What is exactly-one-of is said in descriptions and checked when planning."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from service.attention import spec
from service.schemas.arrays import Bias, IntegerOrIntegers, Integers, KeyMask, Mask, Matrix, Past, TokenLabels, Vector

Encoding = Literal["list", "base64"]


# Names in a list; more take long to compare with those that are known.
MAX_NAMES = 64


def _check_length(names: object) -> object:
    """Names that need not be compared with the known ones if they are too many."""
    if isinstance(names, list) and len(names) > MAX_NAMES:
        raise PydanticCustomError("too_many", f"a list of at most {MAX_NAMES} names")
    return names


def _unwrapped(schema: dict[str, Any]) -> None:
    """Join the lines of descriptions, which are docstrings, in a schema of the API document."""
    for field in schema.get("properties", {}).values():
        field["description"] = " ".join(field["description"].split())


class Closed(BaseModel):
    """A model that refuses what it does not know, and takes no number for a string."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        arbitrary_types_allowed=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        json_schema_extra=_unwrapped,
    )

    def given(self) -> dict[str, object]:
        """The fields that were sent and are not null, as the engine takes them: null means absent."""
        fields = self.__dict__
        return {
            name: value.to_spec() if isinstance(value, Part) else value
            for name in self.model_fields_set
            if (value := fields[name]) is not None
        }


class Part(Closed):
    """An object within a request."""

    def to_spec(self) -> object:
        """The object as the engine takes it: as the class of this name in `spec`, which has the same fields."""
        return getattr(spec, type(self).__name__)(**self.given())


class LinearMap(Part):
    """One learned map. Exactly one of `weight` and `kernel`."""

    weight: Matrix | None = None
    """(out, in): y = x Wᵀ, as in torch.nn.Linear and in column notation. (heads, out, in): one matrix per head.
    Default: none."""
    kernel: Matrix | None = None
    """(in, out): y = x W, as in Keras and Flax Dense. (heads, in, out): one matrix per head. Default: none."""
    bias: Vector | None = None
    """Added after the product: (out,), (out, 1), (heads, out/heads) or (heads, out/heads, 1), the same numbers in the
    same order. Default: none."""


class Projection(Part):
    """Linear maps applied to the source before attention, and to the output after it. One left out is the identity."""

    query: LinearMap | None = None
    """Maps the query tokens to num_heads x head_dim features. Default: the identity."""
    key: LinearMap | None = None
    """Maps the key tokens to num_kv_heads x head_dim features. Default: the identity."""
    value: LinearMap | None = None
    """Maps the value tokens to num_kv_heads x value_dim features. Default: the identity."""
    output: LinearMap | None = None
    """Maps the joined heads, num_heads x value_dim features, to the output. Rank 2 only. Default: the identity."""


class Norm(Part):
    """RMS normalisation over the features of a head: x / sqrt(mean(x²) + eps) · weight."""

    weight: Vector | None = None
    """(head_dim,). Default: ones."""
    eps: float | None = 1e-6
    """Added to the mean of squares, at least 0."""


class Rotary(Part):
    """Rotary position embedding: pairs (x, y) of features become (x cos - y sin, x sin + y cos)."""

    base: float | None = None
    """Pair n turns by position · base^(-2n/dim). Not with cos and sin. Default: 10000."""
    cos: Matrix | None = None
    """(positions, dim/2), looked up by position; or (b, l, dim/2) for each new token as it stands. Default: from
    base."""
    sin: Matrix | None = None
    """As cos. Default: from base."""
    dim: int | None = None
    """How many features turn, the first ones; even. Default: head_dim, or as cos says."""
    interleaved: bool | None = False
    """Pairs are neighbours (0, 1), (2, 3), … if true, else first half with second half."""
    query_positions: Integers | None = None
    """(q,) or (b, q) integers. Default: counted on from the length of the past."""
    key_positions: Integers | None = None
    """The same for the new keys; past keys are turned. Default: as query_positions."""


class Window(Part):
    """How far queries see: from i + query_offset - left to i + query_offset + right, both inclusive."""

    left: int | None = None
    """At least 0. Default: unbounded."""
    right: int | None = None
    """At least 0. Default: unbounded."""


class SegmentIds(Part):
    """Only tokens with equal ids see each other."""

    query: Integers | None = None
    """(q,) for all rows, or (b, q). Default: none."""
    key: Integers | None = None
    """(k,) for all rows, or (b, k), the past counted. Default: none."""


class AttentionRequest(Closed):
    """What to compute. The source is exactly one of: query, key and value; input alone; input and context."""

    query: Matrix | None = None
    """Queries, axes as `layout` says. A vector (rank 1) is one token, in layouts ld and dl; its axis is then dropped
    from output and score matrices. Default: none."""
    key: Matrix | None = None
    """Keys, in the same layout, with the same features per head. Default: none."""
    value: Matrix | None = None
    """Values, in the same layout, as many tokens as the key has. Default: none."""
    input: Matrix | None = None
    """Self-attention: stands for query, key and value. With `context`: for the query only. Default: none."""
    context: Matrix | None = None
    """Cross-attention beside `input`: stands for key and value. Default: none."""
    projection: Projection | None = None
    """Linear maps for the source and the output. Not with a layout that has h. Default: none."""
    layout: spec.Layout | None = None
    """The axes of query, key, value, input, context and output: b batch, h heads, l tokens, d features. Without h the
    heads are packed in d. dl and bdl hold tokens in columns; score matrices are then swapped, so that their columns sum
    to one. Default: ld, bld or bhld, by rank."""
    num_heads: Annotated[int, Field(ge=1)] | None = None
    """Query heads. Default: the h axis, or the heads of a rank-3 query map, else 1."""
    num_kv_heads: Annotated[int, Field(ge=1)] | None = None
    """Key/value heads, a divisor of num_heads: query head n reads key/value head n // (num_heads // num_kv_heads).
    Default: the key's h axis or the heads of its rank-3 map, else num_heads."""
    past_key: Past | None = None
    """Cached keys to stand before the new ones, rotated already: [b,] h, l, d in every layout, h being num_kv_heads; l
    may be 0. The key length counts them. With past_value. Default: none."""
    past_value: Past | None = None
    """Cached values, likewise. With past_key. Default: none."""
    query_norm: Norm | None = None
    """Normalises the query heads before rotation. Default: none."""
    key_norm: Norm | None = None
    """Normalises the new key heads before rotation. Default: none."""
    rotary: Rotary | None = None
    """Rotary position embedding of query and new keys. Default: none."""
    scale: float | None = None
    """Factor on the scores; 1 means unscaled, 0 is legal. Default: 1/sqrt(head_dim)."""
    softcap: float | None = None
    """Above 0: scores become softcap · tanh(scaled / softcap), before bias and mask. Default: none."""
    bias: Bias | None = None
    """Numbers added to the scaled (and capped) scores, axes as for `mask`; null is minus infinity, which hides a key.
    Default: none."""
    alibi_slopes: Vector | None = None
    """(num_heads,): adds -slope · |i + query_offset - j| to the score of query i and key j. Default: none."""
    mask: Mask | None = None
    """Booleans, true = takes part. Axes of the score matrices as returned, broadcast to them; rank 1 is over k, rank 4
    is b, h first, rank 3 beside b and h is per head. All masks compose by and. Default: none."""
    key_mask: KeyMask | None = None
    """Booleans, true = keep: (k,) for all rows, or (b, k). Default: none."""
    is_causal: bool | None = False
    """Query i sees key j only when j <= i + query_offset."""
    query_offset: IntegerOrIntegers | None = None
    """Position of the first query among the keys, for is_causal, window and alibi_slopes: one integer, or (b,). 0
    aligns the first query with the first key, k - q the last with the last. Default: the length of the past; where
    there is none and q is not k, it is required."""
    window: Window | None = None
    """Query i sees only keys near i + query_offset. Default: all."""
    query_lengths: IntegerOrIntegers | None = None
    """How many queries are real, one integer or (b,): rows beyond are padding, with weights and output 0. Default:
    all."""
    key_lengths: IntegerOrIntegers | None = None
    """How many keys are real, one integer or (b,), the past counted. Default: all."""
    segment_ids: SegmentIds | None = None
    """Keeps packed sequences apart. Default: none."""
    sinks: Vector | None = None
    """(num_heads,): a logit for each head that takes part in the softmax and is dropped after it, so that weights sum
    to less than 1. Default: none."""
    normalization: spec.Normalization | None = "softmax"
    """softmax, or sum: the visible scores divided by their sum. sum goes without logsumexp, entropy and sinks."""
    dtype: spec.DType | None = None
    """What numbers are cast to first and returned in. Halves are computed in float32. Default: the widest type among
    typed arrays of query, key, value, input, context and past; float64 for lists."""
    backend: spec.Backend | None = "auto"
    """What computes. auto is what the service is set to, by default numpy, and torch for CUDA."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:[0-9]{1,3})?)$")] | None = "auto"
    """Where: auto, cpu, cuda or cuda:N. CUDA needs torch, whose auto is CUDA where it sees one."""
    include: Annotated[list[spec.Output] | None, BeforeValidator(_check_length)] = spec.DEFAULT_INCLUDE  # type: ignore[assignment]  # a list would be copied each time
    """What to return beside output and metadata; the answer describes each."""
    select_heads: Integers | None = None
    """Return score matrices, logsumexp, entropy and received of these heads only. Default: all."""
    select_queries: Integers | None = None
    """Return score matrices, logsumexp and entropy of these queries only. Default: all."""
    average_heads: bool | None = False
    """Average attention_weights and received over the (selected) heads; their h axis is dropped."""
    top_k: int | None = None
    """Return only the largest weights of each row, at most k: top_weights takes the place of attention_weights.
    Default: all."""
    query_tokens: TokenLabels | None = None
    """Labels of the query tokens, echoed: (q,) or (b, q). Default: none."""
    key_tokens: TokenLabels | None = None
    """Labels of the key tokens, echoed: (k,) or (b, k). Default: none."""
    encoding: Encoding | None = "list"
    """How a JSON answer holds arrays: as nested lists, or as objects with base64 data."""

    def without_sources(self) -> AttentionRequest:
        """The request without the arrays that query, key and value come from."""
        return self.model_copy(update=dict.fromkeys(spec.SOURCES))

    def attention_spec(self, untyped: AbstractSet[str], *, allow_non_finite: bool = False) -> spec.AttentionSpec:
        """The request as the engine takes it, defaults filled in.

        untyped: the fields whose arrays came as lists, so that their numbers do not choose the dtype
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
