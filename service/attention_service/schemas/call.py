"""The request of a call of another library, and its response."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from attention_service.attention import spec
from attention_service.schemas.arrays import Tensor
from attention_service.schemas.closed import Closed
from attention_service.schemas.request import AttentionRequest, Device, Encoding, check_length
from attention_service.schemas.response import Answer, Metadata

# The hint for fields of another request among those of a call.
OF_NO_CALL = "what the function takes stands in arguments; a request without a call is for POST /attention"
CallOutput = Literal["logsumexp", "attention_weights"]


class CallRequest(Closed):
    """A call of a function of FlashAttention, FlashInfer, torch or vLLM. docs/coming-from.md lists the functions."""

    elsewhere = dict.fromkeys(AttentionRequest.model_fields, OF_NO_CALL)

    call: Annotated[str, Field(max_length=100)]
    """Name of the function, `flash_attn.flash_attn_func` for example."""
    version: Annotated[int, Field(ge=2, le=4)] | None = None
    """The version of the library, where versions differ. Default: names of all versions are known."""
    arguments: dict[str, Any]
    """The arguments of the function, by their own names."""
    include: Annotated[list[CallOutput] | None, BeforeValidator(check_length)] = None
    """What to return in addition to output and logsumexp: the weights, an array for each sequence. Default: nothing."""
    dtype: spec.DType | None = None
    """Type that the results are rounded to; logsumexp has float32 for halves. All is computed in float64. Default:
    float64."""
    backend: spec.Backend | None = "auto"
    """As of `/attention`."""
    device: Device | None = "auto"
    """As of `/attention`."""
    encoding: Encoding | None = "list"
    """Arrays of a JSON response: nested lists, or objects with base64 data."""


class CallResponse(Answer):
    """What the function returns, in its own axes and its own base of logarithms, and the weights if they are asked for.

    Rows that belong to no sequence are null.
    """

    output: Tensor = Field(description="The output; 0 in rows without a key.")
    logsumexp: Tensor = Field(description="The logsumexp; null in rows without a key, unless they have a sink.")
    metadata: Metadata
    attention_weights: list[Tensor] | None = Field(
        None,
        description="The weights of each sequence: h, q, k. In npz and safetensors attention_weights.0 and so on.",
    )
