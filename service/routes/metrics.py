"""GET /metrics, in the text format of Prometheus."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool

from service.observability.metrics import Metrics

router = APIRouter(tags=["operations"])

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@router.get(
    "/metrics",
    operation_id="getMetrics",
    summary="Metrics for Prometheus",
    response_class=Response,
    response_description="Metrics in the text format of Prometheus, summed over all workers.",
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def get_metrics(request: Request) -> Response:
    """Returns counters and histograms since the start, and gauges of the current state (docs/operations.md)."""
    metrics: Metrics = request.app.state.metrics
    metrics.set_gauges()  # the admission controller belongs to the event loop
    return Response(await run_in_threadpool(metrics.exposition), media_type=MEDIA_TYPE)
