"""Compute: from a prepared request to its result, at the place that `admit` returned."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attention_service.attention.result import Result
from attention_service.backends.base import OutOfMemory
from attention_service.pipeline.admit import Place, memory_limit_error
from attention_service.pipeline.deadline import Deadline
from attention_service.pipeline.execution import Execution
from attention_service.pipeline.prepare import PreparedRequest
from attention_service.runtime.machine import memory_left

if TYPE_CHECKING:
    from attention_service.pipeline.batching import Batcher


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
        execution.lease.release_slot()
    execution.timings.step("compute")
    execution.metadata = result.metadata
    return result


def execute(request: PreparedRequest, deadline: Deadline | None = None) -> Result:
    """The result of a prepared request. deadline: checked between tiles

    Errors: InvalidRequest, MemoryLimit; Cancelled and TimeLimit by the deadline.
    """
    check = None if deadline is None else deadline.check
    try:
        return request.strategy.program(request.sources, check)
    except OutOfMemory as error:
        needed, available = error.needed, error.available
    except MemoryError:
        needed, available = request.strategy.memory, None
    if available is None:
        available = memory_left()
    raise memory_limit_error(request.plan, needed, available)
