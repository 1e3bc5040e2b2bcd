"""Compute: from a prepared request to its result, where admission control has put it."""

from __future__ import annotations

from service.attention.result import Result
from service.pipeline.admit import Place
from service.pipeline.batching import Batcher
from service.pipeline.execute import execute
from service.pipeline.execution import Execution
from service.pipeline.prepare import PreparedRequest


async def compute(request: PreparedRequest, place: Place, batcher: Batcher | None, execution: Execution) -> Result:
    """The result of a request, without blocking the event loop for long.

    Errors: InvalidRequest, MemoryLimit, Busy, TimeLimit, Cancelled.
    """
    if place == "inline":
        result = execute(request)
    else:
        async with execution.cancel_on_disconnect():
            if place == "batch":
                assert batcher is not None
                result = await batcher.compute(request, execution)
            else:
                result = await execution.in_thread(execute, request, execution.deadline)
        execution.release_slot()
    execution.timings.step("compute")
    execution.facts = result.facts
    return result
