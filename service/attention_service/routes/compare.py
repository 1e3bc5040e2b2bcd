"""POST /attention/compare."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response

from attention_service.comparison.operation import CompareOperation
from attention_service.routes.openapi import TENSOR_STATUSES, problems, tensor_body
from attention_service.routes.tensors import add_tensor_route, respond
from attention_service.schemas.compare import CompareReport, CompareRequest


async def compare_attention(request: Request) -> Response:
    """Says whether what an attention kernel returned is right, and if not, which mistake it shows.

    The body is a request of `/attention`, with `actual`: what a kernel returned for it. The report is JSON, whatever
    the media type of the body. Without `actual` it says which mistakes the request could show.
    """
    return await respond(request, CompareOperation(request.app.state.engine.reference))


def add_routes(app: FastAPI) -> None:
    """Add the operation to the application."""
    add_tensor_route(
        app,
        "/attention/compare",
        compare_attention,
        tags=["attention"],
        operation_id="compareAttention",
        summary="Compare an output with exact attention",
        response_model=CompareReport,
        response_description="The report.",
        responses=problems(*TENSOR_STATUSES),
        openapi_extra=tensor_body(CompareRequest, "compare.json"),
    )
