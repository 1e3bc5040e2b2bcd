"""Operations for operators: health, metrics, problem codes."""

from __future__ import annotations

from fastapi import APIRouter, Path, Request, Response
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, Field

from attention_service.errors import NotFound, error_classes
from attention_service.observability.metrics import Metrics
from attention_service.routes.openapi import problems
from attention_service.schemas.problem import ProblemCode

router = APIRouter(tags=["operations"])
metrics_router = APIRouter(tags=["operations"])

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Health(BaseModel):
    """The response of a health check."""

    status: str = Field("ok", description="Always ok. If the check fails, the status is not 200.")


class ProblemType(BaseModel):
    """What a problem code means."""

    code: ProblemCode = Field(description="The `code` of a problem.")
    status: int = Field(description="HTTP status of responses with this code.")
    title: str = Field(description="Title of responses with this code.")
    description: str = Field(description="When a response has this code.")


@router.get(
    "/health/live",
    operation_id="checkLive",
    summary="Is the process alive?",
    response_description="The process responds.",
    responses=problems(503),
)
async def live(request: Request) -> Health:
    """Responds with 200 as long as the process responds and can use its GPU, if it has one. If not, restart it."""
    request.app.state.engine.check_alive()
    return Health()


@router.get(
    "/health/ready",
    operation_id="checkReady",
    summary="Does the service accept requests?",
    response_description="The service accepts requests.",
    responses=problems(503),
)
async def ready(request: Request) -> Health:
    """Responds with 503 while the service starts or stops."""
    request.app.state.engine.check_ready()
    return Health()


@router.get(
    "/problems/{code}",
    operation_id="describeProblem",
    summary="What does this problem code mean?",
    response_description="The meaning of the code.",
    responses=problems(404),
)
async def describe_problem(code: str = Path(description="A problem code, for example shape_mismatch.")) -> ProblemType:
    """Describes a problem code. The `type` of a problem is the path of this operation."""
    kind = error_classes().get(code)
    if kind is None:
        raise NotFound.at("", f"one of {', '.join(error_classes())}", "another code")
    return ProblemType(code=code, status=kind.status, title=kind.title, description=kind.description())


@metrics_router.get(
    "/metrics",
    operation_id="getMetrics",
    summary="Metrics for Prometheus",
    response_class=Response,
    response_description="Metrics in the text format of Prometheus, summed over all workers.",
    responses={200: {"content": {"text/plain": {"schema": {}}}}},
)
async def get_metrics(request: Request) -> Response:
    """Returns counters and histograms since the start, and gauges of the current state (docs/operations.md)."""
    metrics: Metrics = request.app.state.metrics
    metrics.update()  # the admission controller belongs to the event loop
    return Response(await run_in_threadpool(metrics.exposition), media_type=METRICS_TYPE)
