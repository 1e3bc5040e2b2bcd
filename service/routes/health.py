"""Whether the service lives, and whether it wants requests."""

from __future__ import annotations

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from service.routes.documented import problems

router = APIRouter(prefix="/health", tags=["operations"])


class Health(BaseModel):
    """A health check's answer."""

    status: str = Field("ok", description="ok, or the answer is not 200.")


@router.get("/live", operation_id="checkLive", summary="Is the process alive?", response_description="It is.")
async def live() -> Health:
    """200 as long as the process answers at all; if it does not, restart it."""
    return Health()


@router.get(
    "/ready",
    operation_id="checkReady",
    summary="Does the service take requests?",
    response_description="It does.",
    responses=problems(503),
)
async def ready(request: Request) -> Health:
    """200 when requests are welcome; 503 where large ones would be refused, while it warms up, and when it stops."""
    request.app.state.engine.check_ready()
    return Health()
