"""The Open Inference Protocol (v2) over HTTP, for clients of Triton and KServe: health, metadata, inference."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends, FastAPI, Path, Request, Response

from attention_service.codecs.oip import check_model
from attention_service.http.negotiation import negotiate_inference
from attention_service.http.problems import INFERENCE
from attention_service.routes.openapi import inference_answer, inference_body, inference_errors
from attention_service.routes.tensors import add_tensor_route, respond
from attention_service.schemas.inference import (
    MODEL_METADATA,
    SERVER_METADATA,
    InferenceResponse,
    ModelMetadata,
    ModelReady,
    ServerLive,
    ServerMetadata,
    ServerReady,
    layer_metadata,
)
from attention_service.version import MODEL

ModelName = Annotated[str, Path(description="Name of the model: attention, or a stored layer.")]
ModelVersion = Annotated[str, Path(description="Version of the model: 1.")]


async def check_name(request: Request, model_name: ModelName) -> None:
    """Errors: NotFound for any other model than ours. The stored layers are only looked up for other names."""
    if model_name != MODEL:
        check_model(model_name, layers=await request.app.state.engine.layers.names())


async def check_version(model_version: ModelVersion) -> None:
    """Errors: NotFound for any other version than ours."""
    check_model(version=model_version)


# Of paths with a model, and with its version.
NAMED = [Depends(check_name)]
VERSIONED = [*NAMED, Depends(check_version)]

router = APIRouter(prefix=INFERENCE, tags=["inference protocol"], responses=inference_errors(401, 404, 500))


@router.get(
    "", operation_id="getServerMetadata", summary="What is this server?", response_description="Metadata of the server."
)
async def server_metadata() -> ServerMetadata:
    """Returns name, version and extensions of the server."""
    return SERVER_METADATA


@router.get(
    "/health/live",
    operation_id="checkServerLive",
    summary="Is the server alive?",
    response_description="The process responds.",
    responses=inference_errors(503),
)
async def server_live(request: Request) -> ServerLive:
    """Responds with 200 as long as the process responds and can use its GPU, if it has one."""
    request.app.state.engine.check_alive()
    return ServerLive(live=True)


@router.get(
    "/health/ready",
    operation_id="checkServerReady",
    summary="Does the server accept inference requests?",
    response_description="The server accepts requests.",
    responses=inference_errors(503),
)
async def server_ready(request: Request) -> ServerReady:
    """Responds with 503 in the same cases as /health/ready."""
    request.app.state.engine.check_ready()
    return ServerReady(ready=True)


@router.get(
    "/models/{model_name}/versions/{model_version}",
    dependencies=VERSIONED,
    operation_id="getModelVersionMetadata",
    summary="Which tensors does a version of a model have?",
    description="Returns the same as without a version: there is one version.",
    response_description="Inputs and outputs of the model.",
)
@router.get(
    "/models/{model_name}",
    dependencies=NAMED,
    operation_id="getModelMetadata",
    summary="Which tensors does a model have?",
    response_description="Inputs and outputs of the model.",
)
async def model_metadata(request: Request, model_name: ModelName) -> ModelMetadata:
    """Returns the tensors that a request can send and ask for; of a stored layer `input` and `output`."""
    if model_name == MODEL:
        return MODEL_METADATA
    return layer_metadata(await request.app.state.engine.layers.describe(model_name))


@router.get(
    "/models/{model_name}/versions/{model_version}/ready",
    dependencies=VERSIONED,
    operation_id="checkModelVersionReady",
    summary="Does a version of a model accept requests?",
    description="Responds as without a version: there is one version.",
    response_description="The model accepts requests.",
    responses=inference_errors(503),
)
@router.get(
    "/models/{model_name}/ready",
    dependencies=NAMED,
    operation_id="checkModelReady",
    summary="Does a model accept requests?",
    response_description="The model accepts requests.",
    responses=inference_errors(503),
)
async def model_ready(request: Request, model_name: ModelName) -> ModelReady:
    """Responds with 503 in the same cases as /health/ready, and while the files of a stored layer cannot be used."""
    request.app.state.engine.check_ready()
    if model_name != MODEL:
        await request.app.state.engine.layers.describe(model_name)
    return ModelReady(name=model_name, ready=True)


async def infer(request: Request, model_name: ModelName) -> Response:
    """Computes the same as POST /attention. Arrays are inputs, other fields parameters; outputs replace `include`."""
    await check_name(request, model_name)
    engine, codecs = request.app.state.engine, partial(negotiate_inference, model=model_name)
    return await respond(engine, request.scope, request.receive, engine.attention, codecs)


async def infer_version(request: Request, model_name: ModelName, model_version: ModelVersion) -> Response:
    """Computes the same as without a version: there is one version."""
    check_model(version=model_version)
    return await infer(request, model_name)


def add_routes(app: FastAPI) -> None:
    """Add the inference operations to the application."""
    add = partial(
        add_tensor_route,
        app,
        tags=["inference protocol"],
        response_model=InferenceResponse,
        response_description="The requested outputs.",
        responses=inference_errors(400, 401, 404, 408, 413, 415, 422, 431, 500, 503, 504) | inference_answer(),
        openapi_extra=inference_body(),
    )
    model = f"{INFERENCE}/models/{{model_name}}"
    add(
        f"{model}/versions/{{model_version}}/infer",
        infer_version,
        operation_id="inferVersion",
        summary="Compute attention with a version of the model (inference protocol)",
    )
    add(f"{model}/infer", infer, operation_id="infer", summary="Compute attention (inference protocol)")
