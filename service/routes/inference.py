"""The Open Inference Protocol (v2) over HTTP, as Triton and KServe speak it: health, metadata, inference."""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request, Response

from service.http.problems import INFERENCE
from service.http.request_id import request_id
from service.routes.documented import inference_answer, inference_body, inference_errors
from service.routes.health import check_ready
from service.routes.inference_exchange import begin, check
from service.routes.tensors import TensorRequest, TensorRoute, handler
from service.schemas.inference import (
    MODEL,
    MODEL_METADATA,
    SERVER_METADATA,
    VERSION,
    InferenceRequest,
    InferenceResponse,
    ModelMetadata,
    ModelReady,
    ServerLive,
    ServerMetadata,
    ServerReady,
)
from service.schemas.request import AttentionRequest
from service.schemas.response import answer

ModelName = Annotated[str, Path(description="The model: attention.")]
ModelVersion = Annotated[str, Path(description="The version of the model: 1.")]


class InferenceRoute(TensorRoute):
    """Reads and writes as the protocol wants, and takes the same options as POST /attention."""

    @property
    def straight_paths(self) -> Collection[str]:
        """The path with the names that there are."""
        return (self.path.format(model_name=MODEL, model_version=VERSION),)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler that FastAPI calls in place of its own."""
        names = {"model_name": MODEL, "model_version": VERSION}  # `begin` has seen to it that they are
        given = {name: names[name] for name in self.param_convertors}
        return handler(begin, AttentionRequest, partial(self.endpoint, **given))


router = APIRouter(prefix=INFERENCE, tags=["inference protocol"], responses=inference_errors(401, 404, 500))
tensors = APIRouter(
    prefix=INFERENCE,
    tags=["inference protocol"],
    responses=inference_errors(400, 401, 404, 408, 413, 415, 422, 500, 503, 504),
    route_class=InferenceRoute,
)


@router.get("", operation_id="getServerMetadata", summary="What is this server?", response_description="What it is.")
async def server_metadata() -> ServerMetadata:
    """Name, version and extensions of the server."""
    return SERVER_METADATA


@router.get(
    "/health/live", operation_id="checkServerLive", summary="Is the server alive?", response_description="It is."
)
async def server_live() -> ServerLive:
    """200 as long as the process answers at all."""
    return ServerLive(live=True)


@router.get(
    "/health/ready",
    operation_id="checkServerReady",
    summary="Does the server take inference requests?",
    response_description="It does.",
    responses=inference_errors(503),
)
async def server_ready(request: Request) -> ServerReady:
    """200 when requests are welcome."""
    check_ready(request)
    return ServerReady(ready=True)


@router.get(
    "/models/{model_name}",
    operation_id="getModelMetadata",
    summary="What does a model take and give?",
    response_description="Its tensors.",
)
async def model_metadata(model_name: ModelName) -> ModelMetadata:
    """All tensors that can be sent and asked for."""
    check(model_name)
    return MODEL_METADATA


@router.get(
    "/models/{model_name}/versions/{model_version}",
    operation_id="getModelVersionMetadata",
    summary="What does a version of a model take and give?",
    response_description="Its tensors.",
)
async def model_version_metadata(model_name: ModelName, model_version: ModelVersion) -> ModelMetadata:
    """The same for a version; there is one."""
    check(model_name, model_version)
    return MODEL_METADATA


@router.get(
    "/models/{model_name}/ready",
    operation_id="checkModelReady",
    summary="Does a model take requests?",
    response_description="It does.",
    responses=inference_errors(503),
)
async def model_ready(model_name: ModelName, request: Request) -> ModelReady:
    """200 when requests are welcome."""
    check(model_name)
    check_ready(request)
    return ModelReady(name=MODEL, ready=True)


@router.get(
    "/models/{model_name}/versions/{model_version}/ready",
    operation_id="checkModelVersionReady",
    summary="Does a version of a model take requests?",
    response_description="It does.",
    responses=inference_errors(503),
)
async def model_version_ready(model_name: ModelName, model_version: ModelVersion, request: Request) -> ModelReady:
    """The same for a version; there is one."""
    check(model_name, model_version)
    check_ready(request)
    return ModelReady(name=MODEL, ready=True)


@tensors.post(
    "/models/{model_name}/infer",
    operation_id="infer",
    summary="Compute attention by the inference protocol",
    response_model=InferenceResponse,
    response_description="The outputs asked for.",
    responses=inference_answer(),
    openapi_extra=inference_body(),
)
async def infer(body: InferenceRequest, request: TensorRequest, model_name: ModelName) -> dict[str, Any]:
    """What POST /attention computes. Arrays are inputs, all other fields parameters, requested outputs `include`."""
    result = await request.engine.attend(request.job, request.call)
    return answer(request.job.spec, result, request_id(request.scope))


@tensors.post(
    "/models/{model_name}/versions/{model_version}/infer",
    operation_id="inferVersion",
    summary="Compute attention by a version of the model",
    response_model=InferenceResponse,
    response_description="The outputs asked for.",
    responses=inference_answer(),
    openapi_extra=inference_body(),
)
async def infer_version(
    body: InferenceRequest, request: TensorRequest, model_name: ModelName, model_version: ModelVersion
) -> dict[str, Any]:
    """The same by a version; there is one."""
    return await infer(body, request, model_name)
