"""The operations on tensors by their paths: what makes each, and what the API document says of it.

To add one, write an `Operation` and its models, a function and a row here, and a file with examples.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Final, NamedTuple

from pydantic import BaseModel

from attention_service.codecs.table import CODECS
from attention_service.comparison.operation import JSON, CompareCallOperation, CompareOperation
from attention_service.pipeline.attention import AttentionOperation
from attention_service.pipeline.calls import CallOperation
from attention_service.pipeline.engine import Engine
from attention_service.pipeline.merge import MergeOperation
from attention_service.pipeline.operation import Operation
from attention_service.render.heatmap import FORMATS
from attention_service.render.operation import HeatmapOperation
from attention_service.schemas.call import CallRequest, CallResponse
from attention_service.schemas.compare import CompareCallRequest, CompareReport, CompareRequest
from attention_service.schemas.heatmap import HeatmapRequest
from attention_service.schemas.merge import MergeRequest, MergeResponse
from attention_service.schemas.request import AttentionRequest
from attention_service.schemas.response import AttentionResponse


class TensorOperation(NamedTuple):
    """An operation on tensors, as its route and the API document need it.

    operation: makes it of the engine; its docstring is the description, its name in camel case the id, and the name of
    a file with examples of requests
    response: the model of a response in JSON, None for none; returns: what it is; media_types: of responses
    example: name of a file with a response, "" for none
    """

    operation: Callable[[Engine], Operation[Any, Any, Any]]
    summary: str
    request: type[BaseModel]
    response: type[BaseModel] | None
    returns: str
    media_types: Collection[str] = CODECS
    example: str = ""


def compute_attention(engine: Engine) -> AttentionOperation:
    """Computes scaled dot-product attention exactly: softmax(scale · q kᵀ + bias) v. Each variant of it is a field.

    `query`, `key` and `value` are enough. Large arrays are faster in npz or safetensors.
    """
    return engine.attention


def compute_call(engine: Engine) -> CallOperation:
    """Computes what a function of FlashAttention, FlashInfer, torch or vLLM returns, from its own arguments.

    The answer has the axes of the function, and its base of logarithms. Arguments may be ragged batches, paged caches
    and float8; in npz and safetensors they are arrays `arguments.q` and so on.
    """
    return engine.call


def compare_attention(engine: Engine) -> CompareOperation:
    """Says whether what an attention kernel returned is right, and if not, which mistake it shows.

    The body is a request of `/attention`, with `actual`: what a kernel returned for it. The report is JSON, whatever
    the media type of the body. Without `actual` it says which mistakes the request could show.
    """
    return CompareOperation(engine.reference)


def compare_call(engine: Engine) -> CompareCallOperation:
    """Says whether what a function of another library returned is right, and if not, which mistake it shows.

    The body is a request of `/attention/call`, with `actual`: what the function returned. The report is that of
    `/attention/compare`. Rows that belong to no sequence are not judged.
    """
    return CompareCallOperation(engine.reference)


def draw_attention(engine: Engine) -> HeatmapOperation:
    """Draws the attention weights, or a score stage, as SVG or PNG.

    The body is a request of `/attention`; `heatmap` says what to draw, and how. Tokens stand on both axes, heads beside
    each other. A hidden cell shows what hides it.
    """
    return HeatmapOperation(engine.reference)


def merge_attention(engine: Engine) -> MergeOperation:
    """Merges what attention over parts of the keys returned: the output and the logsumexp over all keys.

    Kernels that split the keys (split-KV, cascade, ring and context-parallel attention) do it at their end. A row whose
    logsumexp is null or infinite has no key in the part, and weighs nothing.
    """
    return MergeOperation()


OPERATIONS: Final[dict[str, TensorOperation]] = {
    "/attention": TensorOperation(
        compute_attention,
        "Compute attention",
        AttentionRequest,
        AttentionResponse,
        "The output, the results that `include` names, and metadata.",
        example="answer.json",
    ),
    "/attention/call": TensorOperation(
        compute_call, "Compute the call of a library", CallRequest, CallResponse, "What it returns, and metadata."
    ),
    "/attention/compare": TensorOperation(
        compare_attention,
        "Compare an output with exact attention",
        CompareRequest,
        CompareReport,
        "The report.",
        [JSON],
    ),
    "/attention/call/compare": TensorOperation(
        compare_call, "Compare what a library returned", CompareCallRequest, CompareReport, "The report.", [JSON]
    ),
    "/attention/heatmap": TensorOperation(
        draw_attention, "Draw attention", HeatmapRequest, None, "The picture.", FORMATS
    ),
    "/attention/merge": TensorOperation(
        merge_attention,
        "Merge partial results",
        MergeRequest,
        MergeResponse,
        "Output and logsumexp over the keys of all parts.",
    ),
}
