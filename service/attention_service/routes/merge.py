"""POST /attention/merge."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response

from attention_service.pipeline.merge import MergeOperation
from attention_service.routes.openapi import TENSOR_STATUSES, problems, tensor_answer, tensor_body
from attention_service.routes.tensors import add_tensor_route, respond
from attention_service.schemas.merge import MergeRequest, MergeResponse


async def merge_attention(request: Request) -> Response:
    """Merges what attention over parts of the keys returned: the output and the logsumexp over all keys.

    Kernels that split the keys (split-KV, cascade, ring and context-parallel attention) do it at their end. A row whose
    logsumexp is null or infinite has no key in the part, and weighs nothing.
    """
    return await respond(request, MergeOperation())


def add_routes(app: FastAPI) -> None:
    """Add the operation to the application."""
    add_tensor_route(
        app,
        "/attention/merge",
        merge_attention,
        tags=["attention"],
        operation_id="mergeAttention",
        summary="Merge partial results",
        response_model=MergeResponse,
        response_description="Output and logsumexp over the keys of all parts.",
        responses=problems(*TENSOR_STATUSES) | tensor_answer(None),
        openapi_extra=tensor_body(MergeRequest, "merge.json"),
    )
