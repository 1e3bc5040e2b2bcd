"""POST /attention."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response

from service.http.negotiation import negotiate
from service.routes.openapi import problems, tensor_answer, tensor_body
from service.routes.tensors import respond
from service.schemas.response import AttentionResponse


async def compute_attention(request: Request) -> Response:
    """Computes scaled dot-product attention exactly: softmax(scale · q kᵀ + bias) v. Each variant of it is a field.

    The response has the output, the attention weights and the intermediate results that `include` names.
    """
    return await respond(request, negotiate)


def add_routes(app: FastAPI) -> None:
    """Add the operation to the application itself: a router in between would take a twentieth of a small request."""
    app.add_api_route(
        "/attention",
        compute_attention,
        methods=["POST"],
        tags=["attention"],
        operation_id="computeAttention",
        summary="Compute attention",
        response_model=AttentionResponse,
        response_description="The output, the results that `include` names, and metadata.",
        responses=problems(400, 401, 406, 408, 413, 415, 422, 431, 500, 503, 504) | tensor_answer(),
        openapi_extra=tensor_body(),
    )
