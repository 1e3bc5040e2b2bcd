"""POST /attention/heatmap."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response

from attention_service.render.operation import HeatmapOperation
from attention_service.routes.openapi import TENSOR_STATUSES, heatmap_answer, problems, tensor_body
from attention_service.routes.tensors import add_tensor_route, respond
from attention_service.schemas.heatmap import HeatmapRequest


async def draw_attention(request: Request) -> Response:
    """Draws the attention weights, or a score stage, as SVG or PNG.

    The body is a request of `/attention`; `heatmap` says what to draw, and how. Tokens stand on both axes, heads beside
    each other. A hidden cell shows what hides it.
    """
    return await respond(request, HeatmapOperation(request.app.state.engine.reference))


def add_routes(app: FastAPI) -> None:
    """Add the operation to the application."""
    add_tensor_route(
        app,
        "/attention/heatmap",
        draw_attention,
        tags=["attention"],
        operation_id="drawAttention",
        summary="Draw attention",
        response_class=Response,
        response_description="The picture.",
        responses=problems(*TENSOR_STATUSES) | heatmap_answer(),
        openapi_extra=tensor_body(HeatmapRequest, "heatmap.json"),
    )
