"""GET /metrics, in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from service.observability.metrics import BUCKETS, METRICS, Cells, Shared, Tally, total
from service.pipeline.engine import Engine
from service.version import __version__

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
def get_metrics(request: Request) -> Response:
    """Returns counters and histograms since the start, and gauges of the current state (docs/operations.md)."""
    state = request.app.state
    registry = CollectorRegistry()
    registry.register(_Counted(counts(state.tally, state.engine, state.shared)))
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    return Response(generate_latest(registry), media_type=MEDIA_TYPE)


def counted(tally: Tally, engine: Engine) -> Cells:
    """What a worker has counted."""
    if engine.batcher is None:
        return tally.cells
    batches: Cells = {
        ("attention_batches", ()): engine.batcher.batches,
        ("attention_batched_requests", ()): engine.batcher.requests,
    }
    return tally.cells | batches


def own_counts(tally: Tally, engine: Engine) -> Cells:
    """The same, and its gauges as they stand."""
    admission = engine.admission
    gauges: Cells = {
        ("attention_requests_in_flight", ()): tally.in_flight,
        ("attention_slots_in_use", ()): admission.slots_taken,
        ("attention_slots", ()): admission.slots,
        ("attention_requests_waiting", ()): admission.waiting,
        ("attention_memory_bytes", ()): admission.memory - admission.free,
        ("attention_memory_limit_bytes", ()): admission.memory,
        ("attention_workers", ()): 1,
    }
    return counted(tally, engine) | gauges


def counts(tally: Tally, engine: Engine, shared: Shared | None) -> Cells:
    """Those of all workers."""
    own = own_counts(tally, engine)
    return total(iter([own, *(shared.others() if shared else ())]))


class _Counted(Collector):
    """Hands plain numbers to Prometheus' library."""

    def __init__(self, cells: Cells) -> None:
        self._cells = cells

    def collect(self) -> Iterator[Metric]:
        """Each metric, with a sample for each combination of its labels."""
        build = GaugeMetricFamily("attention_build_info", "The version that runs.", labels=("version",))
        build.add_metric((__version__,), 1)
        yield build
        kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
        families = {
            name: kinds[metric.kind](name, metric.help, labels=metric.labels) for name, metric in METRICS.items()
        }
        for (name, labels), value in sorted(self._cells.items()):
            if METRICS[name].kind == "histogram":
                families[name].add_metric(labels, _cumulative(value), sum_value=value[0])
            else:
                families[name].add_metric(labels, value)
        yield from families.values()


def _cumulative(cell: list[float]) -> list[tuple[str, float]]:
    """Buckets as Prometheus wants them: each with all that is below."""
    found, so_far = [], 0.0
    for bound, count in zip((*map(str, BUCKETS), "+Inf"), cell[1:], strict=True):
        so_far += count
        found.append((bound, so_far))
    return found
