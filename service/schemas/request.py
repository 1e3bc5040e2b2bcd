"""The request: one flat model. What is exactly-one-of is said in descriptions and checked when planning."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from service.attention import spec
from service.schemas.arrays import Biases, Booleans, CheckedLabels, Integers, Numbers


class Closed(BaseModel):
    """A model that refuses what it does not know, and takes no number for a string."""

    model_config = ConfigDict(extra="forbid", strict=True, arbitrary_types_allowed=True, allow_inf_nan=False)

    def _given(self) -> dict[str, object]:
        """The fields that were sent and are not null: null means absent."""
        fields = ((name, getattr(self, name)) for name in self.model_fields_set)
        return {name: value for name, value in fields if value is not None}


class LinearMap(Closed):
    """One learned map. Exactly one of `weight` and `kernel`."""

    weight: Numbers | None = Field(
        None,
        description="(out, in): y = x Wᵀ, as in torch.nn.Linear and in column notation. "
        "(heads, out, in): one matrix per head.",
    )
    kernel: Numbers | None = Field(
        None,
        description="(in, out): y = x W, as in Keras and Flax Dense. (heads, in, out): one matrix per head.",
    )
    bias: Numbers | None = Field(
        None,
        description="Added after the product: (out,), (out, 1), (heads, out/heads) or (heads, out/heads, 1), "
        "the same numbers in the same order. Default: none.",
    )

    def to_spec(self) -> spec.LinearMap:
        """The same map as a plain value."""
        return spec.LinearMap(**self._given())  # type: ignore[arg-type]  # the fields have the same names and types


class Projection(Closed):
    """Linear maps applied to the source before attention, and to the output after it. One left out is the identity."""

    query: LinearMap | None = Field(None, description="Maps the query tokens to num_heads x head_dim features.")
    key: LinearMap | None = Field(None, description="Maps the key tokens to num_kv_heads x head_dim features.")
    value: LinearMap | None = Field(None, description="Maps the value tokens to num_kv_heads x value_dim features.")
    output: LinearMap | None = Field(
        None, description="Maps the joined heads, num_heads x value_dim features, to the output. Rank 2 only."
    )

    def to_spec(self) -> spec.Projection:
        """The same maps as a plain value."""
        maps = {name: linear.to_spec() for name, linear in self._given().items() if isinstance(linear, LinearMap)}
        return spec.Projection(**maps)


class AttentionRequest(Closed):
    """What to compute. The source is exactly one of: query, key and value; input alone; input and context."""

    query: Numbers | None = Field(
        None,
        description="Queries, axes as `layout` says. A vector (rank 1) is one token, in layouts ld and dl; its axis "
        "is then dropped from output and score matrices.",
    )
    key: Numbers | None = Field(None, description="Keys, in the same layout, with the same features per head.")
    value: Numbers | None = Field(None, description="Values, in the same layout, as many tokens as the key has.")
    input: Numbers | None = Field(
        None, description="Self-attention: stands for query, key and value. With `context`: for the query only."
    )
    context: Numbers | None = Field(None, description="Cross-attention beside `input`: stands for key and value.")
    projection: Projection | None = Field(
        None, description="Linear maps for the source and the output. Not with a layout that has h. Default: none."
    )
    layout: spec.Layout | None = Field(
        None,
        description="The axes of query, key, value, input, context and output: b batch, h heads, l tokens, d features. "
        "Without h the heads are packed in d. dl and bdl hold tokens in columns; score matrices are then swapped, so "
        "that their columns sum to one. Default by rank: ld, bld, bhld.",
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
    scale: float | None = Field(
        None, description="Factor on the scores; 1 means unscaled, 0 is legal. Default: 1/sqrt(head_dim)."
    )
    mask: Booleans | None = Field(
        None,
        description="Booleans, true = takes part. Axes of the score matrices as returned, broadcast to them; rank 1 "
        "is over k, rank 4 is b, h first, rank 3 beside b and h is per head. Default: all true.",
    )
    bias: Biases | None = Field(
        None,
        description="Numbers added to the scaled scores, axes as for `mask`; null is minus infinity, which hides a "
        "key. Default: none.",
    )
    is_causal: bool | None = Field(
        False, description="Query i sees key j only when j <= i + query_offset. Composes with `mask` by and."
    )
    query_offset: Integers | None = Field(
        None,
        description="Position of the first query among the keys, for `is_causal`: one integer, or (b,). 0 aligns the "
        "first query with the first key, k - q the last with the last. Default: 0 where q = k, else required.",
    )
    normalization: spec.Normalization | None = Field(
        "softmax",
        description="softmax, or sum: the visible scores divided by their sum. sum goes without logsumexp.",
    )
    dtype: spec.DType | None = Field(
        None, description="What arrays are cast to, computed in and returned in. Default: float64."
    )
    backend: spec.Backend | None = Field("auto", description="What computes. auto lets the service choose.")
    include: list[spec.Stage] | None = Field(
        list(spec.DEFAULT_INCLUDE),
        description="What to return beside output and metadata. scores are q·k; scaled_scores are multiplied by "
        "scale; masked_scores hold bias and masks (null where hidden); attention_weights are normalised; logsumexp "
        "is natural, (b, h, q); query, key, value are as projected, and head_outputs not yet joined, (b, h, l, d).",
    )
    query_tokens: CheckedLabels | None = Field(None, description="Labels of the query tokens, echoed: (q,) or (b, q).")
    key_tokens: CheckedLabels | None = Field(None, description="Labels of the key tokens, echoed: (k,) or (b, k).")

    def to_spec(self) -> spec.AttentionSpec:
        """The same request as a plain value, defaults filled in."""
        given = self._given()
        if isinstance(self.projection, Projection):
            given["projection"] = self.projection.to_spec()
        if self.include is not None:
            given["include"] = tuple(self.include)
        return spec.AttentionSpec(**given)  # type: ignore[arg-type]  # the fields have the same names and types
