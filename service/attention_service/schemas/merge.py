"""The request that merges what attention over parts of the keys returned, and its response."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from attention_service.attention import spec
from attention_service.schemas.arrays import Bias, NumbersOrNull, Tensor, Vector
from attention_service.schemas.closed import Closed
from attention_service.schemas.compare import LogsumexpBase
from attention_service.schemas.request import Encoding
from attention_service.schemas.response import Answer

# Splits of a long sequence are some dozens.
MAX_PARTS = 1024


class PartialResult(Closed):
    """What attention over a part of the keys returned."""

    output: NumbersOrNull
    """The output over these keys, in the layout of the request; null is NaN, as a row without a key may have it."""
    logsumexp: Bias
    """[b,] [h,] q: its logsumexp; null or an infinity: the row has no key in this part."""


def _listed(parts: Any) -> Any:
    """Parts that came as tensors parts.0.output, parts.1.output and so on, as a list."""
    names = [str(n) for n in range(len(parts))] if isinstance(parts, dict) else []
    return [parts[name] for name in names] if names and parts.keys() == set(names) else parts


class MergeRequest(Closed):
    """Parts, and how they are to be read. Nothing is known of the keys themselves."""

    parts: Annotated[list[PartialResult], Field(min_length=1, max_length=MAX_PARTS), BeforeValidator(_listed)]
    """The results of all parts; in npz and safetensors the arrays parts.0.output, parts.0.logsumexp, parts.1.output
    and so on."""
    logsumexp_base: LogsumexpBase | None = "e"
    """The base of all logarithms, those of the response too."""
    sinks: Vector | None = None
    """(h,): one natural logit per head that no part has yet. Default: none."""
    layout: spec.Layout | None = None
    """The axes of all outputs. Default: ld, bld or bhld, by rank."""
    dtype: spec.DType | None = None
    """Type of the output; logsumexp has float32 for halves. All is computed in float64. Default: the widest type among
    the typed outputs; float64 for lists."""
    encoding: Encoding | None = "list"
    """Arrays of a JSON response: nested lists, or objects with base64 data."""


class MergeResponse(Answer):
    """What attention over the keys of all parts would have returned."""

    output: Tensor = Field(description="The output, in the layout of the request; 0 for rows without a key.")
    logsumexp: Tensor = Field(description="[b,] [h,] q, in the base of the request; null for rows without a key.")
