"""Health checks: GET /health/live and GET /health/ready."""

from __future__ import annotations

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from service.routes.documented import problems

router = APIRouter(prefix="/health", tags=["operations"])


class Health(BaseModel):
    """The response of a health check."""

    status: str = Field("ok", description="Always ok. If the check fails, the status is not 200.")


@router.get(
    "/live", operation_id="checkLive", summary="Is the process alive?", response_description="The process responds."
)
async def live() -> Health:
    """Responds with 200 as long as the process responds at all. If it does not, restart it."""
    return Health()


@router.get(
    "/ready",
    operation_id="checkReady",
    summary="Does the service accept requests?",
    response_description="The service accepts requests.",
    responses=problems(503),
)
async def ready(request: Request) -> Health:
    """Responds with 503 while the service starts or stops, and while it would refuse a large request."""
    request.app.state.engine.check_ready()
    return Health()
