"""GET /layers: the stored layers that requests can name."""

from __future__ import annotations

from fastapi import APIRouter, Path, Request, Response

from attention_service.errors import NotFound, UnknownLayer
from attention_service.pipeline.engine import Engine
from attention_service.routes.openapi import problems
from attention_service.schemas.layers import StoredLayer, StoredLayers

router = APIRouter(prefix="/layers", tags=["stored layers"])


@router.get(
    "",
    operation_id="listLayers",
    summary="Which layers are stored?",
    response_description="All stored layers.",
    responses=problems(401, 500, 503),
    response_model=StoredLayers,
)
async def list_layers(request: Request) -> Response:
    """Returns all stored layers, by name. A layer that cannot be used has an `error`."""
    engine: Engine = request.app.state.engine
    return Response(await engine.layers.all(), media_type="application/json")


@router.get(
    "/{name}",
    operation_id="getLayer",
    summary="What is a stored layer?",
    response_description="The layer.",
    responses=problems(401, 404, 500, 503),
    response_model_exclude_none=True,
)
async def get_layer(request: Request, name: str = Path(description="Name of a layer.")) -> StoredLayer:
    """Returns names, shapes and types of the tensors of a layer, its options, its hash, and what it was made from."""
    engine: Engine = request.app.state.engine
    try:
        return await engine.layers.describe(name)
    except UnknownLayer as error:
        fault = error.faults[0]
    raise NotFound.at("", fault.expected, fault.got, fault.hint)
