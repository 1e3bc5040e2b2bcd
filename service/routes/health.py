"""Whether the service lives, and whether it wants requests."""

from __future__ import annotations

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from service.errors import Busy, Fault
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
    """200 when requests are welcome; if not, send them elsewhere."""
    check_ready(request)
    return Health()


def check_ready(request: Request) -> None:
    """Errors: Busy while the service warms up, so that the first request is as quick as all others."""
    if not request.app.state.engine.ready:
        fault = Fault("", "a service that has loaded all that it computes with", "one that is loading it")
        raise Busy(fault, headers={"Retry-After": "1"})
